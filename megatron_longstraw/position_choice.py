"""Which positions a token's sparse attention is to attend to (DSA): those with the best scores of an index.

The prompt's index keys are split by pages over an owner group; they travel, block by block. Each rank chooses for its
share of the tokens: it keeps the best K of the blocks that it has seen, and then of those and the token's own sequence,
which every rank has. Equal scores go to the lower position, whatever blocks and owners there are.

A segment may be several sequences behind each other, which all follow the prompt and don't see each other.

Shapes: T tokens of the segment (n of a block), P positions before it, S index keys, N index heads, I their dimension,
K chosen positions (-1 where fewer exist), W ranks of the owner group. Scores are float32, or float64 for float64.

Sources: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1; Megatron-Core 0.19.2, experimental_attention_variant/dsa.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from megatron_longstraw.latent_rows import LatentRows, blocks, product
from megatron_longstraw.partial_attention import statistics_dtype
from megatron_longstraw.token_shares import place, share_of, slice_of_share

_SCORES_AT_ONCE = {"cpu": 2**18, "cuda": 2**24}
"""Scores of single index heads that exist at once: what a CPU's cache holds, what keeps a GPU busy."""


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
def choose_positions(
    index: IndexQueries,
    prompt: LatentRows | None,
    *,
    query_block: int,
    key_block: int,
    sequences: Sequence[slice] | None = None,
) -> Tensor:
    """The `topk` positions with the highest index scores among the prompt's and its sequence's up to each token.

    Args:
        index: what scores positions.
        prompt: the prompt's rows, or None for a segment that starts its sequence and is not shared by ranks.
        query_block: queries that are scored at once.
        key_block: keys that they are scored against at once.
        sequences: where each sequence lies among the tokens; by default there is one.

    Returns:
        [T / W, K] int32, of this rank's share of the tokens: positions in ascending order, and -1 behind them.
        K = min(topk, P + tokens of the longest sequence).
    """
    start, group = (0, None) if prompt is None else (prompt.end, prompt.group)
    sequences = sequences or [slice(0, len(index.queries))]
    longest = max(sequence.stop - sequence.start for sequence in sequences)
    rank, size = place(group)
    tokens = range(rank, len(index.queries), size)
    mine = replace(index, queries=share_of(index.queries, group), weights=share_of(index.weights, group))
    width = min(index.topk, start + longest)
    chosen = torch.full((len(tokens), width), -1, dtype=torch.int32, device=index.keys.device)
    token = torch.arange(rank, len(index.queries), size, device=chosen.device)[:, None]
    of_prompt = _best_of_prompt(mine, prompt, query_block, key_block) if prompt is not None and start else None
    for sequence in sequences:
        for block in blocks(slice_of_share(sequence, group), query_block):
            best = None if of_prompt is None else (of_prompt[0][block], of_prompt[1][block])
            for rows in blocks(slice(sequence.start, tokens[block][-1] + 1), key_block):
                scores = index_scores(mine, block, index.keys[rows].T)
                _hide_future(scores, rows, token[block])
                best = _better(best, scores, start + rows.start - sequence.start, index.topk)
            assert best is not None
            _, positions = best
            exist = start + token[block] + 1 - sequence.start
            column = torch.arange(positions.shape[1], device=chosen.device)
            chosen[block, : positions.shape[1]] = positions.where(column < exist, -1)  # those of the future come last
    return chosen


def index_scores(index: IndexQueries, block: slice, keys_IS: Tensor) -> Tensor:
    """Scores [n, S] of a block of queries, future positions included.

    Heads are added one after the other, so that no block changes the order of their sum.
    """
    queries, weights = index.queries[block].transpose(0, 1), index.weights[block].T[..., None]
    dtype = statistics_dtype(keys_IS)
    scores = keys_IS.new_zeros(queries.shape[1], keys_IS.shape[1], dtype=dtype)
    at_once = max(1, _SCORES_AT_ONCE[keys_IS.device.type] // max(1, scores.numel()))
    keys = keys_IS.contiguous()[None]
    for heads in blocks(slice(0, len(queries)), at_once):
        of_heads = product(queries[heads].flatten(0, 1)[None], keys).view(-1, *scores.shape)
        of_heads = of_heads.relu_() if index.relu else of_heads
        for of_head, weight in zip(of_heads, weights[heads].to(dtype), strict=True):
            scores.addcmul_(of_head, weight)
        del of_heads, of_head  # before the next ones are made
    return scores


_Best = tuple[Tensor, Tensor]
"""The highest values of some positions [n, c], and these positions [n, c], int32, in ascending order."""


def _best_of_prompt(index: IndexQueries, prompt: LatentRows, query_block: int, key_block: int) -> _Best:
    """The prompt's best for each query."""
    queries = list(blocks(slice(0, len(index.queries)), query_block))
    best: list[_Best | None] = [None] * len(queries)
    for first, keys in prompt.index_keys(key_block):
        keys = keys.T.contiguous()
        for i, block in enumerate(queries):
            best[i] = _better(best[i], index_scores(index, block, keys), first, index.topk)
    values, positions = (torch.cat(parts) for parts in zip(*cast(list[_Best], best), strict=True))
    return values, positions


def _better(best: _Best | None, values: Tensor, first: int, count: int) -> _Best:
    """The best of what was seen before and the values [n, S] of the positions from `first` on, which come behind."""
    new = _best(values, first, count)
    if best is None:
        return new
    values, where = _best(torch.cat([best[0], new[0]], 1), 0, count)
    return values, torch.cat([best[1], new[1]], 1).gather(1, where.long())


def _best(values: Tensor, first: int, count: int) -> _Best:
    """Of values of `first` and the positions behind it the `count` highest, the lower position where they are equal."""
    if values.shape[1] <= count:
        positions = torch.arange(first, first + values.shape[1], dtype=torch.int32, device=values.device)
        return values, positions.expand_as(values)
    top, where = values.topk(count + 1, dim=1)
    where = where[:, :count]
    tied = top[:, -1] == top[:, -2]  # elsewhere the best are the best, whichever order topk found them in
    if tied.any():
        where[tied] = _best_of_tied(values[tied], top[tied, -2:-1], count)
    where = where.sort(1).values
    return values.gather(1, where), (first + where).int()


def _best_of_tied(values: Tensor, least: Tensor, count: int) -> Tensor:
    """Where the best `count` of each row are when the least of them [n, 1] has equals that aren't: the first ones."""
    above, equal = ~(values <= least), values == least  # NaN is above, as topk has it
    room = count - above.sum(1, keepdim=True)
    kept = above | (equal & (equal.cumsum(1) <= room))
    return kept.nonzero()[:, 1].view(-1, count)


def _hide_future(scores: Tensor, rows: slice, token: Tensor) -> None:
    """-inf, in place, for rows of a segment [S] that come behind tokens [n, 1]."""
    row = torch.arange(rows.start, rows.stop, device=scores.device)
    scores.masked_fill_(row > token, -math.inf)
