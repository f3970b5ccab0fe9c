"""Cuts groups into micro-batches: prompt chunks, responses, and whole sequences for the stock schedule.

For a prompt of P tokens and a response R_i of n tokens:
- prompt chunks cover positions 0 .. P-2;
- a response is [last prompt token] + R_i[:-1] from position P-1 on, with targets R_i, so that the first
  response token is trained too;
- a whole sequence is prompt + R_i[:-1], with the same targets.
Tokens are padded at the end to what sequence parallelism can split; the padding is seen by nobody.
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


def prompt_chunks(group: PromptGroup, phase: Phase, chunk_tokens: int, multiple: int) -> list[WorkItem]:
    """The prompt's chunks in order, as CAPTURE or PROMPT work; none for a prompt of one token."""
    captured = len(group.prompt) - 1
    starts = range(0, captured, chunk_tokens)
    return [_item(phase, s, group.prompt[s : min(s + chunk_tokens, captured)], multiple, group=group) for s in starts]


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


def responses(group: PromptGroup, multiple: int) -> Iterator[WorkItem]:
    """The non-empty responses, on top of the prompt's state."""
    last = len(group.prompt) - 1
    for index, response in enumerate(group.responses):
        if len(response):
            tokens = torch.cat([group.prompt[-1:], response[:-1]])
            yield _item(Phase.RESPONSE, last, tokens, multiple, targets=response, group=group, response=index)


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
        idle = _item(Phase.IDLE, 0, items[0].tokens.new_zeros(multiple), multiple)
        items += [idle] * (wanted - len(items))
    return items


def _item(phase: Phase, start: int, tokens: Tensor, multiple: int, **fields: Any) -> WorkItem:
    padding = -len(tokens) % multiple
    ids = torch.nn.functional.pad(tokens, (0, padding))
    positions = torch.arange(start, start + len(ids), device=ids.device)
    fields.setdefault("targets", tokens[:0])
    segment = Segment(phase=phase, start=start, length=len(tokens))
    return WorkItem(segment=segment, tokens=ids[None], position_ids=positions[None], **fields)
