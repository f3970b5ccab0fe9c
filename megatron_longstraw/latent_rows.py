"""The latents of a prompt as a segment reads them, and how its queries go over them: in blocks, and products of those.

Shapes: of n queries in a block there are scores [n, rows] and chosen rows [n, K, D]; nothing of size [queries, prompt]
exists. A few blocks, a *stretch*, travel in one message.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longstraw.partial_attention import statistics_dtype
from megatron_longstraw.prompt_state import OwnedRows

_BLOCKS_OF_STRETCH = 4
"""Blocks of queries that travel together. For GLM-5.2 on 8 ranks, 512 queries with 64 heads, buffers of messages take
some 200 MiB; the rows that one block of 128 may have chosen on a rank take up to 288 MiB."""


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


def stretches(length: int, query_block: int) -> Iterator[slice]:
    """`length` queries, a few blocks of `query_block` at a time."""
    return blocks(slice(0, length), _BLOCKS_OF_STRETCH * query_block)


def blocks(whole: slice, size: int) -> Iterator[slice]:
    """`whole`, in pieces of at most `size`."""
    for first in range(whole.start, whole.stop, size):
        yield slice(first, min(first + size, whole.stop))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product, summed and given in the statistics' dtype."""
    dtype = statistics_dtype(a)
    if a.dtype is dtype:
        return a @ b
    if a.is_cuda:
        return torch.bmm(a.contiguous(), b.contiguous(), out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)
