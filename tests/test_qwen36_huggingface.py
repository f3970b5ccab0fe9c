"""Qwen3.6 against transformers' Qwen3.5 text model, in float64: log-probs, every gradient, weights in and out.

transformers attends with torch's kernel ("sdpa"): the softmax of its eager attention is float32 by name.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_longstraw.config import RunConfig
from megatron_longstraw.float64 import keep_float64
from tests.qwen36 import TINY, qwen_run
from tests.ranks import Layout, Ranks

# rotary turns a quarter of a head; transformers wants its half split in three (time, height, width)
HEAD_DIM, ROTARY_SECTIONS = 32, [2, 1, 1]
PROMPT, RESPONSES = 59, (6, 1, 20)


def _huggingface_model() -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    t = TINY.transformer
    config = Qwen3_5TextConfig(
        vocab_size=TINY.vocab_size,
        hidden_size=t["hidden_size"],
        intermediate_size=t["ffn_hidden_size"],
        num_hidden_layers=t["num_layers"],
        num_attention_heads=t["num_attention_heads"],
        num_key_value_heads=t["num_query_groups"],
        head_dim=HEAD_DIM,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=t["linear_key_head_dim"],
        linear_value_head_dim=t["linear_value_head_dim"],
        linear_num_key_heads=t["linear_num_key_heads"],
        linear_num_value_heads=t["linear_num_value_heads"],
        full_attention_interval=4,
        rms_norm_eps=1e-6,
        initializer_range=0.1,
        use_cache=False,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_theta": TINY.rotary_base,
            "rope_type": "default",
            "partial_rotary_factor": TINY.rotary_percent,
            "mrope_section": ROTARY_SECTIONS,
            "mrope_interleaved": True,
        },
    )
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.2 * torch.randn_like(parameter)
            if name.endswith("dt_bias"):
                parameter += torch.randn_like(parameter)
            if name.endswith("A_log"):
                parameter -= 4.0  # states that last for tens of tokens
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen36") / "checkpoint"
    _huggingface_model().save_pretrained(folder, max_shard_size="200KB")
    return folder


def _run(layout: Layout) -> RunConfig:
    return qwen_run(layout, transformer={"kv_channels": HEAD_DIM})


def _tokens() -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(0, TINY.vocab_size, (n,), generator=generator)  # noqa: E731
    return draw(PROMPT), [draw(n) for n in RESPONSES]


def _loss(log_probs: Tensor) -> Tensor:
    return -(log_probs * torch.linspace(0.5, 1.5, len(log_probs), dtype=log_probs.dtype)).sum()


def _huggingface(folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs of the responses and gradients of all parameters, from whole sequences."""
    from transformers import Qwen3_5ForCausalLM

    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").train()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.double()
    prompt, responses = _tokens()
    found = []
    for response in responses:
        ids = torch.cat([prompt, response])[None]
        # positions as float64, so that angles are too
        logits = model(input_ids=ids[:, :-1], position_ids=torch.arange(ids.shape[1] - 1).double()[None]).logits
        log_probs = F.log_softmax(logits[0, PROMPT - 1 :], -1).gather(1, response[:, None])[:, 0]
        _loss(log_probs).backward()
        found.append(log_probs.detach())
    return found, {name: parameter.grad for name, parameter in model.named_parameters()}


def _megatron(run: RunConfig, folder: Path, schedule: str) -> tuple[list[Tensor], dict[str, tuple[Tensor, Any]]]:
    """The same from the weights in `folder`, by a schedule; gradients with their shards."""
    from megatron_longstraw.models import weight_map
    from megatron_longstraw.models.layers import HeadInput, log_prob_head
    from megatron_longstraw.models.parameters import named_parameters
    from megatron_longstraw.schedule import forward_backward, stock_forward_backward
    from megatron_longstraw.trainer import build_ddp_model, unwrapped
    from megatron_longstraw.weights import load_weights
    from megatron_longstraw.work import PromptGroup

    model = build_ddp_model(run)
    load_weights(unwrapped(model), folder, weight_map(run))
    for chunk in unwrapped(model):  # transformers' angles, not rounded to float32
        inner = chunk.rotary_pos_emb.inner
        inner.inv_freq = _inverse_frequencies(inner.inv_freq)

    def forward_step(items: Any, chunk: Any) -> Any:
        item = next(items)
        head = HeadInput(targets=item.targets, first_row=item.first_row, temperature=1.0, block_tokens=7)
        output = chunk(
            item.tokens, item.position_ids, None, output_processor=log_prob_head, output_processor_context=head
        )
        return output, lambda output: (_loss(output[0]), [output[0].detach().clone()])

    prompt, responses = _tokens()
    group = PromptGroup(prompt=prompt, responses=responses)
    if schedule == "stock":
        found = stock_forward_backward(forward_step_func=forward_step, groups=[group], model=model)
    else:
        found = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter([group]),
            model=model,
            num_microbatches=1,
            options=run.schedule,
        )
    parameters = named_parameters(unwrapped(model))
    return found, {p.name: (p.parameter.main_grad.clone(), p.shard) for p in parameters}  # type: ignore[attr-defined]


