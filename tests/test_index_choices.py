"""The stock side takes our choices, and what it would have chosen otherwise is told with the scores' distance."""

import pytest
import torch

from megatron_longstraw.index_choices import IndexChoices
from megatron_longstraw.position_choice import IndexQueries, choose_positions
from megatron_longstraw.prompt_state import Phase, Segment

TOPK, PROMPT = 3, 6


def _index(keys: list[float]) -> IndexQueries:
    """One head of width one: a position's score is its key, whichever token asks."""
    ones = torch.ones(len(keys), 1, 1)
    return IndexQueries(queries=ones, weights=ones[..., 0], keys=torch.tensor(keys)[:, None], topk=TOPK)


def _segment(phase: Phase, start: int, length: int) -> Segment:
    return Segment(phase=phase, start=start, length=length)


def _record(rows: torch.Tensor, *, choices: IndexChoices) -> None:
    """A prompt in chunks of 4 and 2 tokens, then two responses of 3 tokens each, the second padded by one."""
    for phase, start, end in ((Phase.CAPTURE, 0, 4), (Phase.CAPTURE, 4, PROMPT), (Phase.RESPONSE, PROMPT, 9)):
        part = rows[start:end, : min(TOPK, end)]
        assert choices.record(1, _segment(phase, start, end - start), _index([0.0]), part) is part
    padded = torch.cat([rows[PROMPT:], torch.full((1, TOPK), -1, dtype=rows.dtype)])
    choices.record(1, _segment(Phase.RESPONSE, PROMPT, 3), _index([0.0]), padded)
    choices.record(1, _segment(Phase.PROMPT, 0, 4), _index([0.0]), rows[:4])  # a choice of old, noted once


def _replay(keys: list[float], choices: IndexChoices) -> torch.Tensor:
    own = choose_positions(_index(keys), None, query_block=4, key_block=100)
    return choices.replay(1, _segment(Phase.PLAIN, 0, 9), _index(keys), own)


KEYS = [5.0, 9.0, 1.0, 2.0, 3.0, 3.0, 0.5, 8.0, 7.0]


def test_same_choices_are_taken_and_counted() -> None:
    choices = IndexChoices()
    ours = choose_positions(_index(KEYS), None, query_block=4, key_block=100)
    _record(ours, choices=choices)
    for padding in ([], [4.0]):
        taken = _replay(KEYS + padding, choices)
        assert torch.equal(taken[:9], ours)
    assert (choices.queries, choices.different, choices.largest_gap) == (18, 0, 0.0)


def test_a_tie_is_a_tie() -> None:
    """Token 5 has 5, 9 and one of two equal scores to choose from."""
    choices = IndexChoices()
    ours = choose_positions(_index(KEYS), None, query_block=4, key_block=100)
    assert ours[5].tolist() == [0, 1, 4]
    ours[5] = torch.tensor([0, 1, 5])
    _record(ours, choices=choices)
    assert _replay(KEYS, choices)[5].tolist() == [0, 1, 5]
    assert (choices.queries, choices.different, choices.largest_gap) == (9, 1, 0.0)


def test_a_wrong_choice_shows() -> None:
    choices = IndexChoices()
    ours = choose_positions(_index(KEYS), None, query_block=4, key_block=100)
    ours[8] = torch.tensor([0, 7, 8])  # without 9, the highest
    _record(ours, choices=choices)
    assert _replay(KEYS, choices)[8].tolist() == [0, 7, 8]
    assert choices.different == 1
    assert choices.largest_gap == pytest.approx((9 - 5) / 9)
