"""What a recurrent layer keeps of a prompt: its state at boundaries between prompt chunks.

A recurrent layer (Gated DeltaNet) reads nothing of earlier positions but a state of fixed size. A prompt chunk
starts from the state at its first position and leaves the state after its last; a response starts from the
state after the whole prompt. Boundaries are named by position: the state at p is what tokens before p leave,
and at 0 there is none. Invariants, each checked where it could break:

1. Chunks are captured once and in order; each reads the boundary that the one before it wrote.
2. Without gradients only the newest boundary is kept. With gradients those at multiples of `spacing` and the
   last one are; the others are written again, from the kept one before them, when the prompt backward comes
   there. Segments start at no other boundaries than those that are held.
3. dL/d(state at p) is summed while everything that reads p runs backwards: responses at the end of the prompt,
   and the chunk from p on. It is taken once, when the chunk that wrote p runs backwards, last boundary first.
   Then nobody reads p again, and the state is dropped.
4. At the end of a group the prompt is written to its end; with gradients all boundaries are taken and dropped.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


class BoundaryStates:
    """The states of one recurrent layer at chunk boundaries of one prompt, and their gradients.

    Args:
        length: positions of the prompt.
        spacing: positions between boundaries that are kept from capture to prompt backward, a multiple of the
            chunk; read only where there are gradients.
        gradient_dtype: in which gradients are summed, or a wider one where the state itself is wider; None
            where no gradients are wanted.
    """

    def __init__(self, *, length: int, spacing: int, gradient_dtype: torch.dtype | None) -> None:
        self.length, self.spacing = length, spacing
        self.gradient_dtype = gradient_dtype
        self._states: dict[int, dict[str, Tensor]] = {}
        self._gradients: dict[int, dict[str, Tensor]] = {}
        self._written = 0
        self._untaken = length
        self._most_states = self._most_bytes = self._most_gradient_bytes = 0

    @property
    def wants_gradient(self) -> bool:
        return self.gradient_dtype is not None

    def read(self, position: int) -> dict[str, Tensor] | None:
        """The state at a boundary; None at 0, where no token has been yet."""
        if position == 0:
            return None
        if position not in self._states:
            raise RuntimeError(
                f"state at {position} read when those at {sorted(self._states)} are held "
                f"and {self._written} of {self.length} positions are written"
            )
        return self._states[position]

    def write(self, start: int, end: int, **fields: Tensor) -> None:
        """Keeps the state after the chunk ``start`` to ``end - 1``, which must follow the one written before.

        Args:
            fields: the tensors themselves are kept, not copies.
        """
        if start != self._written or end > self.length:
            raise RuntimeError(
                f"state after {start}..{end} written after {self._written} of {self.length}: "
                "chunks are captured once and in order"
            )
        self._keep(end, fields)
        if not (self.wants_gradient and start % self.spacing == 0):
            self._states.pop(start, None)
        self._written = end

    def write_again(self, start: int, end: int, **fields: Tensor) -> None:
        """Keeps a boundary that was dropped in capture, until its gradient is taken."""
        fine = self.wants_gradient and self._written == self.length and end < self._untaken
        if not fine or end in self._states:
            raise RuntimeError(
                f"state after {start}..{end} written again when {self._written} of {self.length} are written, "
                f"those from {self._untaken} on are taken and those at {sorted(self._states)} are held"
            )
        self._keep(end, fields)

    def add_gradient(self, position: int, **fields: Tensor | None) -> None:
        """Adds to the gradient of the state at `position`, of those that read it."""
        if position != self._untaken:
            raise RuntimeError(f"gradient of the state at {position} comes when that at {self._untaken} is gathered")
        gradient = self._gradients.setdefault(position, {})
        for name, field in fields.items():
            if field is None:
                continue
            if name in gradient:
                gradient[name] += field
            else:
                dtype = torch.promote_types(self.gradient_dtype or field.dtype, field.dtype)
                gradient[name] = field.to(dtype, copy=True)
        self._most_gradient_bytes = max(self._most_gradient_bytes, sum(map(_bytes, self._gradients.values())))

    def take_gradient(self, start: int, end: int) -> dict[str, Tensor]:
        """The gathered gradient of the state after a chunk, and drops the state.

        Args:
            start, end: the chunk; it must precede the one taken before.

        Returns:
            Fields by name; one that nobody added to is absent.
        """
        if end != self._untaken:
            raise RuntimeError(
                f"gradient of the state after {start}..{end} taken when that at {self._untaken} is next: "
                "chunks run backwards once and in reverse order"
            )
        self._untaken = start
        self._states.pop(end, None)
        return self._gradients.pop(end, {})

    def check_complete(self) -> None:
        """Raises RuntimeError unless the prompt was written and, with gradients, all were taken."""
        if self._written != self.length:
            raise RuntimeError(f"prompt of {self.length} positions ends with {self._written} written")
        if self.wants_gradient and (self._untaken or self._states or self._gradients):
            raise RuntimeError(
                f"states at {sorted(self._states)} and gradients at {sorted(self._gradients)} are left at the end, "
                f"and the chunks below {self._untaken}"
            )

    def tensors(self) -> list[Tensor]:
        """The states that are held now."""
        return [field for state in self._states.values() for field in state.values()]

    def most_states(self) -> int:
        """The most boundaries that were held at once."""
        return self._most_states

    def bytes(self) -> int:
        """The most bytes of states that were held at once."""
        return self._most_bytes

    def gradient_bytes(self) -> int:
        """The most bytes of gradients that were held at once."""
        return self._most_gradient_bytes

    def _keep(self, position: int, fields: Mapping[str, Tensor]) -> None:
        self._states[position] = dict(fields)
        self._most_states = max(self._most_states, len(self._states))
        self._most_bytes = max(self._most_bytes, sum(map(_bytes, self._states.values())))


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(math.prod(t.shape) * t.element_size() for t in tensors.values())
