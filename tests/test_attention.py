"""Attention over owned rows against dense attention: outputs and all gradients, also over ranks that share rows."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longstraw import attention
from megatron_longstraw.attention import PromptRows, dense_attention, prompt_attention
from megatron_longstraw.prompt_state import OwnedRows, Pages, Phase, Segment
from tests.ranks import Layout, Ranks

TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6}
SCALE = 0.3


def _inputs(
    prompt: int, tokens: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(prompt * 1000 + tokens)
    shapes = [
        (tokens, heads, 16),
        (prompt + tokens, kv_heads, 16),
        (prompt + tokens, kv_heads, 16),
        (tokens, heads, 16),
    ]
    q, k, v, dout = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return q, k, v, dout


def _captured(k: Tensor, v: Tensor, prompt: int, pages: Pages) -> OwnedRows:
    rows = OwnedRows(
        length=prompt,
        shapes={"key": tuple(k.shape[1:]), "value": tuple(v.shape[1:])},
        pages=pages,
        dtype=k.dtype,
        device=k.device,
        gradient_dtype=torch.promote_types(k.dtype, torch.float32),
    )
    if prompt:
        rows.write(Segment(phase=Phase.CAPTURE, start=0, length=prompt), key=k[:prompt], value=v[:prompt])
    return rows


def _close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("prompt", [0, 20])
def test_packed_sequences_attend_as_each_alone(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each hands the kernel a log-sum-exp of its own: CUDA's flash attention reads one as contiguous."""
    aten = torch.ops.aten

    def backward(*arguments: Any, **options: Any) -> Any:
        assert arguments[5].is_contiguous()
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*arguments, **options)

    kernels = types.SimpleNamespace(
        _scaled_dot_product_flash_attention_for_cpu=aten._scaled_dot_product_flash_attention_for_cpu,
        _scaled_dot_product_flash_attention_for_cpu_backward=backward,
    )
    monkeypatch.setattr(attention, "_aten", kernels)
    inputs = _inputs(prompt, 12, 6, 2, torch.float64)
    packed = [slice(0, 5), slice(5, 6), slice(6, 12)]

    def run(tokens: slice, sequences: list[slice] | None) -> list[Tensor]:
        q, dout = (inputs[i][tokens].clone().requires_grad_() for i in (0, 3))
        k, v = (x[prompt:][tokens].clone().requires_grad_() for x in inputs[1:3])
        rows = _captured(inputs[1], inputs[2], prompt, Pages(4, 0, 1))
        out = prompt_attention(q, k, v, PromptRows(rows, prompt, 7, None), SCALE, sequences)
        out.backward(dout)
        return [out, q.grad, k.grad, v.grad, *rows.gradients.values()]

    together = run(slice(0, 12), packed)
    alone = [run(sequence, None) for sequence in packed]
    for one, *parts in zip(together[:4], *(part[:4] for part in alone), strict=True):
        _close(one, torch.cat(parts), torch.float64)
    for one, *parts in zip(together[4:], *(part[4:] for part in alone), strict=True):
        _close(one, sum(parts), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(("prompt", "tokens"), [(0, 1), (0, 9), (1, 1), (3, 1), (50, 7), (64, 64), (129, 33)])
@pytest.mark.parametrize("kernel", ["flash", "matmul"])
def test_equals_dense(
    prompt: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernel == "matmul":  # what runs on CUDA in float32 and float64
        monkeypatch.setattr(attention, "_SCORE_BYTES", 5000)
        monkeypatch.setattr(attention, "_attend", attention._matmul_attend)
        monkeypatch.setattr(attention, "_attend_backward", attention._matmul_attend_backward)
    q, k, v, dout = _inputs(prompt, tokens, heads, kv_heads, dtype)
    want_inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    want = dense_attention(*want_inputs, SCALE)
    want.backward(dout)

    rows = _captured(k, v, prompt, Pages(8, 0, 1))
    got_inputs = [x.clone().requires_grad_() for x in (q, k[prompt:], v[prompt:])]
    got = prompt_attention(*got_inputs, PromptRows(rows, prompt, 13, None), SCALE)
    got.backward(dout)

    _close(got, want, dtype)
    _close(got_inputs[0].grad, want_inputs[0].grad, dtype)
    for name, g, w in zip(("key", "value"), got_inputs[1:], want_inputs[1:], strict=True):
        _close(g.grad, w.grad[prompt:], dtype)
        _close(rows.gradients[name].to(dtype), w.grad[:prompt], dtype)


def test_gradients_of_responses_add_up() -> None:
    q, k, v, dout = _inputs(20, 5, 4, 2, torch.float64)
    rows = _captured(k, v, 20, Pages(8, 0, 1))
    for _ in range(3):
        inputs = [x.clone().requires_grad_() for x in (q, k[20:], v[20:])]
        prompt_attention(*inputs, PromptRows(rows, 20, 7, None), SCALE).backward(dout)
    once = _captured(k, v, 20, Pages(8, 0, 1))
    inputs = [x.clone().requires_grad_() for x in (q, k[20:], v[20:])]
    prompt_attention(*inputs, PromptRows(once, 20, 7, None), SCALE).backward(dout)
    _close(rows.gradients["key"], 3 * once.gradients["key"], torch.float64)


def test_bfloat16_is_as_near_as_its_rounding() -> None:
    q, k, v, dout = _inputs(40, 9, 4, 2, torch.bfloat16)
    want_inputs = [x.double().requires_grad_() for x in (q, k, v)]
    want = dense_attention(*want_inputs, SCALE)
    want.backward(dout.double())
    rows = _captured(k, v, 40, Pages(8, 0, 1))
    got_inputs = [x.clone().requires_grad_() for x in (q, k[40:], v[40:])]
    got = prompt_attention(*got_inputs, PromptRows(rows, 40, 13, None), SCALE)
    got.backward(dout)
    for g, w in (
        (got, want),
        (got_inputs[0].grad, want_inputs[0].grad),
        (rows.gradients["key"], want_inputs[1].grad[:40]),
    ):
        assert (g.double() - w).norm() <= 2**-7 * w.norm()


def _shared_rows(prompt: int, tokens: int, page: int, dtype: torch.dtype) -> dict[str, float]:
    """On each rank of an owner group: one KV head, this rank's query heads, its pages of the rows.

    Returns how far each result is from dense attention in float64, relative to that.
    """
    from megatron_longstraw.distributed import consecutive_group

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    heads = 2
    q, k, v, dout = _inputs(prompt, tokens, heads * size, 1, dtype)
    mine = slice(rank * heads, (rank + 1) * heads)
    want_inputs = [x.double().clone().requires_grad_() for x in (q, k, v)]
    want = dense_attention(*want_inputs, SCALE)
    want.backward(dout.double())

    pages = Pages(page, rank, size)
    rows = _captured(k, v, prompt, pages)
    got_inputs = [x.clone().requires_grad_() for x in (q[:, mine], k[prompt:], v[prompt:])]
    got = prompt_attention(*got_inputs, PromptRows(rows, prompt, 13, consecutive_group(size)), SCALE)
    got.backward(dout[:, mine])
    torch.distributed.all_reduce(got_inputs[1].grad)  # each rank has its heads' part of the current rows
    torch.distributed.all_reduce(got_inputs[2].grad)

    def apart(a: Tensor, b: Tensor) -> float:
        return ((a - b).norm() / b.norm()).item() if b.numel() else 0.0

    owned = [p for p in range(prompt) if (p // page) % size == rank]
    return {
        "out": apart(got, want[:, mine]),
        "dq": apart(got_inputs[0].grad, want_inputs[0].grad[:, mine]),
        "dk": apart(got_inputs[1].grad, want_inputs[1].grad[prompt:]),
        "dv": apart(got_inputs[2].grad, want_inputs[2].grad[prompt:]),
        "dkey rows": apart(rows.gradients["key"], want_inputs[1].grad[owned]),
        "dvalue rows": apart(rows.gradients["value"], want_inputs[2].grad[owned]),
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("prompt", "tokens", "page"), [(103, 7, 16), (5, 3, 16), (1, 1, 1)], ids=["uneven", "some own nothing", "one row"]
)
def test_shared_rows_equal_dense(ranks: Ranks, size: int, prompt: int, tokens: int, page: int) -> None:
    for rank, apart in enumerate(ranks.run(Layout(tp=size), _shared_rows, prompt, tokens, page, torch.float64)):
        assert all(value <= 1e-13 for value in apart.values()), (rank, apart)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("prompt", "page"), [(103, 16), (5, 16)], ids=["uneven", "some own nothing"])
def test_shared_rows_in_bfloat16(ranks: Ranks, size: int, prompt: int, page: int) -> None:
    for rank, apart in enumerate(ranks.run(Layout(tp=size), _shared_rows, prompt, 7, page, torch.bfloat16)):
        assert all(value <= 2**-7 for value in apart.values()), (rank, apart)
