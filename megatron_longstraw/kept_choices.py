"""The positions that sparse attention chose for a prompt's tokens, kept from capture to prompt backward.

A rank keeps those of its share of each chunk's tokens (see `token_shares`), as it has chosen them and as it needs
them again. Chunks are captured in order; each is taken once, last chunk first, and dropped.

A position takes two bytes: its lower 16 bits are kept, and for each token, whose positions ascend, how many of them
come before each multiple of 65,536, up to the first one that none reaches.
"""

import torch
from torch import Tensor

_BITS = 16


class KeptChoices:
    """The choices of one layer."""

    def __init__(self) -> None:
        self._chunks: list[tuple[int, Tensor, Tensor]] = []
        self._bytes = 0

    def keep(self, start: int, end: int, chosen: Tensor) -> None:
        """Keeps the choice of the chunk at `start`.

        Args:
            start: the chunk's first position.
            end: what all positions are below: padding of the chunk, which chooses itself, may be behind the prompt.
            chosen: [T / W, K] int32, ascending positions, and -1 behind them.
        """
        if self._chunks and start <= self._chunks[-1][0]:
            raise RuntimeError(f"choice of the chunk at {start} kept after that at {self._chunks[-1][0]}")
        ascending = chosen.where(chosen >= 0, torch.iinfo(chosen.dtype).max)
        borders = torch.arange(1 << _BITS, end + (1 << _BITS), 1 << _BITS, dtype=chosen.dtype, device=chosen.device)
        before = torch.searchsorted(ascending, borders.repeat(len(chosen), 1), out_int32=True)
        self._chunks.append((start, chosen.to(torch.int16), before))
        self._bytes += sum(kept.nbytes for kept in self._chunks[-1][1:])

    def take(self, start: int) -> Tensor:
        """The choice of the chunk at `start`, the last one that is left, and drops it."""
        if not self._chunks or self._chunks[-1][0] != start:
            left = [first for first, *_ in self._chunks]
            raise RuntimeError(f"choice of the chunk at {start} taken when those at {left} are left: last one first")
        _, low, before = self._chunks.pop()
        column = torch.arange(low.shape[1], dtype=torch.int32, device=low.device).repeat(len(low), 1)
        high = torch.searchsorted(before, column, right=True, out_int32=True) << _BITS
        return (high | low.int().bitwise_and_((1 << _BITS) - 1)).where(column < before[:, -1:], -1)

    def check_complete(self) -> None:
        """Raises RuntimeError unless all were taken."""
        if self._chunks:
            raise RuntimeError(f"choices of the chunks at {[first for first, *_ in self._chunks]} are left at the end")

    def bytes(self) -> int:
        """The most bytes that were held at once."""
        return self._bytes

    def gradient_bytes(self) -> int:
        return 0
