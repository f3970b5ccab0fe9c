"""Which positions a token's sparse attention is to attend to (DSA): those with the best scores of an index.

The prompt's index keys are split by pages over an owner group. Every rank scores its own ones, block by block, and
keeps the best it has seen; the group's candidates and those of the token's own sequence, which every rank has, merge
into the *global* best K. Equal scores go to the lower position, whatever blocks and owners there are.

A segment may be several sequences behind each other, which all follow the prompt and don't see each other.

Shapes: T tokens of the segment (n of a block), P positions before it, S index keys, N index heads, I their dimension,
K chosen positions (-1 where fewer exist), W ranks of the owner group. Scores are float32, or float64 for float64.

Sources: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1; Megatron-Core 0.19.2, experimental_attention_variant/dsa.py.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longstraw.latent_rows import LatentRows, blocks, product, stretches
from megatron_longstraw.partial_attention import gather, statistics_dtype

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
        prompt: the prompt's rows, or None for a segment that starts its sequence.
        query_block: queries in a block.
        sequences: where each sequence lies among the tokens; by default there is one.

    Returns:
        [T, K] int32 positions in ascending order where they are set, -1 elsewhere; the same on all ranks of the
        owner group. K = min(topk, P + tokens of the longest sequence).
    """
    start = 0 if prompt is None else prompt.end
    sequences = sequences or [slice(0, len(index.queries))]
    longest = max(sequence.stop - sequence.start for sequence in sequences)
    width = min(index.topk, start + longest)
    chosen = torch.full((len(index.queries), width), -1, dtype=torch.int32, device=index.keys.device)
    for block, of_prompt in _candidates_of_prompt(index, prompt, query_block):
        for queries, sequence in _parts(block, sequences):
            here = slice(queries.start - block.start, queries.stop - block.start)
            own = _candidates_of_sequence(index, queries, sequence, start)
            values, positions = (torch.cat([a[here], b], 1) for a, b in zip(of_prompt, own, strict=True))
            values, positions = _best(values, positions, index.topk)
            chosen[queries, : positions.shape[1]] = positions.where(values > -math.inf, -1).int()
    return chosen


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


# -- candidates are (values [n, c], positions [n, c]); `_best` wants positions ascending


def _candidates_of_prompt(
    index: IndexQueries, prompt: LatentRows | None, query_block: int
) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
    """Each block of queries, and the prompt's best for it [n, c]."""
    for stretch in stretches(len(index.queries), query_block):
        in_stretch = list(blocks(stretch, query_block))
        found = [_best_of_owned(index, block, prompt) for block in in_stretch]
        if prompt is not None and prompt.group is not None:
            found = _of_all_owners(found, min(index.topk, prompt.end), prompt)
        yield from zip(in_stretch, found, strict=True)


def _of_all_owners(found: list[tuple[Tensor, Tensor]], most: int, prompt: LatentRows) -> list[tuple[Tensor, Tensor]]:
    """The best of this rank's rows for some blocks -> the best of all owners', in one message.

    Owners may have different numbers of candidates: each sends `most`, as many as the prompt may have.
    """
    assert prompt.group is not None
    values, positions = (torch.cat(parts) for parts in zip(*found, strict=True))
    missing = (0, most - values.shape[1])
    values = torch.nn.functional.pad(values, missing, value=-math.inf)
    positions = torch.nn.functional.pad(positions, missing, value=prompt.end)
    values, positions = _best(*_ascending(*_gather_candidates(values, positions, prompt.group)), most)
    lengths = [len(of_block) for of_block, _ in found]
    return list(zip(values.split(lengths), positions.split(lengths), strict=True))


def _best_of_owned(index: IndexQueries, block: slice, prompt: LatentRows | None) -> tuple[Tensor, Tensor]:
    queries = index.queries[block]
    values = queries.new_empty(len(queries), 0, dtype=statistics_dtype(queries))
    positions = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    if prompt is None:
        return values, positions
    for rows in prompt.rows.blocks(prompt.end, prompt.block_tokens):
        scores = index_scores(index, block, prompt.rows.values["index_key"][rows])
        where = prompt.rows.pages.positions_of(torch.arange(rows.start, rows.stop, device=queries.device))
        values, positions = _best(
            torch.cat([values, scores], 1), torch.cat([positions, where.expand_as(scores)], 1), index.topk
        )
    return values, positions


def _candidates_of_sequence(index: IndexQueries, queries: slice, sequence: slice, start: int) -> tuple[Tensor, Tensor]:
    """The scores and positions of a sequence's rows up to the last of some queries; future ones are -inf."""
    scores = index_scores(index, queries, index.keys[sequence.start : queries.stop])
    positions = torch.arange(scores.shape[1], device=scores.device)
    own = positions[queries.start - sequence.start :, None]
    return scores.masked_fill_(positions > own, -math.inf), (start + positions).expand_as(scores)


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


def _gather_candidates(values: Tensor, positions: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Candidates [n, c] of each rank -> [n, W * c]; both travel as bits of one integer tensor.

    Positions are int32, or int64 beside float64 values.
    """
    bits = torch.int64 if values.dtype is torch.float64 else torch.int32
    packed = torch.stack([values.contiguous().view(bits), positions.to(bits)], 1)
    packed = gather(packed, group).permute(2, 1, 0, 3).flatten(2)  # [2, n, W * c]
    return packed[0].view(values.dtype), packed[1]


def _parts(block: slice, sequences: Sequence[slice]) -> Iterator[tuple[slice, slice]]:
    """What of a block lies in which sequence."""
    for sequence in sequences:
        part = slice(max(block.start, sequence.start), min(block.stop, sequence.stop))
        if part.start < part.stop:
            yield part, sequence
