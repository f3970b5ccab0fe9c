"""How a group is cut into micro-batches; that their gradients are right is the schedule's tests."""

import pytest
import torch
from torch import Tensor

from megatron_longstraw.config import ConfigError, ScheduleConfig
from megatron_longstraw.drop_in import get_forward_backward_func
from megatron_longstraw.prompt_state import Phase, Segment
from megatron_longstraw.work import PromptGroup, WorkItem, responses, whole_sequences


def _group(prompt: int, *lengths: int) -> PromptGroup:
    """Prompt ids 0, 1, ...; ids of response i are 100 i + 1, 100 i + 2, ..."""
    return PromptGroup(
        prompt=torch.arange(prompt), responses=[100 * i + torch.arange(1, n + 1) for i, n in enumerate(lengths)]
    )


@pytest.mark.parametrize(
    ("pack_tokens", "packs"),
    [
        (0, [(0,), (1,), (3,), (4,), (5,)]),
        (3, [(0,), (1,), (3, 4), (5,)]),
        (7, [(0,), (1, 3, 4), (5,)]),
        (8, [(0, 1), (3, 4, 5)]),
        (10**6, [(0, 1, 3, 4, 5)]),
    ],
)
def test_responses_are_packed_in_order(pack_tokens: int, packs: list[tuple[int, ...]]) -> None:
    """As many as fit; one that is longer has its own; an empty one (2) has none."""
    items = responses(_group(9, 4, 4, 0, 1, 2, 5), 1, 3, pack_tokens)
    assert [item.responses for item in items] == packs
    assert all(item.segment.multiplicity == 3 and item.segment.start == 8 for item in items)
    for item in items:
        assert item.segment.packed == (() if len(item.responses) == 1 else tuple(item.target_counts))
        assert item.segment.length == sum(item.target_counts) == len(item.targets)


def test_a_response_takes_the_room_of_its_padding() -> None:
    items = responses(_group(9, 4, 4, 0, 1, 2, 5), 1, pack_tokens=12, sequence_multiple=4)
    assert [item.responses for item in items] == [(0, 1, 3), (4, 5)]
    assert [item.segment.length for item in items] == [9, 7]
    assert [item.segment.padded_tokens(4) for item in items] == [12, 12]
    assert [item.segment.padded_tokens(1) for item in items] == [9, 7]


def test_a_pack_is_its_sequences_one_behind_the_other() -> None:
    (item,) = responses(_group(6, 3, 1, 2), 4, 1, 100)  # six tokens, padded to eight

    def lists(x: Tensor) -> list[int]:
        return [int(i) for i in x.flatten()]

    assert item.padded_length == 8
    assert lists(item.tokens) == [5, 1, 2, 5, 5, 201, 0, 0]
    assert lists(item.position_ids) == [5, 6, 7, 5, 5, 6, 7, 8]
    assert lists(item.targets) == [1, 2, 3, 101, 201, 202]
    assert item.target_counts == [3, 1, 2]
    assert item.first_row == 0
    assert item.segment.sequences(8) == [slice(0, 3), slice(3, 4), slice(4, 8)]


def test_one_sequence_is_all_tokens() -> None:
    segment = Segment(phase=Phase.CAPTURE, start=5, length=3)
    assert segment.sequences(4) == [slice(0, 4)]


def test_stock_sequences_are_not_packed() -> None:
    items: list[WorkItem] = whole_sequences(_group(4, 2, 0, 1), 1)
    assert [item.responses for item in items] == [(0,), (2,)]
    assert [item.segment.length for item in items] == [5, 4]


def test_pack_tokens_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"schedule.pack_tokens=-1.*>= 0"):
        ScheduleConfig(pack_tokens=-1)
    for value, needed in ((None, "an integer"), ("64", "an integer"), (1.5, "an integer"), (True, "an integer")):
        with pytest.raises(ConfigError, match=f"schedule.pack_tokens={value!r}: needs {needed}"):
            ScheduleConfig(pack_tokens=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"schedule.keep_choices='false': needs true"):
        ScheduleConfig(keep_choices="false")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"schedule.pack_tokens=64 is not supported: needs 0, as a host's forward"):
        get_forward_backward_func(options=ScheduleConfig(pack_tokens=64))
