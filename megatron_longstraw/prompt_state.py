"""What a prompt leaves behind on a rank, and where in a step a model is.

Every rank keeps, for each of its layers, the *rows* that later tokens need of the prompt (one row a position),
and only those that it owns. Invariants, each checked where it could break:

1. A row is written once, in order of positions, during capture.
2. A segment that starts at position p reads the rows before p, and no other.
3. In exact mode dL/d(row) is summed into the row's gradient while responses and later prompt chunks run
   backwards; it is taken once, when the row's own chunk runs backwards, last chunk first; nothing is added
   to a gradient that was taken.
4. At the end of a group every row has been written and, in exact mode, every gradient has been taken.
5. A field's values may be dropped when nothing reads them any more; nothing reads them then.

Recurrent layers keep states at chunk boundaries instead of rows: `megatron_longstraw.recurrent_state`. Sparse
attention may keep what it chose for the prompt's own backward: `megatron_longstraw.kept_choices`.
"""

import dataclasses
import enum
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_longstraw.kept_choices import KeptChoices
from megatron_longstraw.recurrent_state import BoundaryStates


class Phase(enum.Enum):
    """What a micro-batch is to the schedule."""

    PLAIN = "plain"
    """A whole sequence, as stock Megatron runs it: no prompt state."""
    CAPTURE = "capture"
    """A prompt chunk without autograd, which writes its rows."""
    RECAPTURE = "recapture"
    """A prompt chunk without autograd, which writes again the recurrent states that capture dropped."""
    RESPONSE = "response"
    """The last prompt token and a response, or several of both, on top of the prompt's rows."""
    PROMPT = "prompt"
    """A prompt chunk with autograd, whose backward starts from its rows' gradients."""
    IDLE = "idle"
    """Nothing: fills a micro-batch where the pipeline needs more of them."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The tokens of one micro-batch: a sequence at positions ``start`` to ``end - 1``; padding may follow it.

    Responses may be packed: several sequences one behind the other, each from ``start`` on, that don't see each other.
    """

    phase: Phase
    start: int
    length: int
    """Tokens, of all sequences."""
    packed: tuple[int, ...] = ()
    """Tokens of each sequence; empty where there is one."""
    multiplicity: int = 1
    """How often the stock schedule would see each of the tokens while this is the one time that we do: what a
    router counts them as. 0 for tokens that are counted elsewhere, or not at all."""
    in_place_of: Phase | None = None
    """Of idle work: the phase of what other ranks run meanwhile, in whose collectives this rank takes part."""

    @property
    def end(self) -> int:
        """Behind the last position of the one sequence."""
        assert not self.packed
        return self.start + self.length

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return self.packed or (self.length,)

    def sequences(self, tokens: int) -> list[slice]:
        """Where each sequence lies among the `tokens` of the micro-batch; padding goes with the last one."""
        first = list(itertools.accumulate(self.lengths[:-1], initial=0))
        return [slice(*ends) for ends in zip(first, [*first[1:], tokens], strict=True)]

    def padded_tokens(self, multiple: int) -> int:
        """Tokens of all sequences, if each is padded to a multiple."""
        return sum(length + -length % multiple for length in self.lengths)

    @property
    def is_prompt(self) -> bool:
        """Whether it is there for the state it leaves, so that the last layer's output is of no use."""
        return self._common_phase in (Phase.CAPTURE, Phase.RECAPTURE, Phase.PROMPT)

    @property
    def is_plain(self) -> bool:
        """Whether it is a stock sequence, or idle work while other ranks run one: they are recomputed together."""
        return self._common_phase is Phase.PLAIN

    @property
    def _common_phase(self) -> Phase:
        """What the ranks that share collectives run, also where this one is idle."""
        return self.in_place_of or self.phase


Attend = Callable[[Callable[[], tuple[Tensor, ...]]], tuple[Tensor, ...]]
"""Gives an attention's output, and what else its backward needs, of what computes them or of an earlier time."""


