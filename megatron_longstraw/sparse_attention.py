"""Sparse attention over latents (MLA + DSA): each token attends to the few positions that were chosen for it.

The prompt's rows are split by pages over an owner group, and current rows are on every rank. Queries travel, rows
don't:

    attend   the group gathers the queries of all heads; each rank attends, with all heads, to those of its own
             rows that were chosen, and sends each rank the results of that rank's heads, which merge by
             log-sum-exp. The current rows' part is computed by each rank for its own heads, and merged in.
    back     dq is reduce-scattered; a row's gradient is complete on its owner.

A segment may be several sequences behind each other, which all follow the prompt and don't see each other.

Shapes: T tokens of the segment (n of a block, m of a stretch: see `latent_rows`), K chosen positions (-1 where fewer
exist), H attention heads of this rank, D width of a row (a key; its first V values are the value, too), W ranks of the
owner group. Statistics and merged results are float32, or float64 for float64.

Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_longstraw.latent_rows import LatentRows, blocks, product, stretches
from megatron_longstraw.partial_attention import (
    gather_heads,
    merge,
    merge_owners,
    probabilities,
    scatter_heads,
    statistics_dtype,
)
from megatron_longstraw.prompt_state import Attend, OwnedRows, Segment, attend_anew


def sparse_attention(
    q_THD: Tensor,
    rows_TD: Tensor,
    chosen_TK: Tensor,
    prompt: LatentRows | None,
    *,
    value_width: int,
    scale: float,
    query_block: int,
    sequences: Sequence[slice] | None = None,
    attend: Attend = attend_anew,
) -> Tensor:
    """Attention of each token over its chosen positions.

    Args:
        q_THD: queries. rows_TD: the rows of the same tokens, on every rank of the owner group.
        chosen_TK: from `position_choice.choose_positions`.
        prompt: the prompt's rows, or None for a segment that starts its sequence. Backward adds their gradients to
            `prompt.rows` itself.
        value_width: V.
        scale: softmax scale.
        query_block: queries in a block.
        sequences: where each sequence lies among the tokens; by default there is one.
        attend: gives the output and log-sum-exp of this very attention; see `Runtime.attend_of`.

    Returns:
        [T, H, V] in the dtype of the queries. The gradient of `rows_TD` is this rank's heads' part: the caller's
        gather over sequence-parallel ranks sums it.
    """
    tokens = len(q_THD)
    first = torch.empty(tokens, 1, dtype=torch.int64, device=q_THD.device)
    for sequence in sequences or [slice(0, tokens)]:
        first[sequence] = sequence.start
    return _SparseAttention.apply(q_THD, rows_TD, chosen_TK, first, prompt, value_width, scale, query_block, attend)


def inject_latent_gradient(latent: Tensor, rows: OwnedRows, segment: Segment) -> Tensor:
    """Identity on a prompt chunk's rows [T, D]; backward adds, on each row's owner, the gradient it gathered."""
    return _InjectLatentGradient.apply(latent, rows, segment)


def latent_root(q_THD: Tensor, latent: Tensor, value_width: int, rows: OwnedRows, segment: Segment) -> Tensor:
    """In place of attention where only the rows matter (the last layer of a prompt chunk).

    Returns zeros [T, H, V]; backward ignores their gradient and gives the rows what they gathered.
    """
    return _LatentRoot.apply(q_THD, latent, value_width, rows, segment)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, rows, chosen, first, prompt, value_width, scale, query_block, attend):  # type: ignore[no-untyped-def]
        out, lse = attend(lambda: _attend_all(q, rows, chosen, first, prompt, value_width, scale, query_block))
        ctx.save_for_backward(q, rows, chosen, first, out, lse)
        ctx.prompt, ctx.scale, ctx.query_block = prompt, scale, query_block
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        q, rows, chosen, first, out, lse = ctx.saved_tensors
        prompt, scale = ctx.prompt, ctx.scale
        dq = torch.empty_like(q, dtype=lse.dtype)
        drows = torch.zeros_like(rows, dtype=lse.dtype)
        add = functools.partial(drows.index_add_, 0)
        for stretch in stretches(len(q), ctx.query_block):
            delta = (dout[stretch].to(lse.dtype) * out[stretch]).sum(-1)
            queries = dout[stretch], q[stretch], lse[stretch], delta
            own = _own_rows(chosen[stretch], first[stretch], prompt)
            dq[stretch] = _attend_backward(*queries, rows, own, scale, ctx.query_block, add)
            if prompt is not None:
                dq[stretch] += _attend_prompt_backward(*queries, chosen[stretch], prompt, scale, ctx.query_block)
        return dq.to(q.dtype), drows.to(rows.dtype), None, None, None, None, None, None, None


class _InjectLatentGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, latent, rows: OwnedRows, segment: Segment):  # type: ignore[no-untyped-def]
        ctx.rows, ctx.segment = rows, segment
        return latent.view_as(latent)

    @staticmethod
    def backward(ctx, dlatent):  # type: ignore[no-untyped-def]
        dlatent = dlatent.clone()
        ctx.rows.take_gradient(ctx.segment, latent=dlatent)
        return dlatent, None, None


class _LatentRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, latent, value_width: int, rows: OwnedRows, segment: Segment):  # type: ignore[no-untyped-def]
        ctx.rows, ctx.segment = rows, segment
        ctx.shapes = q.shape, latent.shape
        return q.new_zeros(*q.shape[:2], value_width)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        q_shape, latent_shape = ctx.shapes
        dlatent = dout.new_zeros(latent_shape)
        ctx.rows.take_gradient(ctx.segment, latent=dlatent)
        return dout.new_zeros(q_shape), dlatent, None, None, None


def _attend_all(
    q: Tensor,
    rows: Tensor,
    chosen: Tensor,
    first: Tensor,
    prompt: LatentRows | None,
    value_width: int,
    scale: float,
    query_block: int,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V], lse [T, H]) over the chosen rows of the prompt and of the segment.

    Args:
        first: [T, 1] the row where the sequence of each token starts.
        others: as `sparse_attention`.
    """
    out = q.new_empty(*q.shape[:2], value_width)
    lse = q.new_empty(q.shape[:2], dtype=statistics_dtype(q))
    for stretch in stretches(len(q), query_block):
        own = _own_rows(chosen[stretch], first[stretch], prompt)
        part = _attend(q[stretch], rows, own, value_width, scale, query_block)
        if prompt is not None:
            of_prompt = _attend_prompt(q[stretch], chosen[stretch], prompt, value_width, scale, query_block)
            part = merge(*part, *of_prompt)
        out[stretch], lse[stretch] = part
    return out, lse


# -- attention of queries [m, H, D], block by block, over chosen rows; chosen holds rows [m, C], -1 for none


def _attend(
    q: Tensor, rows: Tensor, chosen: Tensor, value_width: int, scale: float, query_block: int
) -> tuple[Tensor, Tensor]:
    """(out [m, H, V], lse [m, H]): zeros and -inf where a query has chosen none."""
    lse = q.new_empty(q.shape[:2], dtype=statistics_dtype(q))
    out = q.new_empty(*q.shape[:2], value_width, dtype=lse.dtype)
    for block in blocks(slice(0, len(q)), query_block):
        keys, scores = _chosen_scores(q[block], rows, _compact(chosen[block]), scale)
        lse[block] = scores.logsumexp(-1)
        p = probabilities(scores, lse[block, :, None])
        out[block] = product(p.to(keys.dtype), keys[..., :value_width])
    return out, lse


def _attend_backward(
    dout: Tensor,
    q: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows: Tensor,
    chosen: Tensor,
    scale: float,
    query_block: int,
    add: Callable[[Tensor, Tensor], Any],
) -> Tensor:
    """dq [m, H, D], from the lse over all rows and delta = dout . out.

    `add` takes rows [i], of which some may be the same, and what their gradients [i, D] are to grow by.
    """
    dq = torch.empty_like(q, dtype=lse.dtype)
    value_width = dout.shape[-1]
    for block in blocks(slice(0, len(q)), query_block):
        current = _compact(chosen[block])
        keys, scores = _chosen_scores(q[block], rows, current, scale)
        p = probabilities(scores, lse[block, :, None])
        dp = product(dout[block], keys[..., :value_width].transpose(1, 2))
        ds = (p * (dp - delta[block, :, None]) * scale).to(keys.dtype)
        dchosen = product(ds.transpose(1, 2), q[block])
        dchosen[..., :value_width] += product(p.to(keys.dtype).transpose(1, 2), dout[block])
        dq[block] = product(ds, keys)
        add(current.clamp(min=0).flatten(), dchosen.flatten(0, 1))
    return dq


