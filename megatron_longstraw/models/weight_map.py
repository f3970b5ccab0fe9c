"""How an architecture describes its HuggingFace checkpoint; `megatron_longstraw.weights` reads and writes by it.

A weight map is a function from a parameter's name in the whole Megatron model (`parameters.named_tensors`) to how
the parameter is put together from HuggingFace tensors:

    def weight_map(name: str) -> Sequence[Source]:
        ...
        return [Source([Piece("model.layers.0.mlp.gate_proj.weight"), Piece("model.layers.0.mlp.up_proj.weight")])]

The whole parameter is the pieces stacked along dimension 0, plus `Source.offset`. A piece may be a part of a
HuggingFace tensor: some of its rows, or one entry of a stack. Where several layouts of a checkpoint exist (experts
stacked in one tensor, or one tensor an expert) the map returns several sources, the preferred one first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a HuggingFace tensor.

    Args:
        name: the tensor's name in the checkpoint.
        start: first row (dimension 0, after `entry` was taken).
        stop: row after the last one; None for the end.
        entry: index into dimension 0 of a stacked tensor, such as [experts, rows, columns]; rows are then counted
            within the entry.
    """

    name: str
    start: int = 0
    stop: int | None = None
    entry: int | None = None


@dataclass(frozen=True)
class Source:
    """How a whole parameter is made of HuggingFace tensors.

    Args:
        pieces: stacked along dimension 0.
        offset: Megatron's value minus HuggingFace's (-1 for a norm that Megatron keeps zero-centred).
    """

    pieces: Sequence[Piece]
    offset: float = 0.0


WeightMap = Callable[[str], Sequence[Source]]
"""Name of a whole Megatron parameter or buffer -> its sources, the preferred one first."""
