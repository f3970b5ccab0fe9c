"""Sparse attention over latents (MLA + DSA): each token attends to the few positions that an index chose for it.

The prompt's rows are split by pages over an owner group, and current rows are on every rank. Queries travel, rows
don't:

    choose   every rank scores its own index keys, block by block, and keeps the best it has seen; the group's
             candidates and the current rows' merge into the *global* best K. Equal scores go to the lower
             position, whatever blocks and owners there are.
    attend   the group gathers the queries of all heads; each rank attends, with all heads, to those of its own
             rows that were chosen, and sends each rank the results of that rank's heads, which merge by
             log-sum-exp. The current rows' part is computed by each rank for its own heads, and merged in.
    back     dq is reduce-scattered; a row's gradient is complete on its owner.

All of it runs in blocks of queries. In a block of n queries there are scores [n, index keys of one block], and
chosen rows [n, K, D]; nothing of size [queries, prompt] exists. A few blocks, a *stretch* of m queries, travel in one
message.

Shapes: T tokens of the segment (n of a block, m of a stretch), P positions before it, S rows, N index heads, I their
dimension, K chosen positions (-1 where fewer exist), H attention heads of this rank, D width of a row (a key; its
first V values are the value, too), W ranks of the owner group. Scores, statistics and merged results are float32, or
float64 for float64.

Sources: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1; Megatron-Core 0.19.2, experimental_attention_variant/dsa.py.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longstraw.partial_attention import gather, gather_heads, merge_owners, scatter_heads
from megatron_longstraw.partial_attention import merge as _merge
from megatron_longstraw.partial_attention import probabilities as _probabilities
from megatron_longstraw.partial_attention import statistics_dtype as _statistics_dtype
from megatron_longstraw.prompt_state import Attend, OwnedRows, Segment, attend_anew

_BLOCKS_OF_STRETCH = 4
"""Blocks of queries that travel together. For GLM-5.2 on 8 ranks, 512 queries with 64 heads, buffers of messages take
some 200 MiB; the rows that one block of 128 may have chosen on a rank take up to 288 MiB."""
_SCORES_AT_ONCE = {"cpu": 2**18, "cuda": 2**24}
"""Scores of single index heads that exist at once: what a CPU's cache holds, what keeps a GPU busy."""


@dataclass(frozen=True)
class LatentRows:
    """The part of the prompt that a segment reads.

    Args:
        rows: fields "latent" [rows, D] and, on layers that compute an index, "index_key" [rows, I].
        end: positions below this are read.
        block_tokens: index keys that are scored at once.
        group: the owner group, or None where this rank has all rows.
    """

    rows: OwnedRows
    end: int
    block_tokens: int
    group: dist.ProcessGroup | None

    @property
    def latents(self) -> Tensor:
        """The owned ones of the rows that are read; behind them nothing may be written yet."""
        return self.rows.values["latent"][: self.rows.pages.owned_before(self.end)]


@dataclass(frozen=True)
class IndexQueries:
    """What scores positions: for a token t and a position s, sum over heads of weight * relu(query . key).

    Args:
        queries: [T, N, I]. weights: [T, N]. keys: [T, I], of the same tokens.
        topk: positions to choose.
        relu: whether scores of single heads pass a ReLU.
    """

    queries: Tensor
    weights: Tensor
    keys: Tensor
    topk: int
    relu: bool = True


@torch.no_grad()
def choose_positions(index: IndexQueries, prompt: LatentRows | None, query_block: int) -> Tensor:
    """The `topk` positions with the highest index scores among the prompt's and the segment's up to each token.

    Returns:
        [T, K] int32 positions in ascending order where they are set, -1 elsewhere; the same on all ranks of the
        owner group. K = min(topk, P + T).
    """
    start = 0 if prompt is None else prompt.end
    tokens = len(index.queries)
    chosen = torch.full((tokens, min(index.topk, start + tokens)), -1, dtype=torch.int32, device=index.keys.device)
    own_positions = torch.arange(start, start + tokens, device=index.keys.device)
    for stretch in _stretches(tokens, query_block):
        before = None if prompt is None else _candidates_of_prompt(index, stretch, prompt, query_block)
        for block in _blocks(stretch, query_block):
            scores = index_scores(index, block, index.keys[: block.stop])
            up_to_here = own_positions[: block.stop]
            future = up_to_here > own_positions[block, None]
            candidates = scores.masked_fill_(future, -math.inf), up_to_here.expand_as(scores)
            if before is not None:
                here = slice(block.start - stretch.start, block.stop - stretch.start)
                of_prompt = _best(*_ascending(*(x[here] for x in before)), min(index.topk, start))
                candidates = torch.cat([of_prompt[0], candidates[0]], 1), torch.cat([of_prompt[1], candidates[1]], 1)
            values, positions = _best(*candidates, index.topk)
            chosen[block, : positions.shape[1]] = positions.where(values > -math.inf, -1).int()
    return chosen


