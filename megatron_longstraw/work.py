"""Cuts groups into micro-batches: prompt chunks, responses, and whole sequences for the stock schedule.

For a prompt of P tokens and a response R_i of n tokens:
- prompt chunks cover positions 0 .. P-2;
- a response is [last prompt token] + R_i[:-1] from position P-1 on, with targets R_i, so that the first
  response token is trained too; short ones may be packed, one behind the other in one micro-batch;
- a whole sequence is prompt + R_i[:-1], with the same targets.
Tokens are padded at the end to what sequence parallelism can split; the padding is seen by nobody.

A segment's multiplicity is what a router counts its tokens as, so that a step's counts are those of the stock
schedule: a captured prompt token stands for one in each non-empty response, a token of a response for itself, and
prompt chunks that run again, idle work and all work of an evaluation for none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_longstraw.prompt_state import Phase, Segment


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """One prompt and its responses, as the schedule takes them.

    Args:
        prompt: [P] int64 ids, P >= 1.
        responses: [n_i] int64 ids each; an empty response has no work and no loss.
        payload: what the forward step needs besides (advantages, log-probs of the rollout, ...).
    """

    prompt: Tensor
    responses: Sequence[Tensor]
    payload: Any = None

    def __post_init__(self) -> None:
        if self.prompt.dim() != 1 or not len(self.prompt):
            raise ValueError(f"a group needs a prompt of shape [P] with P >= 1, got {list(self.prompt.shape)}")
        for i, response in enumerate(self.responses):
            if response.dim() != 1:
                raise ValueError(f"response {i} of a group needs shape [n], got {list(response.shape)}")

    @property
    def has_work(self) -> bool:
        return any(len(r) for r in self.responses)


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """One micro-batch. Its tensors are made when asked for, so a prompt's items cost nothing until they run.

    Args:
        segment: what it is and which positions it covers.
        group: the group it is of. Idle work has one too, for its device, and nothing else of it; where a rank has
            no group at all while others do, it is an empty one without payload (`no_group`).
        responses: indices of its responses in the group; none for prompt chunks and idle work.
        multiple: the number of tokens is padded to a multiple of this.
    """

    segment: Segment
    group: PromptGroup
    responses: tuple[int, ...] = ()
    multiple: int = 1

    @property
    def padded_length(self) -> int:
        """T, the tokens of the micro-batch with its padding."""
        return self.segment.length + -self.segment.length % self.multiple

    @property
    def tokens(self) -> Tensor:
        """[1, T] ids, padded with 0."""
        ids = self._ids()
        return torch.nn.functional.pad(ids, (0, -len(ids) % self.multiple))[None]

    @property
    def position_ids(self) -> Tensor:
        """[1, T] positions."""
        sequences = self.segment.sequences(self.padded_length)
        steps = [torch.arange(s.stop - s.start, device=self.group.prompt.device) for s in sequences]
        return self.segment.start + torch.cat(steps)[None]

    @property
    def targets(self) -> Tensor:
        """[n] ids to predict, of one response after the other; empty for prompt chunks and idle work."""
        return torch.cat([self.group.prompt[:0], *(self.group.responses[i] for i in self.responses)])

    @property
    def target_counts(self) -> list[int]:
        """How many of the targets are each response's."""
        return [len(self.group.responses[i]) for i in self.responses]

    @property
    def first_row(self) -> int:
        """The token that predicts the first target."""
        return len(self.group.prompt) - 1 if self.segment.phase is Phase.PLAIN else 0

    def _ids(self) -> Tensor:
        prompt, start = self.group.prompt, self.segment.start
        if self.segment.phase is Phase.IDLE:
            return prompt.new_zeros(self.segment.length)
        if not self.responses:
            return prompt[start : self.segment.end]
        return torch.cat([ids for i in self.responses for ids in (prompt[start:], self.group.responses[i][:-1])])


def no_group(device: torch.device) -> PromptGroup:
    """A group without work or payload."""
    return PromptGroup(prompt=torch.zeros(1, dtype=torch.int64, device=device), responses=())


def prompt_chunks(
    group: PromptGroup, phase: Phase, chunk_tokens: int, multiple: int, multiplicity: int = 0
) -> list[WorkItem]:
    """The prompt's chunks in order, as CAPTURE or PROMPT work; none for a prompt of one token."""
    captured = len(group.prompt) - 1
    segments = (
        Segment(phase=phase, start=start, length=min(chunk_tokens, captured - start), multiplicity=multiplicity)
        for start in range(0, captured, chunk_tokens)
    )
    return [WorkItem(segment=segment, group=group, multiple=multiple) for segment in segments]