def attend_anew(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The `Attend` that computes whenever it is asked."""
    return compute()


@dataclass
class MicroBatch:
    """What the layers of a rank share while one micro-batch passes; it lives as long as the micro-batch's graph.

    Args:
        segment: the micro-batch.
        chosen: number of a layer that chooses positions for others too (IndexShare) -> the rows that its choice
            is in, of this rank's share of the tokens. Layers that reuse a choice are recomputed before the layer that
            made it, so recomputation never makes one anew.
        attended: number of a layer -> what its attention gave (see `Attend`), kept for its recomputation.
        is_recomputed: whether layers run to rebuild a graph, not for the first time.
    """

    segment: Segment
    chosen: dict[int, Tensor] = field(default_factory=dict)
    attended: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    is_recomputed: bool = False


def _outside() -> MicroBatch:
    """What layers see when a host calls the model without the schedule: a stock sequence, whatever its length."""
    return MicroBatch(Segment(phase=Phase.PLAIN, start=0, length=sys.maxsize))


class Runtime:
    """Tells the layers of a model what runs now. The model's builder makes one and the schedule drives it.

    Attributes:
        micro_batch: whose forward (or recomputed forward) runs.
        state: the prompt state of the group that runs, or None between groups.
        recompute_above: layers recompute their forward in backward for segments of more tokens than this, each sequence
            padded to `sequence_multiple`; None: never.
        recurrent: whether the model has layers that keep boundary states.
        sequence_multiple: what some layer pads the tokens of each sequence of a segment to.
        keep_attention: whether a recomputed layer takes its attention from its first forward (not in stock sequences).
        recompute_plain: whether they recompute stock sequences too, instead of Megatron's own recomputation.
        plain_is_recomputable: whether stock sequences can be recomputed at all; the model says so.
        on_choice: takes (layer number, segment, what was scored, the positions chosen) of sparse attention and
            returns the positions to take: see `index_choices`.
    """

    def __init__(self) -> None:
        self.recurrent = False
        self.sequence_multiple = 1
        self.plain_is_recomputable = True
        self.on_choice: Callable[[int, Segment, Any, Tensor], Tensor] | None = None
        self.end()

    @property
    def segment(self) -> Segment:
        """The micro-batch that runs."""
        return self.micro_batch.segment

    @property
    def recomputes(self) -> bool:
        """Whether layers recompute, in backward, the forward that runs now."""
        if not torch.is_grad_enabled():
            return False
        if self.segment.is_plain:
            return self.recompute_plain
        tokens = self.segment.padded_tokens(self.sequence_multiple)
        return self.recompute_above is not None and tokens > self.recompute_above

    def attend_of(self, layer_number: int) -> Attend:
        """How a layer gets its attention: a recomputed layer may take that of its first forward.

        To be asked for in the layer, where autograd is as it is for the layer, and called within its operators.
        """
        attended = self.micro_batch.attended
        if not (self.keep_attention and self.recomputes) or self.segment.is_plain:
            return attend_anew

        def keep(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
            out, *rest = compute()
            # detached: an operator's output leads to its graph, which leads to what recomputes it, and so to here
            attended[layer_number] = out.detach(), *rest
            return out, *rest

        return (lambda _: attended.pop(layer_number)) if self.micro_batch.is_recomputed else keep

    def begin(self, segment: Segment) -> None:
        """Starts the forward of a micro-batch."""
        self.micro_batch = MicroBatch(segment)

    def end(self) -> None:
        """Ends a group or a stock step: what runs from here on is not the schedule's, until it says so again."""
        self.micro_batch = _outside()
        self.state: PromptState | None = None
        self.recompute_above: int | None = 0
        self.keep_attention = self.recompute_plain = False

    def resumption(self) -> "_Resumption":
        """A context that re-enters the micro-batch that runs now, to recompute a layer of it."""
        return _Resumption(self, dataclasses.replace(self.micro_batch, is_recomputed=True))

    def current_state(self) -> "PromptState":
        """The prompt state; RuntimeError outside the schedule."""
        if self.state is None:
            raise RuntimeError(f"phase {self.segment.phase.value} needs a prompt state: only the schedule runs it")
        return self.state


class _Resumption:
    """Re-enters a micro-batch, once: a second backward would add to the prompt's gradient again."""

    def __init__(self, runtime: Runtime, micro_batch: MicroBatch) -> None:
        self._runtime = runtime
        self._again: MicroBatch | None = micro_batch
        self._interrupted: MicroBatch | None = None

    def __enter__(self) -> None:
        if self._again is None:
            raise RuntimeError("a layer is recomputed a second time: the graph of a micro-batch runs backward once")
        self._interrupted, self._runtime.micro_batch, self._again = self._runtime.micro_batch, self._again, None

    def __exit__(self, *error: Any) -> None:
        assert self._interrupted is not None
        self._runtime.micro_batch, self._interrupted = self._interrupted, None


@dataclass(frozen=True)
class Pages:
    """How the positions of a prompt are dealt over an owner group: whole pages, round-robin.

    Args:
        page_tokens: positions in a page.
        rank: this rank in the owner group.
        size: ranks in the owner group.
    """

    page_tokens: int
    rank: int
    size: int

    def owned_before(self, position: int) -> int:
        """How many positions below `position` this rank owns."""
        if self.size == 1:
            return position
        rounds, rest = divmod(position, self.page_tokens * self.size)
        mine = min(max(rest - self.rank * self.page_tokens, 0), self.page_tokens)
        return rounds * self.page_tokens + mine

    def most_owned_before(self, position: int) -> int:
        """How many positions below `position` the first rank owns, which owns the most."""
        return dataclasses.replace(self, rank=0).owned_before(position)

    def owners_and_rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rank that owns each position, and which of that rank's rows it is."""
        page = positions // self.page_tokens
        return page % self.size, page // self.size * self.page_tokens + positions % self.page_tokens

    def runs(self, start: int, end: int) -> Iterator[tuple[slice, slice]]:
        """The owned positions of ``start`` to ``end - 1``, in order, as contiguous runs.

        Yields:
            The run within the segment (0 is `start`) and within this rank's rows.
        """
        first = start
        while first < end:
            page = first // self.page_tokens
            last = end if self.size == 1 else min(end, (page + 1) * self.page_tokens)
            if page % self.size == self.rank or self.size == 1:
                row = self.owned_before(first)
                yield slice(first - start, last - start), slice(row, row + last - first)
            first = last


class OwnedRows:
    """The rows of one layer that this rank owns, and their gradients.

    Args:
        length: positions of the prompt.
        shapes: name of each field of a row that has a gradient -> its shape.
        pages: how positions are dealt over the owner group.
        dtype: of the rows.
        device: of rows and gradients.
        gradient_dtype: in which gradients are summed; None where none are wanted.
        constants: the same for the fields that have none.

    Attributes:
        values: name of each field that was not dropped -> its owned rows [owned, *shape].
        gradients: name of each field whose gradient is wanted -> what is summed of it, [owned, *shape].
    """

    def __init__(
        self,
        *,
        length: int,
        shapes: Mapping[str, tuple[int, ...]],
        pages: Pages,
        dtype: torch.dtype,
        device: torch.device,
        gradient_dtype: torch.dtype | None,
        constants: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.length = length
        self.pages = pages
        owned = pages.owned_before(length)
        fields = {**shapes, **(constants or {})}
        self.values = {n: torch.empty(owned, *shape, dtype=dtype, device=device) for n, shape in fields.items()}
        self.gradients: dict[str, Tensor] = {}
        if gradient_dtype is not None:
            self.gradients = {n: torch.zeros_like(self.values[n], dtype=gradient_dtype) for n in shapes}
        self._bytes = _bytes(self.values)
        self._written = 0
        self._untaken = length

    def write(self, segment: Segment, **fields: Tensor) -> None:
        """Keeps the owned ones among a prompt chunk's rows.

        Args:
            segment: the chunk; it must follow the one written before.
            fields: [>= length, *shape], the rows of the segment in order.
        """
        if segment.start != self._written or segment.end > self.length:
            raise RuntimeError(
                f"rows {segment.start}..{segment.end} written after {self._written} of {self.length}: "
                "chunks are captured once and in order"
            )
        for here, row in self.pages.runs(segment.start, segment.end):
            for name, rows in fields.items():
                self.values[name][row] = rows[here]
        self._written = segment.end

    def blocks(self, end: int, block_tokens: int) -> Iterator[slice]:
        """The owned rows of the positions below `end`, as slices of at most `block_tokens` rows."""
        self.check_written(end)
        rows = self.pages.owned_before(end)
        for first in range(0, rows, block_tokens):
            yield slice(first, min(first + block_tokens, rows))

    def check_written(self, end: int) -> None:
        """Raises RuntimeError unless all rows before `end` are written."""
        if end > self._written:
            raise RuntimeError(f"rows before {end} read when {self._written} of {self.length} are written")

    def read(self, field: str, end: int, rows: slice) -> Tensor:
        """Some owned rows of a field, for a segment that starts at `end`; those behind it are memory as it is."""
        self.check_written(end)
        if field not in self.values:
            raise RuntimeError(f"{field} of rows before {end} read after it was dropped")
        return self.values[field][rows]

    def add_gradient(self, end: int, block: slice, **fields: Tensor) -> None:
        """Adds to the gradients of a block of rows, read by a segment that starts at `end`."""
        self._check_untaken(end)
        for name, gradient in fields.items():
            if name in self.gradients:
                self.gradients[name][block] += gradient

    def _check_untaken(self, end: int) -> None:
        if end > self._untaken:
            raise RuntimeError(f"gradient of rows before {end} comes after those from {self._untaken} on were taken")

    def take_gradient(self, segment: Segment, **fields: Tensor) -> None:
        """Adds the gathered gradients of a prompt chunk's owned rows to `fields`, in place.

        Args:
            segment: the chunk; it must precede the one taken before.
            fields: [>= length, *shape], the gradients of the segment's rows so far.
        """
        if segment.end != self._untaken:
            raise RuntimeError(
                f"gradient of rows {segment.start}..{segment.end} taken when {self._untaken} are left: "
                "chunks run backwards once and in reverse order"
            )
        for here, row in self.pages.runs(segment.start, segment.end):
            for name, gradient in fields.items():
                gradient[here] += self.gradients[name][row]
        self._untaken = segment.start

    def drop(self, *fields: str) -> None:
        """Frees the values of fields that nothing reads from here on; those that are gone stay so."""
        for name in fields:
            self.values.pop(name, None)

    def check_complete(self) -> None:
        """Raises RuntimeError unless all rows were written and, where there are gradients, all were taken."""
        if self._written != self.length or (self.gradients and self._untaken):
            raise RuntimeError(
                f"prompt of {self.length} rows ends with {self._written} written and {self._untaken} gradients left"
            )

    def bytes(self) -> int:
        """Of the values, at their most."""
        return self._bytes

    def gradient_bytes(self) -> int:
        return _bytes(self.gradients)


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """How prompt state is kept; see `megatron_longstraw.config.ScheduleConfig` for the meaning of each."""

    page_tokens: int = 256
    attention_block_tokens: int = 65536
    query_block_tokens: int = 128
    gradient_dtype: torch.dtype | None = torch.float32
    """None keeps no gradients (detached)."""
    keep_choices: bool = False
    """Whether the positions that sparse attention chose for the prompt are kept for its backward."""
    boundary_spacing: int = 1
    """Positions between the recurrent states that are kept until the prompt backward."""


class PromptState:
    """The rows, boundary states and choices of all of this rank's layers for one prompt.

    Args:
        length: positions captured; the prompt's last token is not among them.
        options: how rows are kept.
    """

    def __init__(self, length: int, options: StateOptions) -> None:
        self.length = length
        self.options = options
        self._layers: dict[int, OwnedRows] = {}
        self._boundaries: dict[int, BoundaryStates] = {}
        self._choices: dict[int, KeptChoices] = defaultdict(KeptChoices)

    def rows(
        self,
        layer_number: int,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        owner_rank: int,
        owners: int,
        dtype: torch.dtype,
        device: torch.device,
        constants: Mapping[str, tuple[int, ...]] | None = None,
    ) -> OwnedRows:
        """A layer's rows, allocated whole when first asked for."""
        if layer_number not in self._layers:
            gradient_dtype = self.options.gradient_dtype
            if gradient_dtype is not None:
                gradient_dtype = torch.promote_types(gradient_dtype, dtype)
            self._layers[layer_number] = OwnedRows(
                length=self.length,
                shapes=shapes,
                pages=Pages(self.options.page_tokens, owner_rank, owners),
                dtype=dtype,
                device=device,
                gradient_dtype=gradient_dtype,
                constants=constants,
            )
        return self._layers[layer_number]

    def boundaries(self, layer_number: int) -> BoundaryStates:
        """A recurrent layer's states at chunk boundaries."""
        if layer_number not in self._boundaries:
            self._boundaries[layer_number] = BoundaryStates(
                length=self.length,
                spacing=self.options.boundary_spacing,
                gradient_dtype=self.options.gradient_dtype,
            )
        return self._boundaries[layer_number]

    def choices(self, layer_number: int) -> KeptChoices:
        """What a layer of sparse attention chose, where `StateOptions.keep_choices` says so."""
        return self._choices[layer_number]

    def layers(self) -> dict[int, OwnedRows | BoundaryStates]:
        """What each layer that ran keeps for later tokens, by layer number."""
        return {**self._layers, **self._boundaries}

    def check_complete(self) -> None:
        """Raises RuntimeError, naming the layer, unless all was written, and every gradient and choice taken."""
        for number, kept in self._kept():
            try:
                kept.check_complete()
            except RuntimeError as error:
                raise RuntimeError(f"layer {number}: {error}") from None

    def bytes(self) -> int:
        """Bytes of rows and, at their most, of boundary states and choices on this rank."""
        return sum(kept.bytes() for _, kept in self._kept())

    def gradient_bytes(self) -> int:
        """Bytes of the rows' gradients and, at their most, of the boundaries' on this rank."""
        return sum(kept.gradient_bytes() for _, kept in self._kept())

    def _kept(self) -> Iterator[tuple[int, OwnedRows | BoundaryStates | KeptChoices]]:
        return itertools.chain(self._layers.items(), self._boundaries.items(), self._choices.items())


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(math.prod(t.shape) * t.element_size() for t in tensors.values())
