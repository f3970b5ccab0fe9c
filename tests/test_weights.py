"""Weights in and out of HuggingFace folders, and the architectures against transformers through the weight map."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from megatron_longstraw.config import RunConfig
from megatron_longstraw.float64 import keep_float64
from megatron_longstraw.models.glm52 import glm52_weight_map
from megatron_longstraw.models.parameters import Shard
from megatron_longstraw.models.weight_map import Piece, Source
from megatron_longstraw.weights import SafetensorsFolder, WeightError
from tests.glm52 import tiny_glm
from tests.ranks import Layout, RankError, Ranks

LAYOUTS = [Layout(), Layout(tp=2, ep=2), Layout(pp=2)]
LENGTH = 48


def _huggingface_config() -> Any:
    """The tiny GLM-5.2 of tests.glm52, as transformers has it."""
    from transformers import GlmMoeDsaConfig

    t = tiny_glm(Layout()).model.transformer
    config = GlmMoeDsaConfig(
        vocab_size=256,
        hidden_size=t["hidden_size"],
        intermediate_size=t["ffn_hidden_size"],
        moe_intermediate_size=t["moe_ffn_hidden_size"],
        num_hidden_layers=t["num_layers"],
        num_attention_heads=t["num_attention_heads"],
        num_key_value_heads=t["num_attention_heads"],
        n_shared_experts=1,
        n_routed_experts=t["num_moe_experts"],
        num_experts_per_tok=t["moe_router_topk"],
        routed_scaling_factor=2.5,
        kv_lora_rank=t["kv_lora_rank"],
        q_lora_rank=t["q_lora_rank"],
        qk_rope_head_dim=t["qk_pos_emb_head_dim"],
        qk_nope_head_dim=t["qk_head_dim"],
        v_head_dim=t["v_head_dim"],
        n_group=1,
        topk_group=1,
        index_topk=t["dsa_indexer_topk"],
        index_head_dim=t["dsa_indexer_head_dim"],
        index_n_heads=t["dsa_indexer_n_heads"],
        index_topk_freq=4,
        index_skip_topk_offset=3,
        first_k_dense_replace=2,
        mlp_layer_types=["dense", "dense", "sparse", "sparse", "sparse"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 8e6, "rope_type": "default"},
        initializer_range=0.1,
        use_cache=False,
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def _huggingface_model() -> Any:
    """The same random model each time, in float64."""
    from transformers import GlmMoeDsaForCausalLM

    torch.manual_seed(0)
    model = GlmMoeDsaForCausalLM(_huggingface_config()).double()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name:
            tensor.data += 0.2 * torch.randn_like(tensor)
        elif "e_score" in name:  # float32, as Megatron keeps the bias
            tensor.data.copy_((0.3 * torch.randn_like(tensor)).float())
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint, written by transformers into several files."""
    folder = tmp_path_factory.mktemp("glm")
    _huggingface_model().save_pretrained(folder, max_shard_size="300KB")
    return folder


def _ids() -> Tensor:
    return torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(3))


def _model(run: RunConfig, folder: Path) -> tuple[list[Any], Any]:
    from megatron_longstraw.models import weight_map
    from megatron_longstraw.trainer import build_ddp_model, unwrapped
    from megatron_longstraw.weights import load_weights

    model = build_ddp_model(run)
    return model, load_weights(unwrapped(model), folder, weight_map(run))


def _bytes_read(run: RunConfig, folder: Path) -> tuple[int, int]:
    """What was read, and what the rank holds, as the folder's dtypes have it."""
    from megatron_longstraw.models.parameters import named_tensors
    from megatron_longstraw.trainer import unwrapped

    model, source = _model(run, folder)
    held = list(named_tensors(unwrapped(model)))
    return source.bytes_read, sum(item.tensor.numel() * 8 for item in held)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_rank_reads_what_it_keeps(ranks: Ranks, checkpoint: Path, layout: Layout) -> None:
    for read, held in ranks.run(layout, _bytes_read, tiny_glm(layout), checkpoint):
        assert read == held
    if layout == Layout():
        files = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        assert read <= files


