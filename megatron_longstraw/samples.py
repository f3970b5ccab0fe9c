"""A host's ordinary samples (prompt + response, one a micro-batch), as groups of the schedule and back.

A sample's prompt ends at its first trained position. With masks shifted as Megatron's are (``loss_mask[t]`` is the
weight of predicting ``labels[t]``, the token after ``tokens[t]``), and f and e the first and last t of a non-zero
mask, the prompt is ``tokens[: f + 1]``: its last token predicts the first target. Samples of equal prompts make a
group. What the host's forward step gets of a sample is then its fields at positions f .. e: a sample with a prompt of
one token. What comes before is the prompt's chunks, which all samples of a group share; what comes after is trained
by nobody, and is not run. A sample without a trained token is run at its first position only, where its loss is
masked as it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_longstraw.config import ConfigError
from megatron_longstraw.prompt_state import Phase
from megatron_longstraw.work import PromptGroup, WorkItem

_PACKED = ("cu_seqlens", "cu_seqlens_q", "packed_seq_params")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One batch of a host's iterator.

    Args:
        fields: the batch: "tokens", "loss_mask" and all else that has a value per position are [1, S, ...];
            "attention_mask" is None where it was there, as it says nothing that isn't known.
        first: the first trained position, or 0.
        end: one past the last trained position, or 1.
    """

    fields: Mapping[str, Any]
    first: int
    end: int

    @property
    def prompt(self) -> Tensor:
        """[first + 1] ids."""
        return self.fields["tokens"][0, : self.first + 1]


@dataclass(frozen=True, kw_only=True)
class Members:
    """The payload of a group: its samples, one a response, and their places in the host's order."""

    samples: Sequence[Sample]
    places: Sequence[int]


def read_sample(batch: Any, name: str) -> Sample:
    """Checks a batch and finds its prompt.

    Args:
        batch: a mapping with "tokens" [1, S] and "loss_mask" [1, S]; every other tensor in it has a value per position
            ([1, S, ...]) or one per sample ([] or [1]). "attention_mask" may be there if it is causal: [1, 1, S, S],
            True where attention is not.
        name: what to call it in an error.

    Raises:
        ConfigError: names the field, what it is, and what is needed.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"{name} is a {type(batch).__name__}: needs a mapping from names to tensors, with 'tokens' and 'loss_mask'"
        )
    for field in ("tokens", "loss_mask"):
        if not isinstance(batch.get(field), Tensor):
            raise ConfigError(f"{name} has no tensor {field!r}: needs one of shape [1, S]; it has {sorted(batch)}")
    for field in _PACKED:
        if batch.get(field) is not None:
            raise ConfigError(f"{name}: {field} is set, so sequences are packed: needs one sequence a micro-batch")
    shape = batch["tokens"].shape
    if len(shape) != 2 or shape[0] != 1 or not shape[1]:
        raise ConfigError(
            f"{name}: tokens have shape {list(shape)}: needs [1, S]; set the host's micro-batch size to 1, as its mean "
            "over the samples of a micro-batch can't be split"
        )
    for field, value in batch.items():
        if not isinstance(value, Tensor) or field == "attention_mask" or value.shape[:2] == shape:
            continue
        if field == "loss_mask" or value.shape not in ((), (1,)):
            of_sample = "" if field == "loss_mask" else ", or [] or [1], one for the sample"
            raise ConfigError(
                f"{name}: {field} has shape {list(value.shape)}: needs {list(shape)} or {[*shape, '...']}, a value per "
                f"position{of_sample}"
            )
    trained = batch["loss_mask"].reshape(shape[1], -1).any(dim=1).nonzero()
    first, last = (int(trained[0]), int(trained[-1])) if len(trained) else (0, 0)
    _check_causal(batch.get("attention_mask"), shape[1], last + 1, name)
    checked = {"attention_mask": None} if "attention_mask" in batch else {}
    return Sample(fields={**batch, **checked}, first=first, end=last + 1)


def _check_causal(mask: Any, length: int, end: int, name: str) -> None:
    """Refuses a mask that is another than the causal one at the positions before `end`, which are what runs."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != (1, 1, length, length):
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigError(f"{name}: attention_mask is {found}: needs none, or a causal one, [1, 1, {length}, {length}]")
    seen = mask[0, 0, :end, :end].bool()
    if not torch.equal(seen, torch.ones_like(seen).triu(1)):
        raise ConfigError(f"{name}: attention_mask is not the causal one, and attention is causal: leave it out")


def group_samples(samples: Sequence[Sample]) -> list[PromptGroup]:
    """Groups of samples with equal prompts, in the order of their first samples; the payload is `Members`."""
    places: dict[bytes, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample.prompt.cpu().numpy().tobytes(), []).append(place)
    return [
        PromptGroup(
            prompt=samples[members[0]].prompt,
            responses=[_response(samples[place]) for place in members],
            payload=Members(samples=[samples[place] for place in members], places=members),
        )
        for members in places.values()
    ]


def _response(sample: Sample) -> Tensor:
    """[end - first] ids: as many as are trained or lie between; the last one is the host's to know, and stays 0."""
    ids = sample.fields["tokens"][0, sample.first + 1 : sample.end]
    return torch.nn.functional.pad(ids, (0, 1))


def micro_batch(item: WorkItem, idle: Sample) -> dict[str, Any]:
    """What a host's forward step gets for a work item: the fields of a sample at the item's positions.

    Prompt chunks and idle work have a loss mask of zero. Positions that are padded hold zeros.

    Args:
        item: of a group of `group_samples`, or idle work of any.
        idle: a sample whose fields idle work has.
    """
    if item.segment.phase is Phase.IDLE:
        sample = idle
    else:
        sample = item.group.payload.samples[item.responses[0] if item.responses else 0]
    shape = sample.fields["tokens"].shape
    start, end = item.segment.start, item.segment.end

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:2] != shape:
            return value
        piece = value[:, start:end]
        if name == "loss_mask" and not item.responses:
            piece = torch.zeros_like(piece)
        return torch.nn.functional.pad(piece, (0, 0) * (value.dim() - 2) + (0, item.padded_length - piece.shape[1]))

    return {name: cut(name, value) for name, value in sample.fields.items()}
