"""Which positions a token's sparse attention is to attend to (DSA): those with the best scores of an index.

The prompt's index keys are split by pages over an owner group; they travel, block by block. Each rank chooses for its
share of the tokens: it keeps the best K of the blocks that it has seen, and then of those and the token's own sequence,
which every rank has. Equal scores go to the lower position, whatever blocks and owners there are.

A segment may be several sequences behind each other, which all follow the prompt and don't see each other.

Shapes: T tokens of the segment (n of a block), P positions before it, S index keys, N index heads, I their dimension,
K chosen positions (-1 where fewer exist). Scores are float32, or float64 for float64.

Sources: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1; Megatron-Core 0.19.2, experimental_attention_variant/dsa.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_longstraw.latent_rows import LatentRows, blocks, product
from megatron_longstraw.partial_attention import statistics_dtype
from megatron_longstraw.token_shares import gather_shares, place, share_of, slice_of_share

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
    index: IndexQueries, prompt: LatentRows | None, query_block: int, sequences: Sequence[slice] | None = None
) -> Tensor:
    """The `topk` positions with the highest index scores among the prompt's and its sequence's up to each token.

    Args:
        index: what scores positions.
        prompt: the prompt's rows, or None for a segment that starts its sequence and is not shared by ranks.
        query_block: queries in a block.
        sequences: where each sequence lies among the tokens; by default there is one.

    Returns:
        [T, K] int32 positions in ascending order where they are set, -1 elsewhere; the same on all ranks of the
        owner group. K = min(topk, P + tokens of the longest sequence).
    """
    start, group = (0, None) if prompt is None else (prompt.end, prompt.group)
    sequences = sequences or [slice(0, len(index.queries))]
    longest = max(sequence.stop - sequence.start for sequence in sequences)
    rank, size = place(group)
    tokens = range(rank, len(index.queries), size)
    mine = replace(index, queries=share_of(index.queries, group), weights=share_of(index.weights, group))
    width = min(index.topk, start + longest)
    chosen = torch.full((len(tokens), width), -1, dtype=torch.int32, device=index.keys.device)
    of_prompt = _best_of_prompt(mine, prompt, query_block) if prompt is not None and start else None
    for sequence in sequences:
        for block in blocks(slice_of_share(sequence, group), query_block):
            best = _best_of_sequence(mine, block, tokens[block], sequence, start)
            if of_prompt is not None:
                best = _best_of_both((of_prompt[0][block], of_prompt[1][block]), best, index.topk)
            values, positions = best
            chosen[block, : positions.shape[1]] = positions.where(values > -math.inf, -1)
    return gather_shares(chosen, group)


def index_scores(index: IndexQueries, block: slice, keys_SI: Tensor) -> Tensor:
    """Scores [n, S] of a block of queries, future positions included.

    Heads are added one after the other, so that no block changes the order of their sum.
    """
    queries, weights = index.queries[block].transpose(0, 1), index.weights[block].T[..., None]
    dtype = statistics_dtype(keys_SI)
    scores = keys_SI.new_zeros(queries.shape[1], len(keys_SI), dtype=dtype)
    at_once = max(1, _SCORES_AT_ONCE[keys_SI.device.type] // max(1, scores.numel()))
    keys = keys_SI.T.contiguous()[None]
    for heads in blocks(slice(0, len(queries)), at_once):
        of_heads = product(queries[heads].flatten(0, 1)[None], keys).view(-1, *scores.shape)
        of_heads = of_heads.relu_() if index.relu else of_heads
        for of_head, weight in zip(of_heads, weights[heads].to(dtype), strict=True):
            scores.addcmul_(of_head, weight)
    return scores


# -- the best of some positions: (values [n, c], int32 positions [n, c] in ascending order)


def _best_of_prompt(index: IndexQueries, prompt: LatentRows, query_block: int) -> tuple[Tensor, Tensor]:
    """The prompt's best for each query: [T, c] each."""
    queries = list(blocks(slice(0, len(index.queries)), query_block))
    best: list[tuple[Tensor, Tensor]] = []
    for first, keys in prompt.index_keys():
        of_keys = (_best(index_scores(index, block, keys), first, index.topk) for block in queries)
        best = [_best_of_both(*both, index.topk) for both in zip(best, of_keys, strict=True)] if best else [*of_keys]
    values, positions = (torch.cat(of_blocks) for of_blocks in zip(*best, strict=True))
    return values, positions


def _best_of_sequence(
    index: IndexQueries, block: slice, tokens: range, sequence: slice, start: int
) -> tuple[Tensor, Tensor]:
    """The best of a sequence's rows for some of its tokens, the future ones with values of -inf."""
    rows = slice(sequence.start, tokens[-1] + 1)
    scores = index_scores(index, block, index.keys[rows])
    of_rows, of_tokens = (
        torch.arange(x.start, x.stop, x.step or 1, dtype=torch.int32, device=scores.device) for x in (rows, tokens)
    )
    scores.masked_fill_(of_rows > of_tokens[:, None], -math.inf)
    return _best(scores, start, index.topk)


def _best_of_both(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Of two sets of positions, of which all of `a` are below those of `b`."""
    values, where = _best(torch.cat([a[0], b[0]], 1), 0, count)
    return values, torch.cat([a[1], b[1]], 1).gather(1, where.long())


def _best(values: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
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