def _attend_prompt(
    q: Tensor, chosen: Tensor, prompt: LatentRows, value_width: int, scale: float, query_block: int
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's heads over the chosen rows of all owners."""
    own = _owned_choices(chosen, prompt)
    if prompt.group is None:
        return _attend(q, prompt.latents, own, value_width, scale, query_block)
    of_own_rows = _attend(gather_heads(q, prompt.group, 1), prompt.latents, own, value_width, scale, query_block)
    return merge_owners(*of_own_rows, prompt.group, 1)


def _attend_prompt_backward(
    dout: Tensor,
    q: Tensor,
    lse: Tensor,
    delta: Tensor,
    chosen: Tensor,
    prompt: LatentRows,
    scale: float,
    query_block: int,
) -> Tensor:
    """Adds the rows' gradients to the rows; returns dq [m, H, D] of the prompt's part."""
    own = _owned_choices(chosen, prompt)
    if prompt.group is not None:
        widths = [dout.shape[-1], q.shape[-1]]
        dout, q = gather_heads(torch.cat([dout, q], -1), prompt.group, 1).split(widths, -1)
        lse, delta = gather_heads(torch.stack([lse, delta], -1), prompt.group, 1).unbind(-1)

    def add(rows: Tensor, gradient: Tensor) -> None:
        prompt.rows.add_gradient_at(prompt.end, rows, latent=gradient)

    dq = _attend_backward(dout, q, lse, delta, prompt.latents, own, scale, query_block, add)
    return dq if prompt.group is None else scatter_heads(dq, prompt.group, 1)


def _owned_choices(chosen: Tensor, prompt: LatentRows) -> Tensor:
    """This rank's rows [m, C] of the chosen positions, -1 for others; C = 0 where it owns none that are read."""
    own = prompt.rows.pages.rows_of(_before(chosen, prompt.end))
    return own if len(prompt.latents) else own[:, :0]


def _chosen_scores(q: Tensor, rows: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The chosen keys [n, C, D] and their scores [n, H, C]."""
    keys = rows[chosen.clamp(min=0)]
    scores = product(q, keys.transpose(1, 2)) * scale
    return keys, scores.masked_fill_((chosen < 0)[:, None], -math.inf)


def _before(chosen: Tensor, end: int) -> Tensor:
    """The chosen positions below `end`, -1 for the others."""
    return chosen.long().where(chosen < end, -1)


def _own_rows(chosen: Tensor, first: Tensor, prompt: LatentRows | None) -> Tensor:
    """The segment's rows of the chosen positions behind the prompt; -1 for the others. first [m, 1] is the row of the
    first such position."""
    start = 0 if prompt is None else prompt.end
    return (chosen.long() - start + first).where(chosen >= start, -1)


def _compact(chosen: Tensor) -> Tensor:
    """The same choices with the -1 last, as narrow as the longest row allows (at least 1)."""
    width = int((chosen >= 0).sum(1).max().clamp(min=1))
    return chosen.sort(dim=1, descending=True).values[:, :width]