def _inverse_frequencies(like: Tensor) -> Tensor:
    """RoPE's inverse frequencies as transformers makes them in float32, widened."""
    dim = 2 * len(like)
    return (1.0 / (TINY.rotary_base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))).double()


def _parity(run: RunConfig, folder: Path, schedule: str) -> tuple[list[float], list[tuple[str, float, float]]]:
    """Largest differences of log-probs; per parameter the difference and the norm of the gradient."""
    from megatron_longstraw.models import weight_map

    with keep_float64():
        want, gradients = _huggingface(folder)
        found, ours = _megatron(run, folder, schedule)
    mapped = weight_map(run)
    apart = []
    for name, (gradient, shard) in ours.items():
        pieces = mapped(name)[0].pieces
        whole = torch.cat([gradients[piece.name][piece.start : piece.stop] for piece in pieces])
        part = shard.cut(whole)
        apart.append((name, (gradient - part).norm().item(), part.norm().item()))
    return [(a - b).abs().max().item() for a, b in zip(found, want, strict=True)], apart


@pytest.mark.parametrize("schedule", ["stock", "longstraw"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_log_probs_and_gradients_equal_transformers(
    ranks: Ranks, checkpoint: Path, layout: Layout, schedule: str
) -> None:
    for log_probs, apart in ranks.run(layout, _parity, _run(layout), checkpoint, schedule):
        assert max(log_probs) <= 1e-12
        total = sum(norm**2 for _, _, norm in apart) ** 0.5
        for name, difference, norm in apart:
            assert norm > 0, name
            assert difference <= 1e-9 * norm + 1e-12 * total, (name, difference, norm)


def _logits(run: RunConfig, folder: Path) -> float:
    """Largest difference of logits over one sequence, gathered over TP."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from transformers import Qwen3_5ForCausalLM

    from megatron_longstraw.models import build_model, weight_map
    from megatron_longstraw.weights import load_weights

    ids = _tokens()[0][None, : PROMPT - 1]
    positions = torch.arange(ids.shape[1])[None]
    reference = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    reference.model.rotary_emb.inv_freq = reference.model.rotary_emb.inv_freq.double()
    (model,) = build_model(run)
    load_weights([model], folder, weight_map(run))
    inner = model.rotary_pos_emb.inner
    inner.inv_freq = _inverse_frequencies(inner.inv_freq)
    with keep_float64(), torch.no_grad():
        want = reference(input_ids=ids, position_ids=positions.double()).logits
        found = gather_from_tensor_model_parallel_region(model(ids, positions, None))
    assert want.abs().max() > 0.5
    return (found - want).abs().max().item()


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_logits_equal_transformers(ranks: Ranks, checkpoint: Path, layout: Layout) -> None:
    assert max(ranks.run(layout, _logits, _run(layout), checkpoint)) <= 1e-12


def _rewrite(run: RunConfig, source: Path, target: Path) -> tuple[int, int]:
    """Reads and writes a checkpoint; returns bytes read on this rank, and bytes of its parameters."""
    from megatron_longstraw.models import build_model, weight_map
    from megatron_longstraw.weights import load_weights, save_weights

    model = build_model(run)
    read = load_weights(model, source, weight_map(run)).bytes_read
    save_weights(model, target, weight_map(run), like=source)
    return read, sum(p.nbytes for chunk in model for p in chunk.parameters())


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, pp=2)], ids=str)
def test_weights_come_back_bit_by_bit(ranks: Ranks, checkpoint: Path, tmp_path: Path, layout: Layout) -> None:
    from transformers import Qwen3_5ForCausalLM

    for read, kept in ranks.run(layout, _rewrite, _run(layout), checkpoint, tmp_path / "out"):
        assert read == kept
    load = lambda folder: Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()  # noqa: E731
    want, found = load(checkpoint), load(tmp_path / "out")
    assert want.keys() == found.keys()
    for name in want:
        # out_norm is stored less 1, so its last bit may be lost
        exact = not name.endswith("linear_attn.norm.weight")
        torch.testing.assert_close(found[name], want[name], rtol=0 if exact else 1e-15, atol=0 if exact else 1e-15)


def _map_of(run: RunConfig, name: str) -> list[str]:
    from megatron_longstraw.models import weight_map

    return [source.pieces[0].name for source in weight_map(run)(name)]


def test_checkpoints_with_images_and_tied_embeddings_are_read(ranks: Ranks) -> None:
    run = _run(Layout())
    (names,) = ranks.run(Layout(), _map_of, run, "decoder.layers.2.mlp.linear_fc2.weight")
    assert names == ["model.layers.2.mlp.down_proj.weight", "model.language_model.layers.2.mlp.down_proj.weight"]
    (names,) = ranks.run(Layout(), _map_of, run, "output_layer.weight")
    assert names[0] == "lm_head.weight"
    assert names[-2:] == ["model.embed_tokens.weight", "model.language_model.embed_tokens.weight"]


def test_an_unmapped_architecture_is_refused(ranks: Ranks) -> None:
    run = _run(Layout())
    dense = {k: v for k, v in run.model.transformer.items() if not k.startswith("linear_")}
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, architecture="gqa", transformer=dense))
    with pytest.raises(AssertionError, match="weights of architecture gqa can't be read"):
        ranks.run(Layout(), _map_of, run, "output_layer.weight")
