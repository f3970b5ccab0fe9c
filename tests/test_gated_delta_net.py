"""The Gated DeltaNet layer over prompt chunks, against a delta rule that goes token by token."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_longstraw.config import ConfigError, ParallelConfig
from megatron_longstraw.float64 import keep_float64
from tests.qwen36 import qwen_run
from tests.ranks import Layout, Ranks

HIDDEN = 32


def _naive(layer: Any, hidden: Tensor) -> Tensor:
    """Reference: [T, hidden] to [T, hidden], one token after another (arXiv 2412.06464, equation 10).

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T;  o_t = S_t^T q_t / sqrt(D)
    """
    keys, values = layer.num_key_heads, layer.num_value_heads
    key_dim, value_dim, width = layer.key_head_dim, layer.value_head_dim, layer.conv_kernel_dim
    norm = layer.in_proj.layer_norm_weight + 1
    projected = F.rms_norm(hidden, (HIDDEN,), norm, 1e-6) @ layer.in_proj.weight.T
    sections = [2 * keys * key_dim + values * value_dim, values * value_dim, values, values]
    qkv, gate, beta, alpha = projected.split(sections, -1)
    padded = torch.cat([qkv.new_zeros(width - 1, qkv.shape[1]), qkv])
    weight = layer.conv1d.weight[:, 0]  # [C, K]
    qkv = F.silu(torch.stack([(padded[t : t + width].T * weight).sum(1) for t in range(len(hidden))]))
    q, k, v = qkv.split([keys * key_dim, keys * key_dim, values * value_dim], -1)
    q, k = (x.view(-1, keys, key_dim).repeat_interleave(values // keys, 1) for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    v = v.view(-1, values, value_dim)
    decay = (-layer.A_log.exp() * F.softplus(alpha + layer.dt_bias)).exp()
    beta = beta.sigmoid()
    state = hidden.new_zeros(values, key_dim, value_dim)
    outs = []
    for t in range(len(hidden)):
        state = state * decay[t][:, None, None]
        error = v[t] - torch.einsum("hde,hd->he", state, k[t])
        state = state + torch.einsum("hd,he->hde", k[t] * beta[t][:, None], error)
        outs.append(torch.einsum("hde,hd->he", state, q[t]) * key_dim**-0.5)
    out = F.rms_norm(torch.stack(outs), (value_dim,), layer.out_norm.weight + 1, 1e-6)
    out = out * F.silu(gate.view(-1, values, value_dim))
    return out.reshape(len(hidden), -1) @ layer.out_proj.weight.T


def _layer(run: Any) -> tuple[Any, Any]:
    """A recurrent layer's GatedDeltaNet, which remembers, and the runtime."""
    from megatron_longstraw.models import build_model

    (model,) = build_model(run)
    layer = model.decoder.layers[0].self_attention
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        layer.A_log.sub_(4.0)
        for parameter in (layer.in_proj.weight, layer.out_proj.weight, layer.in_proj.layer_norm_weight):
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.2)
    return layer, model.runtime


def _gradients(layer: Any, hidden: Tensor) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in layer.named_parameters()}
    found["hidden"] = hidden.grad.clone()
    layer.zero_grad()
    hidden.grad = None
    return found


