"""Sparse attention over latents (MLA + DSA): each token attends to the few positions that were chosen for it.

The prompt's rows are split by pages over an owner group, and heads over the same ranks. A row is as wide as one head's
query, so rows travel, one layer's at a time; and so that no rank gathers the rows of every token for a few heads only,
each rank attends, with all heads, for its share of the tokens:

    attend   all-gather of the rows; queries go from their heads' ranks to their tokens', and outputs back.
    back     the same for queries and outputs' gradients; dq goes back; the rows' gradients are reduce-scattered.

A segment may be several sequences behind each other, which all follow the prompt and don't see each other.

Shapes: T tokens of the segment (S of this rank's share, n of a block), K chosen rows (-1 where fewer exist), H
attention heads, D width of a row (a key; its first V values are the value, too). Scores, softmax and sums of gradients
are float32, or float64 for float64.

Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_longstraw.latent_rows import LatentRows, blocks, product
from megatron_longstraw.partial_attention import statistics_dtype
from megatron_longstraw.prompt_state import Attend, attend_anew
from megatron_longstraw.token_shares import heads_to_tokens, slice_of_share, tokens_to_heads


def rows_of_positions(
    positions_SK: Tensor, prompt: LatentRows | None, sequences: Sequence[slice] | None = None
) -> Tensor:
    """Which rows hold chosen positions: of those that attention gathers, the prompt's and behind them the segment's.

    Args:
        positions_SK: int32, from `position_choice.choose_positions`, of this rank's share of the tokens.
        prompt: the prompt's rows, or None for a segment that starts its sequence and is not shared by ranks.
        sequences: where each sequence lies among the tokens; by default there is one.

    Returns:
        [S, K] int32; the same for every layer.
    """
    first = positions_SK.new_zeros(len(positions_SK), 1)
    for sequence in sequences or []:
        first[slice_of_share(sequence, None if prompt is None else prompt.group)] = sequence.start
    rows = positions_SK + first
    if prompt is not None:
        rows += prompt.travelling - prompt.end
        rows = rows.where(positions_SK >= prompt.end, prompt.among_all(positions_SK))
    return rows.where(positions_SK >= 0, -1)


def sparse_attention(
    q_THD: Tensor,
    rows_TD: Tensor,
    chosen_SK: Tensor,
    prompt: LatentRows | None,
    *,
    value_width: int,
    scale: float,
    query_block: int,
    attend: Attend = attend_anew,
) -> Tensor:
    """Attention of each token over its chosen rows.

    Args:
        q_THD: queries of this rank's heads.
        rows_TD: the rows of the same tokens, on every rank of the owner group.
        chosen_SK: from `rows_of_positions`, of this rank's share of the tokens; at least one for each.
        prompt: the prompt's rows, or None for a segment that starts its sequence and is not shared by ranks. Backward
            adds their gradients to `prompt.rows` itself.
        value_width: V.
        scale: softmax scale.
        query_block: tokens in a block.
        attend: gives what this very attention computes; see `Runtime.attend_of`.

    Returns:
        [T, H, V] in the dtype of the queries. The gradient of `rows_TD` is this rank's part (that of its tokens, or of
        its heads where `prompt` is None): the caller's gather over sequence-parallel ranks sums it.
    """
    return _SparseAttention.apply(q_THD, rows_TD, chosen_SK, prompt, value_width, scale, query_block, attend)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, rows, chosen, prompt, value_width, scale, query_block, attend):  # type: ignore[no-untyped-def]
        group = None if prompt is None else prompt.group

        def compute() -> tuple[Tensor]:
            together = rows if prompt is None else prompt.latents_and(rows)
            out = _attend(heads_to_tokens(q, group), together, chosen, value_width, scale, query_block)
            return (tokens_to_heads(out, group),)

        ctx.save_for_backward(q, rows, chosen)
        ctx.prompt, ctx.scale, ctx.query_block = prompt, scale, query_block
        return attend(compute)[0]

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        q, rows, chosen = ctx.saved_tensors
        prompt = ctx.prompt
        group = None if prompt is None else prompt.group
        together = rows if prompt is None else prompt.latents_and(rows)
        dout, q = heads_to_tokens(dout, group), heads_to_tokens(q, group)
        of_prompt = len(together) - len(rows)
        first_wanted = 0 if prompt is None or prompt.wants_gradient else of_prompt
        dq, drows = _attend_backward(dout, q, together, chosen, first_wanted, ctx.scale, ctx.query_block)
        del together, dout, q  # messages take as much again
        if of_prompt and not first_wanted:
            prompt.add_gradients(drows[:of_prompt])
        drows = drows[len(drows) - len(rows) :].to(rows.dtype, copy=True)  # lets those of the prompt go
        return tokens_to_heads(dq, group), drows, None, None, None, None, None, None


# -- attention of q [S, H, D], block by block, over what they have chosen of some rows


def _attend(q: Tensor, rows: Tensor, chosen: Tensor, value_width: int, scale: float, query_block: int) -> Tensor:
    """[S, H, V]"""
    out = q.new_empty(*q.shape[:2], value_width)

    def attend(block: slice) -> None:
        keys, p = _probabilities(q[block], rows, chosen[block], scale)
        out[block] = product(p.to(keys.dtype), keys[..., :value_width])

    for block in blocks(slice(0, len(q)), query_block):
        attend(block)
    return out


def _attend_backward(
    dout: Tensor, q: Tensor, rows: Tensor, chosen: Tensor, first_wanted: int, scale: float, query_block: int
) -> tuple[Tensor, Tensor]:
    """dq [S, H, D], and the gradients of the rows from `first_wanted` on."""
    dq = torch.empty_like(q)
    value_width = dout.shape[-1]
    # the first one takes what belongs to none
    drows = rows.new_zeros(1 + len(rows) - first_wanted, rows.shape[1], dtype=statistics_dtype(rows))

    def attend_backward(block: slice) -> None:
        keys, p = _probabilities(q[block], rows, chosen[block], scale)
        dp = product(dout[block], keys[..., :value_width].transpose(1, 2))
        ds = (p * (dp - (p * dp).sum(-1, keepdim=True)) * scale).to(keys.dtype)
        dq[block] = product(ds, keys)
        del keys, dp
        # a row is key and, with its first values, value: one product for both
        weights = torch.cat([ds, p.to(ds.dtype)], 1)
        both = torch.cat([q[block], pad(dout[block], (0, q.shape[-1] - value_width))], 1)
        dkeys = product(weights.transpose(1, 2), both)
        drows.index_add_(0, (chosen[block] + 1 - first_wanted).clamp(min=0).flatten(), dkeys.flatten(0, 1))

    for block in blocks(slice(0, len(q)), query_block):
        attend_backward(block)
    return dq, drows[1:]


def _probabilities(q: Tensor, rows: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The chosen keys [n, K, D] and their probabilities [n, H, K]."""
    keys = rows.index_select(0, chosen.clamp(min=0).flatten()).unflatten(0, chosen.shape)
    scores = product(q, keys.transpose(1, 2)).mul_(scale)
    return keys, scores.masked_fill_((chosen < 0)[:, None], -math.inf).softmax(-1)