def sparse_attention(
    q_THD: Tensor,
    rows_TD: Tensor,
    chosen_TK: Tensor,
    prompt: LatentRows | None,
    *,
    value_width: int,
    scale: float,
    query_block: int,
    attend: Attend = attend_anew,
) -> Tensor:
    """Attention of each token over its chosen positions.

    Args:
        q_THD: queries. rows_TD: the rows of the same tokens, on every rank of the owner group.
        chosen_TK: from `choose_positions`.
        prompt: the prompt's rows, or None for a segment that starts its sequence. Backward adds their gradients to
            `prompt.rows` itself.
        value_width: V.
        scale: softmax scale.
        query_block: queries in a block.
        attend: gives the output and log-sum-exp of this very attention; see `Runtime.attend_of`.

    Returns:
        [T, H, V] in the dtype of the queries. The gradient of `rows_TD` is this rank's heads' part: the caller's
        gather over sequence-parallel ranks sums it.
    """
    return _SparseAttention.apply(q_THD, rows_TD, chosen_TK, prompt, value_width, scale, query_block, attend)


def index_scores(index: IndexQueries, block: slice, keys_SI: Tensor) -> Tensor:
    """Scores [n, S] of a block of queries, future positions included.

    Heads are added one after the other, so that no block changes the order of their sum.
    """
    queries, weights = index.queries[block].transpose(0, 1), index.weights[block].T[..., None]
    dtype = _statistics_dtype(keys_SI)
    scores = keys_SI.new_zeros(queries.shape[1], len(keys_SI), dtype=dtype)
    at_once = max(1, _SCORES_AT_ONCE[keys_SI.device.type] // max(1, scores.numel()))
    keys = keys_SI.T.contiguous()[None]
    for heads in _blocks(slice(0, len(queries)), at_once):
        of_heads = _product(queries[heads].flatten(0, 1)[None], keys).view(-1, *scores.shape)
        of_heads = of_heads.relu_() if index.relu else of_heads
        for of_head, weight in zip(of_heads, weights[heads].to(dtype), strict=True):
            scores.addcmul_(of_head, weight)
    return scores


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
    def forward(ctx, q, rows, chosen, prompt, value_width, scale, query_block, attend):  # type: ignore[no-untyped-def]
        out, lse = attend(lambda: _attend_all(q, rows, chosen, prompt, value_width, scale, query_block))
        ctx.save_for_backward(q, rows, chosen, out, lse)
        ctx.prompt, ctx.scale, ctx.query_block = prompt, scale, query_block
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        q, rows, chosen, out, lse = ctx.saved_tensors
        prompt, scale = ctx.prompt, ctx.scale
        dq = torch.empty_like(q, dtype=lse.dtype)
        drows = torch.zeros_like(rows, dtype=lse.dtype)
        start = 0 if prompt is None else prompt.end
        add = functools.partial(drows.index_add_, 0)
        for stretch in _stretches(len(q), ctx.query_block):
            delta = (dout[stretch].to(lse.dtype) * out[stretch]).sum(-1)
            queries = dout[stretch], q[stretch], lse[stretch], delta
            dq[stretch] = _attend_backward(*queries, rows, _after(chosen[stretch], start), scale, ctx.query_block, add)
            if prompt is not None:
                dq[stretch] += _attend_prompt_backward(*queries, chosen[stretch], prompt, scale, ctx.query_block)
        return dq.to(q.dtype), drows.to(rows.dtype), None, None, None, None, None, None


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


# -- choosing: candidates are (values [n, c], positions [n, c]); `_best` wants positions ascending


def _candidates_of_prompt(
    index: IndexQueries, stretch: slice, prompt: LatentRows, query_block: int
) -> tuple[Tensor, Tensor]:
    """What every owner found best among its rows [m, c], in any order; the best of the whole prompt are among them."""
    found = [_best_of_owned(index, block, prompt) for block in _blocks(stretch, query_block)]
    values, positions = (torch.cat(parts) for parts in zip(*found, strict=True))
    if prompt.group is None:
        return values, positions
    # owners may have different numbers of candidates: all send as many as the prompt may have
    missing = (0, min(index.topk, prompt.end) - values.shape[1])
    values = torch.nn.functional.pad(values, missing, value=-math.inf)
    positions = torch.nn.functional.pad(positions, missing, value=prompt.end)
    return _gather_candidates(values, positions, prompt.group)


def _best_of_owned(index: IndexQueries, block: slice, prompt: LatentRows) -> tuple[Tensor, Tensor]:
    queries = index.queries[block]
    values = queries.new_empty(len(queries), 0, dtype=_statistics_dtype(queries))
    positions = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for rows in prompt.rows.blocks(prompt.end, prompt.block_tokens):
        scores = index_scores(index, block, prompt.rows.values["index_key"][rows])
        where = prompt.rows.pages.positions_of(torch.arange(rows.start, rows.stop, device=queries.device))
        values, positions = _best(
            torch.cat([values, scores], 1), torch.cat([positions, where.expand_as(scores)], 1), index.topk
        )
    return values, positions


def _ascending(values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    positions, order = positions.sort(dim=1)
    return values.gather(1, order), positions


def _best(values: Tensor, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of each row's candidates the `count` with the highest values, the lower position where values are equal."""
    if values.shape[1] <= count:
        return values, positions
    top, where = values.topk(count + 1, dim=1)
    where = where[:, :count]
    tied = top[:, -1] == top[:, -2]  # elsewhere the best are the best, whichever order topk found them in
    if tied.any():
        where[tied] = _best_of_tied(values[tied], top[tied, -2:-1], count)
    where = where.sort(1).values
    return values.gather(1, where), positions.gather(1, where)


def _best_of_tied(values: Tensor, least: Tensor, count: int) -> Tensor:
    """Where the best `count` of each row are when the least of them [n, 1] has equals that aren't: the first ones."""
    above, equal = ~(values <= least), values == least  # NaN is above, as topk has it
    room = count - above.sum(1, keepdim=True)
    kept = above | (equal & (equal.cumsum(1) <= room))
    return kept.nonzero()[:, 1].view(-1, count)


def _attend_all(
    q: Tensor, rows: Tensor, chosen: Tensor, prompt: LatentRows | None, value_width: int, scale: float, query_block: int
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V], lse [T, H]) over the chosen rows of the prompt and of the segment."""
    out = q.new_empty(*q.shape[:2], value_width)
    lse = q.new_empty(q.shape[:2], dtype=_statistics_dtype(q))
    start = 0 if prompt is None else prompt.end
    for stretch in _stretches(len(q), query_block):
        part = _attend(q[stretch], rows, _after(chosen[stretch], start), value_width, scale, query_block)
        if prompt is not None:
            of_prompt = _attend_prompt(q[stretch], chosen[stretch], prompt, value_width, scale, query_block)
            part = _merge(*part, *of_prompt)
        out[stretch], lse[stretch] = part
    return out, lse


# -- attention of queries [m, H, D], block by block, over chosen rows; chosen holds rows [m, C], -1 for none


def _attend(
    q: Tensor, rows: Tensor, chosen: Tensor, value_width: int, scale: float, query_block: int
) -> tuple[Tensor, Tensor]:
    """(out [m, H, V], lse [m, H]): zeros and -inf where a query has chosen none."""
    lse = q.new_empty(q.shape[:2], dtype=_statistics_dtype(q))
    out = q.new_empty(*q.shape[:2], value_width, dtype=lse.dtype)
    for block in _blocks(slice(0, len(q)), query_block):
        keys, scores = _chosen_scores(q[block], rows, _compact(chosen[block]), scale)
        lse[block] = scores.logsumexp(-1)
        p = _probabilities(scores, lse[block, :, None])
        out[block] = _product(p.to(keys.dtype), keys[..., :value_width])
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
    for block in _blocks(slice(0, len(q)), query_block):
        current = _compact(chosen[block])
        keys, scores = _chosen_scores(q[block], rows, current, scale)
        p = _probabilities(scores, lse[block, :, None])
        dp = _product(dout[block], keys[..., :value_width].transpose(1, 2))
        ds = (p * (dp - delta[block, :, None]) * scale).to(keys.dtype)
        dchosen = _product(ds.transpose(1, 2), q[block])
        dchosen[..., :value_width] += _product(p.to(keys.dtype).transpose(1, 2), dout[block])
        dq[block] = _product(ds, keys)
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
    scores = _product(q, keys.transpose(1, 2)) * scale
    return keys, scores.masked_fill_((chosen < 0)[:, None], -math.inf)


def _before(chosen: Tensor, end: int) -> Tensor:
    """The chosen positions below `end`, -1 for the others."""
    return chosen.long().where(chosen < end, -1)


def _after(chosen: Tensor, start: int) -> Tensor:
    """The chosen positions from `start` on, counted from there; -1 for the others."""
    return (chosen.long() - start).where(chosen >= start, -1)


def _compact(chosen: Tensor) -> Tensor:
    """The same choices with the -1 last, as narrow as the longest row allows (at least 1)."""
    width = int((chosen >= 0).sum(1).max().clamp(min=1))
    return chosen.sort(dim=1, descending=True).values[:, :width]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product, summed and given in the statistics' dtype."""
    dtype = _statistics_dtype(a)
    if a.dtype is dtype:
        return a @ b
    if a.is_cuda:
        return torch.bmm(a.contiguous(), b.contiguous(), out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _stretches(length: int, query_block: int) -> Iterator[slice]:
    return _blocks(slice(0, length), _BLOCKS_OF_STRETCH * query_block)


def _blocks(whole: slice, size: int) -> Iterator[slice]:
    for first in range(whole.start, whole.stop, size):
        yield slice(first, min(first + size, whole.stop))


def _gather_candidates(values: Tensor, positions: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Candidates [n, c] of each rank -> [n, W * c]; both travel as bits of one integer tensor.

    Positions are int32, or int64 beside float64 values.
    """
    bits = torch.int64 if values.dtype is torch.float64 else torch.int32
    packed = torch.stack([values.contiguous().view(bits), positions.to(bits)], 1)
    packed = gather(packed, group).permute(2, 1, 0, 3).flatten(2)  # [2, n, W * c]
    return packed[0].view(values.dtype), packed[1]
