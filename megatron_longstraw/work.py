"""Cuts groups into micro-batches: prompt chunks, responses, and whole sequences for the stock schedule.

For a prompt of P tokens and a response R_i of n tokens:
- prompt chunks cover positions 0 .. P-2;
- a response is [last prompt token] + R_i[:-1] from position P-1 on, with targets R_i, so that the first
  response token is trained too;
- a whole sequence is prompt + R_i[:-1], with the same targets.
Tokens are padded at the end to what sequence parallelism can split; the padding is seen by nobody.

A segment's multiplicity is what a router counts its tokens as, so that a step's counts are those of the stock
schedule: a captured prompt token stands for one in each non-empty response, a token of a response for itself, and
prompt chunks that run again, idle work and all work of an evaluation for none.
"""

from collections.abc import Iterator, Sequence
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
    """One micro-batch.

    Args:
        segment: what it is and which positions it covers.
        tokens: [1, T] ids, padded. position_ids: [1, T].
        targets: [n] ids to predict; empty for prompt chunks.
        first_row: the token that predicts the first target.
        group: the group it is of; None for idle work.
        response: index of the response in the group, or None.
    """

    segment: Segment
    tokens: Tensor
    position_ids: Tensor
    targets: Tensor
    first_row: int = 0
    group: PromptGroup | None = None
    response: int | None = None


def prompt_chunks(
    group: PromptGroup, phase: Phase, chunk_tokens: int, multiple: int, multiplicity: int = 0
) -> list[WorkItem]:
    """The prompt's chunks in order, as CAPTURE or PROMPT work; none for a prompt of one token."""
    captured = len(group.prompt) - 1
    return [
        _item(
            phase,
            start,
            group.prompt[start : min(start + chunk_tokens, captured)],
            multiple,
            multiplicity=multiplicity,
            group=group,
        )
        for start in range(0, captured, chunk_tokens)
    ]


def responses(group: PromptGroup, multiple: int, multiplicity: int = 1) -> Iterator[WorkItem]:
    """The non-empty responses, on top of the prompt's state."""
    last = len(group.prompt) - 1
    for index, response in enumerate(group.responses):
        if len(response):
            tokens = torch.cat([group.prompt[-1:], response[:-1]])
            yield _item(
                Phase.RESPONSE,
                last,
                tokens,
                multiple,
                multiplicity=multiplicity,
                targets=response,
                group=group,
                response=index,
            )


def whole_sequences(group: PromptGroup, multiple: int) -> Iterator[WorkItem]:
    """The non-empty responses, each behind a prompt of its own, for the stock schedule."""
    for index, response in enumerate(group.responses):
        if len(response):
            tokens = torch.cat([group.prompt, response[:-1]])
            first_row = len(group.prompt) - 1
            yield _item(
                Phase.PLAIN,
                0,
                tokens,
                multiple,
                targets=response,
                first_row=first_row,
                group=group,
                response=index,
            )


def filled(items: Sequence[WorkItem], count: int, phase: Phase, multiple: int, device: torch.device) -> list[WorkItem]:
    """Adds idle work at the end, in place of work of a phase, until there are `count` items.

    Args:
        items: work of the phase.
        count: how many items other ranks have, which this rank shares collectives with.
        phase: what the others run meanwhile.
        multiple: tokens of a micro-batch are a multiple of this.
        device: of the tokens.
    """
    return [*items, *[_idle(multiple, device, phase)] * (count - len(items))]


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
        items += [_idle(multiple, items[0].tokens.device)] * (wanted - len(items))
    return items


def _idle(multiple: int, device: torch.device, in_place_of: Phase | None = None) -> WorkItem:
    tokens = torch.zeros(multiple, dtype=torch.int64, device=device)
    return _item(Phase.IDLE, 0, tokens, multiple, multiplicity=0, in_place_of=in_place_of)


def _item(
    phase: Phase,
    start: int,
    tokens: Tensor,
    multiple: int,
    *,
    multiplicity: int = 1,
    in_place_of: Phase | None = None,
    **fields: Any,
) -> WorkItem:
    padding = -len(tokens) % multiple
    ids = torch.nn.functional.pad(tokens, (0, padding))
    positions = torch.arange(start, start + len(ids), device=ids.device)
    fields.setdefault("targets", tokens[:0])
    segment = Segment(phase=phase, start=start, length=len(tokens), multiplicity=multiplicity, in_place_of=in_place_of)
    return WorkItem(segment=segment, tokens=ids[None], position_ids=positions[None], **fields)
