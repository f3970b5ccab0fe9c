"""Causal attention of a segment over the prompt's owned rows and over itself, exact in both directions.

A segment may be several sequences behind each other: each attends to the prompt and to itself.

Results over disjoint sets of keys merge exactly (see `partial_attention`). In backward each set's gradients follow
from the *merged* out and lse, so no set needs the others' keys.

    out, lse = merge(attend(q, rows of the prompt), attend(q, own keys, causal))

Where W ranks share the rows (they share a KV head, and each owns 1/W of its rows) queries travel and rows
don't: the ranks gather all queries, attend over their own rows, and send each rank the results of its queries.
A rank's rows then get their whole gradient on the rank itself, with no reduction.

Which kernel runs (a choice by device and dtype, never a fallback): on CPU torch's flash attention; on CUDA
torch's flash attention for bfloat16 and float16, and matrix products in blocks for float32 and float64.

Shapes: T tokens of the segment, S keys, H query heads of this rank, K key/value heads (K divides H), D head
dimension, W ranks that share rows. Statistics (lse) and merged results are float32, or float64 for float64.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longstraw.partial_attention import gather, merge, merge_owners, scatter_heads, statistics_dtype
from megatron_longstraw.prompt_state import Attend, OwnedRows, attend_anew

_aten = torch.ops.aten
_SCORE_BYTES = 2**28
"""What the scores of one block of queries may take in the matrix-product kernel; backward has some three of them."""


@dataclass(frozen=True)
class PromptRows:
    """The part of the prompt that a segment reads.

    Args:
        rows: fields "key" and "value", each [rows, K, D].
        end: positions below this are read.
        block_tokens: rows that one kernel call reads.
        group: the ranks that share the rows, or None where this rank has them all.
    """

    rows: OwnedRows
    end: int
    block_tokens: int
    group: dist.ProcessGroup | None


def prompt_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    prompt: PromptRows | None,
    scale: float,
    sequences: Sequence[slice] | None = None,
    attend: Attend = attend_anew,
) -> Tensor:
    """Attention of each token over the prompt's rows and over its sequence up to itself.

    Args:
        q_THD: queries. k_TKD, v_TKD: keys and values of the same tokens.
        prompt: the prompt's rows, or None for a segment that starts its sequence. Backward adds their
            gradients to `prompt.rows` itself.
        scale: softmax scale.
        sequences: where each sequence lies among the tokens; by default there is one.
        attend: gives what this very attention computes; see `Runtime.attend_of`.

    Returns:
        [T, H, D] in the dtype of the queries.
    """
    if prompt is not None and prompt.end == 0:
        prompt = None
    return _PromptAttention.apply(q_THD, k_TKD, v_TKD, prompt, scale, sequences or [slice(None)], attend)


def dense_attention(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scale: float) -> Tensor:
    """Reference: the last T of S positions attend causally over all, with the whole [H, T, S] score matrix."""
    t, s = q_THD.shape[0], k_SKD.shape[0]
    repeat = q_THD.shape[1] // k_SKD.shape[1]
    k, v = (x.repeat_interleave(repeat, dim=1) for x in (k_SKD, v_SKD))
    scores = torch.einsum("thd,shd->hts", q_THD, k) * scale
    position = torch.arange(s, device=q_THD.device)
    scores = scores.masked_fill(position > position[s - t :, None], -math.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v)


class _PromptAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_TKD, v_TKD, prompt, scale, sequences, attend):  # type: ignore[no-untyped-def]
        def compute() -> tuple[Tensor, Tensor]:
            q, k, v = (_heads_first(x) for x in (q_THD, k_TKD, v_TKD))
            out, lse = _cat([_attend(q[:, s], k[:, s], v[:, s], True, scale) for s in sequences])
            if prompt is not None:
                out, lse = merge(out, lse, *_attend_prompt(q, prompt, scale))
            return out.to(q.dtype), lse

        out, lse = attend(compute)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out, lse)
        ctx.prompt, ctx.scale, ctx.sequences = prompt, scale, sequences
        return out.transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx, dout_THD):  # type: ignore[no-untyped-def]
        q_THD, k_TKD, v_TKD, out, lse = ctx.saved_tensors
        q, k, v, dout = (_heads_first(x) for x in (q_THD, k_TKD, v_TKD, dout_THD))

        def backward(s: slice) -> tuple[Tensor, Tensor, Tensor]:
            return _attend_backward(dout[:, s], q[:, s], k[:, s], v[:, s], out[:, s], lse[:, s], True, ctx.scale)

        dq, dk, dv = _cat([backward(s) for s in ctx.sequences])
        if ctx.prompt is not None:
            dq = dq.to(lse.dtype) + _attend_prompt_backward(dout, q, out, lse, ctx.prompt, ctx.scale)
        return *(x.transpose(0, 1).to(q.dtype) for x in (dq, dk, dv)), None, None, None, None


def _attend_prompt(q_HTD: Tensor, prompt: PromptRows, scale: float) -> tuple[Tensor, Tensor]:
    """Merged (out, lse) of this rank's heads over the prompt's rows of all owners."""
    if prompt.group is None:
        return _attend_own_rows(q_HTD, prompt, scale)
    of_own_rows = _attend_own_rows(gather(q_HTD, prompt.group), prompt, scale)
    return merge_owners(*of_own_rows, prompt.group)


def _attend_own_rows(q_HTD: Tensor, prompt: PromptRows, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) over the rows that this rank owns: zeros and -inf where it owns none of them."""
    statistics = statistics_dtype(q_HTD)
    out = q_HTD.new_zeros(q_HTD.shape, dtype=statistics)
    lse = q_HTD.new_full(q_HTD.shape[:2], -math.inf, dtype=statistics)
    for block in prompt.rows.blocks(prompt.end, prompt.block_tokens):
        k, v = (_heads_first(prompt.rows.read(name, prompt.end, block)) for name in ("key", "value"))
        out, lse = merge(out, lse, *_attend(q_HTD, k, v, False, scale))
    return out, lse