def _chunked_against_naive(lengths: list[int], responses: list[int]) -> list[tuple[str, float]]:
    """Relative differences of the output and of each gradient of a prompt in chunks and the responses behind it, which
    are one micro-batch."""
    from megatron_longstraw.prompt_state import Phase, PromptState, Segment, StateOptions

    layer, runtime = _layer(qwen_run(Layout()))
    prompt, response = sum(lengths), sum(responses)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(prompt + response, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    dout = torch.randn(prompt + response, HIDDEN, generator=generator, dtype=torch.float64)
    of_prompt, *of_responses = hidden.split([prompt, *responses])
    behind = [_naive(layer, torch.cat([of_prompt, own]))[prompt:] for own in of_responses]
    want = torch.cat([_naive(layer, of_prompt), *behind])
    want.backward(dout)
    want_gradients = _gradients(layer, hidden)

    runtime.state = state = PromptState(prompt, StateOptions(gradient_dtype=torch.float64, boundary_spacing=1))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    chunks = list(zip(starts, lengths, strict=True))
    outs = []

    def run(phase: Phase, start: int, length: int, packed: tuple[int, ...] = ()) -> Tensor:
        runtime.begin(Segment(phase=phase, start=start, length=length, packed=packed))
        return layer(hidden[start : start + length, None], None)[0][:, 0]

    with keep_float64():
        with torch.no_grad():
            outs += [run(Phase.CAPTURE, *chunk) for chunk in chunks]
        out = run(Phase.RESPONSE, prompt, response, tuple(responses) if len(responses) > 1 else ())
        out.backward(dout[prompt:])
        outs.append(out.detach())
        for start, length in reversed(chunks):
            run(Phase.PROMPT, start, length).backward(dout[start : start + length])
    state.check_complete()
    differences = [("out", ((torch.cat(outs) - want).norm() / want.norm()).item())]
    for name, gradient in _gradients(layer, hidden).items():
        differences.append((name, ((gradient - want_gradients[name]).norm() / want_gradients[name].norm()).item()))
    return differences


@pytest.mark.parametrize(
    ("lengths", "responses"),
    [
        ([1], [1]),
        ([2, 1, 1], [2]),
        ([3, 4, 5], [3]),
        ([64, 7], [65]),
        ([63, 65, 1], [4]),
        ([40], [130]),
        ([1], [5, 2]),
        ([64, 7], [70, 3, 128, 1, 64, 66]),  # of one and of two chunks of the rule, in turn
    ],
    ids=lambda x: "-".join(map(str, x)),
)
def test_chunks_equal_token_by_token(ranks: Ranks, lengths: list[int], responses: list[int]) -> None:
    (differences,) = ranks.run(Layout(), _chunked_against_naive, lengths, responses)
    assert len(differences) == 9
    for name, difference in differences:
        assert difference <= 1e-11, (name, difference)


def _choice(deterministic: bool | None, have_fla: bool, cuda: bool) -> str:
    from unittest import mock

    from megatron_longstraw.models import gated_delta_net

    with (
        mock.patch.object(gated_delta_net.common, "HAVE_FLA", have_fla),
        mock.patch.object(torch.cuda, "is_available", return_value=cuda),
    ):
        return gated_delta_net.resolve_delta_rule(deterministic)


def test_kernels_are_chosen_once_by_what_is_there(ranks: Ranks) -> None:
    """What runs with flash-linear-attention on a GPU is not exercised."""
    choose = lambda *arguments: ranks.run(Layout(), _choice, *arguments)[0]  # noqa: E731
    assert choose(None, True, True) == "flash-linear-attention"
    assert choose(False, True, True) == "flash-linear-attention"
    assert choose(True, True, True) == "torch"
    assert choose(None, False, True) == "torch"
    assert choose(None, True, False) == "torch"
    with pytest.raises(AssertionError, match=r"deterministic_mode=False.*does not import"):
        choose(False, False, True)


def _build() -> tuple[bool, bool]:
    from megatron.core.ssm.gated_delta_net import common

    before = common.HAVE_FLA
    _layer(qwen_run(Layout()))
    x = torch.randn(3, 5, dtype=torch.bfloat16)
    want = torch.nn.functional.normalize(x.float(), dim=-1).to(torch.bfloat16)
    return before == common.HAVE_FLA, torch.allclose(common.l2norm(x), want, atol=1e-2)


def test_building_leaves_megatrons_flag_as_it_was(ranks: Ranks) -> None:
    assert ranks.run(Layout(), _build) == [(True, True)]


def _build_without_sequence_parallelism() -> None:
    from megatron_longstraw.models import build_model, transformer_config

    run = qwen_run(Layout(tp=2))
    config = transformer_config(run)
    config.sequence_parallel = False
    with mock.patch("megatron_longstraw.models.transformer_config", return_value=config):
        build_model(run)


def test_tensor_parallelism_without_sequence_parallelism_is_refused(ranks: Ranks) -> None:
    run = qwen_run(Layout(tp=2))
    with pytest.raises(ConfigError, match=r"parallel\.sequence_parallel=false"):
        dataclasses.replace(run, parallel=ParallelConfig(tp=2, sequence_parallel=False))
    with pytest.raises(AssertionError, match="sequence_parallel=False with tensor_model_parallel_size=2"):
        ranks.run(Layout(tp=2), _build_without_sequence_parallelism)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("linear_num_key_heads", 3, "must be a multiple of parallel.tp=2"),
        ("linear_num_value_heads", 6, "must be a multiple of linear_num_key_heads=4"),
        ("num_moe_experts", 4, "architecture qwen36 is dense"),
        ("experimental_attention_variant", "dsa", "architecture qwen36 has Gated DeltaNet layers"),
        ("multi_latent_attention", True, "architecture qwen36 has keys and values per head"),
    ],
)
def test_settings_are_refused_by_name(setting: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=setting) as error:
        qwen_run(Layout(tp=2), transformer={setting: value})
    assert message in str(error.value)
