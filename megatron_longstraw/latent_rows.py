"""The latents of a prompt as a segment reads them, and how its queries go over them: in blocks, and products of those.

The prompt's rows are split by pages over an owner group. Rows travel: one layer's at a time, and its index keys block
by block. For n queries in a block there are scores [n, rows] and chosen rows [n, K, D]; nothing of size
[queries, prompt] exists.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_longstraw.partial_attention import gather, statistics_dtype
from megatron_longstraw.prompt_state import OwnedRows


@dataclass(frozen=True)
class LatentRows:
    """The part of the prompt that a segment reads.

    Args:
        rows: fields "latent" [rows, D] and, on layers that compute an index, "index_key" [rows, I].
        end: positions below this are read.
        group: the owner group, or None where this rank has all rows.
    """

    rows: OwnedRows
    end: int
    group: dist.ProcessGroup | None

    @property
    def rows_of_owner(self) -> int:
        """Rows that each owner has among those that are read: as many as the one with the most."""
        return self.rows.pages.most_owned_before(self.end)

    @property
    def travelling(self) -> int:
        """Rows that travel: W * rows_of_owner."""
        return self.rows.pages.size * self.rows_of_owner

    @property
    def wants_gradient(self) -> bool:
        return bool(self.rows.gradients)

    def index_keys(self, at_once: int) -> Iterator[tuple[int, Tensor]]:
        """The index keys of all owners in order of positions, some `at_once`, but a page of each owner at least.

        Yields:
            The first position, and the keys [S, I].
        """
        pages = self.rows.pages
        rounds = -(-self.rows_of_owner // pages.page_tokens)
        for some in blocks(slice(0, rounds), max(1, at_once // (pages.page_tokens * pages.size))):
            first = some.start * pages.page_tokens
            keys = self._own("index_key", slice(first, some.stop * pages.page_tokens))
            if self.group is not None:
                keys = gather(keys, self.group).unflatten(0, (pages.size, -1, pages.page_tokens))
                keys = keys.transpose(0, 1).flatten(0, 2)
            start = first * pages.size
            yield start, keys[: self.end - start]

    def latents_and(self, own: Tensor) -> Tensor:
        """[travelling + T, D]: the latents of all owners, one owner's behind the other's, then `own` [T, D]."""
        together = own.new_empty(self.travelling + len(own), own.shape[1])
        of_prompt, of_segment = together.tensor_split([self.travelling])
        of_segment.copy_(own)
        if len(of_prompt):
            of_owner = self._own("latent", slice(0, self.rows_of_owner))
            if self.group is None:
                of_prompt.copy_(of_owner)
            else:
                dist.all_gather_into_tensor(of_prompt, of_owner, group=self.group)
        return together

    def among_all(self, positions: Tensor) -> Tensor:
        """The rows of `latents_and` that hold positions below `end`."""
        owners, rows = self.rows.pages.owners_and_rows(positions)
        return owners * self.rows_of_owner + rows

    def add_gradients(self, partial: Tensor) -> None:
        """Adds to the rows' gradients what the group's ranks have of them.

        Args:
            partial: [travelling, D], this rank's part of the sum, in the order of `latents_and`.
        """
        if self.group is not None and len(partial):
            whole = torch.empty_like(partial[: self.rows_of_owner])
            dist.reduce_scatter_tensor(whole, partial, group=self.group)
            partial = whole
        owned = self.rows.pages.owned_before(self.end)
        self.rows.add_gradient(self.end, slice(0, owned), latent=partial[:owned])

    def _own(self, field: str, rows: slice) -> Tensor:
        """Owned rows, and behind them what is not read: memory as it is, then zeros."""
        values = self.rows.read(field, self.end, rows)
        missing = rows.stop - rows.start - len(values)
        return pad(values, (0, 0, 0, missing)) if missing else values


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