def prompt_backward(group: PromptGroup, chunk_tokens: int, multiple: int, boundary_interval: int) -> list[WorkItem]:
    """The prompt's chunks as PROMPT work, last first.

    With an interval k > 1 they come in runs of k from the prompt's start. A run's recurrent states within, which
    capture dropped, are written again by RECAPTURE work just before the run; its last chunk leaves none that is
    missing. So each chunk but one in k flows forward once more.
    """
    chunks = prompt_chunks(group, Phase.PROMPT, chunk_tokens, multiple)
    again = prompt_chunks(group, Phase.RECAPTURE, chunk_tokens, multiple)
    items: list[WorkItem] = []
    for first in reversed(range(0, len(chunks), boundary_interval)):
        run = slice(first, first + boundary_interval)
        items += again[run][:-1]
        items += reversed(chunks[run])
    return items


def responses(
    group: PromptGroup, multiple: int, multiplicity: int = 1, pack_tokens: int = 0, sequence_multiple: int = 1
) -> list[WorkItem]:
    """The non-empty responses in order, on top of the prompt's state; as many in one item as make `pack_tokens`, each
    padded to `sequence_multiple`."""
    packs: list[list[int]] = []
    room = 0
    for index in _non_empty(group):
        tokens = len(group.responses[index])
        tokens += -tokens % sequence_multiple
        if tokens > room:
            packs.append([])
            room = pack_tokens
        packs[-1].append(index)
        room -= tokens
    return [
        _response_item(group, Phase.RESPONSE, len(group.prompt) - 1, tuple(pack), multiple, multiplicity)
        for pack in packs
    ]


def whole_sequences(group: PromptGroup, multiple: int) -> list[WorkItem]:
    """The non-empty responses, each behind a prompt of its own, for the stock schedule."""
    return [_response_item(group, Phase.PLAIN, 0, (index,), multiple) for index in _non_empty(group)]


def filled(items: Sequence[WorkItem], count: int, phase: Phase, group: PromptGroup, multiple: int) -> list[WorkItem]:
    """Adds idle work at the end, in place of work of a phase, until there are `count` items.

    Args:
        items: work of the phase.
        count: how many items other ranks have, whose collectives this rank takes part in.
        phase: what the others run meanwhile.
        group: of the idle work.
        multiple: tokens of a micro-batch are a multiple of this.
    """
    return [*items, *[_idle(group, multiple, phase)] * (count - len(items))]


def padded(items: Sequence[WorkItem], pipeline_stages: int, multiple: int) -> list[WorkItem]:
    """Adds idle work at the end until the interleaved schedule can run the items.

    Megatron's interleaved schedule wants a multiple of the pipeline's stages, and with as many micro-batches as
    stages it hangs on variable shapes over gloo: it gets at least twice as many.

    Args:
        items: at least one item.
        pipeline_stages: of an interleaved pipeline; 1 where the schedule is another.
        multiple: tokens of a micro-batch are a multiple of this.
    """
    items = list(items)
    if pipeline_stages > 1:
        wanted = max(-(-len(items) // pipeline_stages), 2) * pipeline_stages
        items += [_idle(items[0].group, multiple)] * (wanted - len(items))
    return items


def _idle(group: PromptGroup, multiple: int, in_place_of: Phase | None = None) -> WorkItem:
    segment = Segment(phase=Phase.IDLE, start=0, length=multiple, multiplicity=0, in_place_of=in_place_of)
    return WorkItem(segment=segment, group=group, multiple=multiple)


def _non_empty(group: PromptGroup) -> list[int]:
    return [index for index, response in enumerate(group.responses) if len(response)]


def _response_item(
    group: PromptGroup, phase: Phase, start: int, indices: tuple[int, ...], multiple: int, multiplicity: int = 1
) -> WorkItem:
    lengths = tuple(len(group.prompt) - start + len(group.responses[index]) - 1 for index in indices)
    packed = lengths if len(lengths) > 1 else ()
    segment = Segment(phase=phase, start=start, length=sum(lengths), packed=packed, multiplicity=multiplicity)
    return WorkItem(segment=segment, group=group, responses=indices, multiple=multiple)
