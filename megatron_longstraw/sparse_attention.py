"""Sparse attention over latents (MLA + DSA): each token attends to the few positions that were chosen for it.

The prompt's rows are split by pages over an owner group, and heads over the same ranks. A row is as wide as one head's
query, so rows travel, one layer's at a time; and so that no rank gathers the rows of every token for a few heads only,
each rank attends, with all heads, for its share of the tokens:

    attend   all-gather of the rows; queries go from their heads' ranks to their tokens', and outputs back.
    back     the same for queries and outputs' gradients; dq goes back; the rows' gradients are reduce-scattered.

A segment may be several sequences behind each other, which all follow the prompt and don't see each other.

Shapes: T tokens of the segment (S of this rank's share, n of a block), K chosen positions (-1 where fewer exist), H
attention heads, D width of a row (a key; its first V values are the value, too). Scores, softmax and sums of gradients
are float32, or float64 for float64.

Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_longstraw.latent_rows import LatentRows, blocks, product
from megatron_longstraw.partial_attention import statistics_dtype
from megatron_longstraw.prompt_state import Attend, attend_anew
from megatron_longstraw.token_shares import heads_to_tokens, slice_of_share, tokens_to_heads


def sparse_attention(
    q_THD: Tensor,
    rows_TD: Tensor,
    chosen_SK: Tensor,
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
        q_THD: queries of this rank's heads.
        rows_TD: the rows of the same tokens, on every rank of the owner group.
        chosen_SK: from `position_choice.choose_positions`, of this rank's share of the tokens; at least one for each.
        prompt: the prompt's rows, or None for a segment that starts its sequence and is not shared by ranks. Backward
            adds their gradients to `prompt.rows` itself.
        value_width: V.
        scale: softmax scale.
        query_block: tokens in a block.
        sequences: where each sequence lies among the tokens; by default there is one.
        attend: gives what this very attention computes; see `Runtime.attend_of`.

    Returns:
        [T, H, V] in the dtype of the queries. The gradient of `rows_TD` is this rank's part (that of its tokens, or of
        its heads where `prompt` is None): the caller's gather over sequence-parallel ranks sums it.
    """
    group = None if prompt is None else prompt.group
    first = torch.empty(len(chosen_SK), 1, dtype=torch.int64, device=q_THD.device)
    for sequence in sequences or [slice(0, len(q_THD))]:
        first[slice_of_share(sequence, group)] = sequence.start
    return _SparseAttention.apply(q_THD, rows_TD, chosen_SK, first, prompt, value_width, scale, query_block, attend)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, rows, chosen, first, prompt, value_width, scale, query_block, attend):  # type: ignore[no-untyped-def]
        choice = _Choice(chosen, first, prompt)

        def compute() -> tuple[Tensor]:
            together = choice.rows_to_choose_from(rows)
            out = _attend(heads_to_tokens(q, choice.group), together, choice, value_width, scale, query_block)
            return (tokens_to_heads(out, choice.group),)

        ctx.save_for_backward(q, rows, chosen, first)
        ctx.prompt, ctx.scale, ctx.query_block = prompt, scale, query_block
        return attend(compute)[0]

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        q, rows, chosen, first = ctx.saved_tensors
        prompt = ctx.prompt
        choice = _Choice(chosen, first, prompt)
        together = choice.rows_to_choose_from(rows)
        dout, q = heads_to_tokens(dout, choice.group), heads_to_tokens(q, choice.group)
        of_prompt = len(together) - len(rows)
        first_wanted = 0 if prompt is None or prompt.wants_gradient else of_prompt
        dq, drows = _attend_backward(dout, q, together, choice, first_wanted, ctx.scale, ctx.query_block)
        del together, dout, q  # messages take as much again
        if of_prompt and not first_wanted:
            prompt.add_gradients(drows[:of_prompt])
        drows = drows[len(drows) - len(rows) :].to(rows.dtype, copy=True)  # lets those of the prompt go
        return tokens_to_heads(dq, choice.group), drows, None, None, None, None, None, None, None


@dataclass(frozen=True)
class _Choice:
    """What this rank's share of the tokens have chosen.

    Args:
        chosen: [S, K] positions, -1 for none.
        first: [S, 1], which of the segment's rows the sequence of each token starts with.
        prompt: the prompt's rows.
    """

    chosen: Tensor
    first: Tensor
    prompt: LatentRows | None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the tokens."""
        return None if self.prompt is None else self.prompt.group

    def rows_to_choose_from(self, own: Tensor) -> Tensor:
        """The prompt's rows as they travel and, behind those, the segment's `own`."""
        return own if self.prompt is None else self.prompt.latents_and(own)

    def rows(self, block: slice) -> Tensor:
        """[n, K]: which of `rows_to_choose_from` it is; -1 for none."""
        chosen, first = self.chosen[block].long(), self.first[block]
        if self.prompt is None:
            return (chosen + first).where(chosen >= 0, -1)
        own = chosen - self.prompt.end + first + self.prompt.travelling
        return own.where(chosen >= self.prompt.end, self.prompt.among_all(chosen)).where(chosen >= 0, -1)


# -- attention of q [S, H, D], block by block, over what they have chosen of some rows


def _attend(q: Tensor, rows: Tensor, choice: _Choice, value_width: int, scale: float, query_block: int) -> Tensor:
    """[S, H, V]"""
    out = q.new_empty(*q.shape[:2], value_width)

    def attend(block: slice) -> None:
        keys, p = _probabilities(q[block], rows, choice.rows(block), scale)
        out[block] = product(p.to(keys.dtype), keys[..., :value_width])

    for block in blocks(slice(0, len(q)), query_block):
        attend(block)
    return out


def _attend_backward(
    dout: Tensor, q: Tensor, rows: Tensor, choice: _Choice, first_wanted: int, scale: float, query_block: int
) -> tuple[Tensor, Tensor]:
    """dq [S, H, D], and the gradients of the rows from `first_wanted` on."""
    dq = torch.empty_like(q)
    value_width = dout.shape[-1]
    # the first one takes what belongs to none
    drows = rows.new_zeros(1 + len(rows) - first_wanted, rows.shape[1], dtype=statistics_dtype(rows))

    def attend_backward(block: slice) -> None:
        chosen = choice.rows(block)
        keys, p = _probabilities(q[block], rows, chosen, scale)
        dp = product(dout[block], keys[..., :value_width].transpose(1, 2))
        ds = (p * (dp - (p * dp).sum(-1, keepdim=True)) * scale).to(keys.dtype)
        dq[block] = product(ds, keys)
        del keys, dp
        # a row is key and, with its first values, value: one product for both
        weights = torch.cat([ds, p.to(ds.dtype)], 1)
        both = torch.cat([q[block], pad(dout[block], (0, q.shape[-1] - value_width))], 1)
        dkeys = product(weights.transpose(1, 2), both)
        drows.index_add_(0, (chosen + 1 - first_wanted).clamp(min=0).flatten(), dkeys.flatten(0, 1))

    for block in blocks(slice(0, len(q)), query_block):
        attend_backward(block)
    return dq, drows[1:]


def _probabilities(q: Tensor, rows: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The chosen keys [n, K, D] and their probabilities [n, H, K]."""
    keys = rows[chosen.clamp(min=0)]
    scores = product(q, keys.transpose(1, 2)).mul_(scale)
    return keys, scores.masked_fill_((chosen < 0)[:, None], -math.inf).softmax(-1)