def _round_trip(run: RunConfig, folder: Path, target: Path) -> None:
    from megatron_longstraw.models import weight_map
    from megatron_longstraw.trainer import unwrapped
    from megatron_longstraw.weights import save_weights

    model, _ = _model(run, folder)
    save_weights(unwrapped(model), target, weight_map(run), like=folder, file_bytes=50_000)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_written_folder_is_the_one_read(ranks: Ranks, checkpoint: Path, tmp_path: Path, layout: Layout) -> None:
    ranks.run(layout, _round_trip, tiny_glm(layout), checkpoint, tmp_path)
    want, got = _all_tensors(checkpoint), _all_tensors(tmp_path)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name].double(), tensor.double()), name
    assert (tmp_path / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    assert len(list(tmp_path.glob("*.safetensors"))) > layout.world_size
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(want)


def _logits_and_gradients(run: RunConfig, folder: Path) -> tuple[Tensor | None, list[Any]]:
    """Of the mean of -log p(next token) over the sequence, computed as the stock schedule runs it."""
    from megatron_longstraw.models.parameters import named_parameters
    from megatron_longstraw.schedule import stock_forward_backward
    from megatron_longstraw.trainer import unwrapped
    from megatron_longstraw.work import PromptGroup
    from tests.exactness import FullParameter

    model, _ = _model(run, folder)
    for chunk in unwrapped(model):
        for module in chunk.modules():
            if hasattr(module, "inv_freq"):
                module.inv_freq = 8e6 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    for ddp in model:
        ddp.zero_grad_buffer()
    logits: list[Tensor] = []

    def forward_step(items: Iterator[Any], chunk: Any) -> Any:
        item = next(items)
        output = chunk(item.tokens, item.position_ids, None)

        def loss_func(output: Tensor) -> tuple[Tensor, list[dict[str, Tensor]]]:
            from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

            whole = gather_from_tensor_model_parallel_region(output)[0, : len(item.targets)]
            logits.append(whole.detach())
            return F.cross_entropy(whole, item.targets), [{}]

        return output, loss_func

    ids = _ids()
    group = PromptGroup(prompt=ids[:1], responses=[ids[1:]])
    with keep_float64():
        stock_forward_backward(
            forward_step_func=forward_step, groups=[group], model=model, recompute=False, force_all_reduce=True
        )
    parts = [FullParameter(p.name, p.parameter.main_grad.clone(), p.shard) for p in named_parameters(unwrapped(model))]
    return (logits[0] if logits else None), parts


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, ep=2)], ids=str)
def test_glm52_equals_transformers(
    ranks: Ranks, checkpoint: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and every gradient in float64, on weights that went through the map."""
    from tests.exactness import join

    results = ranks.run(layout, _logits_and_gradients, tiny_glm(layout, moe_router_bias_update_rate=0.0), checkpoint)
    model = _huggingface_model()
    model.model.rotary_emb.inv_freq = 8e6 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    ids = _ids()
    softmax = F.softmax  # transformers asks it for float32
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))
    with keep_float64():
        logits = model(ids[None, :-1]).logits[0]
        F.cross_entropy(logits, ids[1:]).backward()
    for got, _ in results:
        assert got is not None
        assert (got - logits).abs().max() < 1e-12
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = torch.cat([g.flatten() for g in gradients.values()]).norm()
    compared = set()
    for name, got in join([parts for _, parts in results]).items():
        source = next(s for s in reversed(glm52_weight_map(name)) if all(_known(model, p) for p in s.pieces))
        if not all(piece.name in gradients for piece in source.pieces):
            assert ".indexer." in name and not got.any()
            continue
        compared.update(piece.name for piece in source.pieces)
        want = torch.cat([gradients[p.name] if p.entry is None else gradients[p.name][p.entry] for p in source.pieces])
        assert (got - want).norm() <= 1e-9 * want.norm() + 1e-12 * whole, (name, (got - want).norm(), want.norm())
    assert compared == set(gradients)


def _known(model: Any, piece: Piece) -> bool:
    return piece.name in model.state_dict()


def test_missing_and_misshapen_tensors_are_named(ranks: Ranks, checkpoint: Path, tmp_path: Path) -> None:
    tensors = _all_tensors(checkpoint)
    name = "model.layers.3.mlp.experts.5.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors")
    with pytest.raises(RankError, match=rf"needs {name}, which the checkpoint doesn't have"):
        ranks.run(Layout(), _bytes_read, tiny_glm(Layout()), tmp_path)
    save_file({**tensors, "model.norm.weight": torch.ones(7)}, tmp_path / "model.safetensors")
    with pytest.raises(RankError, match=r"model.norm.weight make decoder.final_layernorm.weight of shape \[7\]"):
        ranks.run(Layout(), _bytes_read, tiny_glm(Layout()), tmp_path)
    with pytest.raises(WeightError, match="no safetensors files here"):
        SafetensorsFolder(checkpoint / "nowhere")


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="isn't quantized"):
        SafetensorsFolder(tmp_path).read(Piece("x"), slice(0, 2))


def test_stacked_experts_are_read_too() -> None:
    preferred, stacked = glm52_weight_map("decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight")
    folder = "model.layers.3.mlp.experts."
    assert preferred == Source([Piece(f"{folder}5.gate_proj.weight"), Piece(f"{folder}5.up_proj.weight")])
    assert stacked == Source([Piece(f"{folder}gate_up_proj", entry=5)])
    with pytest.raises(KeyError, match="no parameter"):
        glm52_weight_map("decoder.layers.3.mlp.nothing")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("stride", [1, 2])
def test_shards_join_to_the_whole(dim: int, stride: int) -> None:
    whole = torch.arange(96.0).view(12, 8)
    shards = [Shard(dim, stride, rank, 2) for rank in range(2)]
    parts = [shard.cut(whole) for shard in shards]
    assert torch.equal(shards[0].join(parts), whole)
    for shard, part in zip(shards, parts, strict=True):
        ranges = shard.ranges(whole.shape[dim])
        assert torch.equal(torch.cat([whole.narrow(dim, r.start, r.stop - r.start) for r in ranges], dim), part)
        assert shard.full_shape(part.shape) == [12, 8]


def _all_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors
