"""The positions that sparse attention chose for a prompt's tokens, kept from capture to prompt backward.

A rank keeps those of its share of each chunk's tokens (see `token_shares`), as it has chosen them and as it needs
them again. Chunks are captured in order; each is taken once, last chunk first, and dropped.
"""

from torch import Tensor


class KeptChoices:
    """The choices of one layer."""

    def __init__(self) -> None:
        self._chunks: list[tuple[int, Tensor]] = []
        self._bytes = 0

    def keep(self, start: int, chosen: Tensor) -> None:
        """Keeps the choice [T / W, K] of the chunk at `start`; the tensor itself, no copy."""
        if self._chunks and start <= self._chunks[-1][0]:
            raise RuntimeError(f"choice of the chunk at {start} kept after that at {self._chunks[-1][0]}")
        self._chunks.append((start, chosen))
        self._bytes += chosen.nbytes

    def take(self, start: int) -> Tensor:
        """The choice of the chunk at `start`, the last one that is left, and drops it."""
        if not self._chunks or self._chunks[-1][0] != start:
            left = [first for first, _ in self._chunks]
            raise RuntimeError(f"choice of the chunk at {start} taken when those at {left} are left: last one first")
        return self._chunks.pop()[1]

    def check_complete(self) -> None:
        """Raises RuntimeError unless all were taken."""
        if self._chunks:
            raise RuntimeError(f"choices of the chunks at {[first for first, _ in self._chunks]} are left at the end")

    def bytes(self) -> int:
        """The most bytes that were held at once."""
        return self._bytes

    def gradient_bytes(self) -> int:
        return 0