def _attend_prompt_backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, prompt: PromptRows, scale: float
) -> Tensor:
    """Adds the rows' gradients to the rows; returns dq [H, T, D] of the prompt's part, in the dtype of lse."""
    if prompt.group is not None:
        dout, q, out = gather(torch.cat([dout, q, out], -1), prompt.group).chunk(3, -1)
        lse = gather(lse, prompt.group)
    dq = torch.zeros_like(q, dtype=lse.dtype)
    for block in prompt.rows.blocks(prompt.end, prompt.block_tokens):
        k, v = (_heads_first(prompt.rows.read(name, prompt.end, block)) for name in ("key", "value"))
        dq_block, dk, dv = _attend_backward(dout, q, k, v, out, lse, False, scale)
        dq += dq_block
        prompt.rows.add_gradient(prompt.end, block, key=dk.transpose(0, 1), value=dv.transpose(0, 1))
    return dq if prompt.group is None else scatter_heads(dq, prompt.group)


# -- kernels: q [H, T, D], k and v [K, S, D] -> out [H, T, D], lse [H, T]; causal needs T = S


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], k[None], v[None], 0.0, causal, scale=scale
        )
    elif q.dtype in (torch.bfloat16, torch.float16):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q[None], k[None], v[None], 0.0, causal, False, scale=scale
        )
    else:
        return _matmul_attend(q, k, v, causal, scale)
    return out[0], lse[0]


def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of one set of keys, from the out and lse over all sets."""
    lse = lse.contiguous()  # CUDA's flash attention takes strides of all but this
    tensors = [x[None] for x in (dout, q, k, v, out, lse)]
    if q.device.type == "cpu":
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal, scale=scale)
    elif q.dtype in (torch.bfloat16, torch.float16):
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            *tensors, None, None, q.shape[1], k.shape[1], 0.0, causal, no_dropout, no_dropout, scale=scale
        )
    else:
        return _matmul_attend_backward(dout, q, k, v, out, lse, causal, scale)
    dq, dk, dv = gradients
    return dq[0], dk[0], dv[0]


def _matmul_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    for block in _query_blocks(q, k):
        first = block.start
        scores = _scores(q[:, block], k, first if causal else None, scale)
        lse[:, block] = scores.logsumexp(-1)
        p = (scores - lse[:, block, None]).exp_()
        out[:, block] = _per_query_head(p, v)
    return out, lse


def _matmul_attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for block in _query_blocks(q, k):
        first = block.start
        p = (_scores(q[:, block], k, first if causal else None, scale) - lse[:, block, None]).exp_()
        dv += _per_key_head(p, dout[:, block], k.shape[0])
        delta = (dout[:, block] * out[:, block]).sum(-1, keepdim=True)
        ds = p * (_per_query_head(dout[:, block], v.transpose(1, 2)) - delta) * scale
        dq[:, block] = _per_query_head(ds, k)
        dk += _per_key_head(ds, q[:, block], k.shape[0])
    return dq, dk, dv


def _query_blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    tokens = max(_SCORE_BYTES // (q.shape[0] * k.shape[1] * q.element_size()), 1)
    return (slice(first, first + tokens) for first in range(0, q.shape[1], tokens))


def _scores(q: Tensor, k: Tensor, causal_from: int | None, scale: float) -> Tensor:
    scores = _per_query_head(q, k.transpose(1, 2)) * scale
    if causal_from is not None:
        key = torch.arange(k.shape[1], device=q.device)
        query = torch.arange(causal_from, causal_from + q.shape[1], device=q.device)
        scores = scores.masked_fill(key > query[:, None], -math.inf)
    return scores


def _per_query_head(a: Tensor, b: Tensor) -> Tensor:
    """[H, T, X] @ [K, X, Y] -> [H, T, Y]: each KV head serves its H / K query heads."""
    return (a.reshape(b.shape[0], -1, a.shape[2]) @ b).reshape(a.shape[0], a.shape[1], b.shape[2])


def _per_key_head(a: Tensor, b: Tensor, kv_heads: int) -> Tensor:
    """[H, T, X]^T @ [H, T, Y] -> [K, X, Y], summed over the query heads of a KV head."""
    a, b = (x.reshape(kv_heads, -1, x.shape[2]) for x in (a, b))
    return a.transpose(1, 2) @ b


def _cat(parts: Sequence[tuple[Tensor, ...]]) -> Sequence[Tensor]:
    """Of each sequence tensors [H, T, ...] -> those of all of them, one behind the other."""
    return parts[0] if len(parts) == 1 else [torch.cat(tensors, 1) for tensors in zip(*parts, strict=True)]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)
