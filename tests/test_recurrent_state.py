"""The ledger of boundary states: what is held when, and what is refused."""

import pytest
import torch

from megatron_longstraw.recurrent_state import BoundaryStates

CHUNK = 10


def _states(length: int, interval: int = 1, gradients: bool = True) -> BoundaryStates:
    return BoundaryStates(length=length, spacing=interval * CHUNK, gradient_dtype=torch.float32 if gradients else None)


def _chunks(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]


def _capture(states: BoundaryStates) -> None:
    for start, end in _chunks(states.length):
        assert (states.read(start) is None) == (start == 0)
        states.write(start, end, state=torch.full((4,), float(end)))


def _held(states: BoundaryStates) -> list[float]:
    return sorted(t[0].item() for t in states.tensors())


def test_without_gradients_only_the_newest_is_kept() -> None:
    states = _states(45, gradients=False)
    _capture(states)
    assert _held(states) == [45.0]
    assert states.most_states() == 2  # the one that a chunk reads, and the one that it leaves
    states.check_complete()


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("length", [1, 9, 10, 11, 45, 80, 81])
def test_all_are_written_read_and_taken(length: int, interval: int) -> None:
    states = _states(length, interval)
    _capture(states)
    chunks = _chunks(length)
    kept = {end for start, end in chunks if end == length or end % (interval * CHUNK) == 0}
    assert _held(states) == sorted(kept)
    states.add_gradient(length, state=torch.ones(4))
    states.add_gradient(length, state=torch.ones(4))
    seen = []
    for first in reversed(range(0, len(chunks), interval)):
        run = chunks[first : first + interval]
        for start, end in run[:-1]:
            states.read(start)
            states.write_again(start, end, state=torch.full((4,), float(end)))
        for start, end in reversed(run):
            state = states.read(start)
            assert start == 0 if state is None else state["state"][0] == start
            seen.append(states.take_gradient(start, end)["state"][0].item())
            if start:
                states.add_gradient(start, state=torch.full((4,), float(start)))
    assert seen == [2.0, *(float(end) for _, end in reversed(chunks[:-1]))]
    states.check_complete()
    assert states.most_states() <= len(kept) + interval
    assert states.gradient_bytes() == 4 * 4  # one boundary's at a time
    assert states.bytes() == states.most_states() * 4 * 4


def test_gradient_is_summed_in_its_own_precision() -> None:
    states = _states(5)
    states.write(0, 5, state=torch.zeros(1, dtype=torch.bfloat16))
    for value in (256.0, 1.0):
        states.add_gradient(5, state=torch.tensor([value], dtype=torch.bfloat16), absent=None)
    gradient = states.take_gradient(0, 5)
    assert gradient["state"].item() == 257  # bfloat16 has no 257
    assert "absent" not in gradient


def test_gradient_does_not_alias_what_was_added() -> None:
    states = _states(5)
    states.write(0, 5, state=torch.zeros(1))
    added = torch.ones(1)
    states.add_gradient(5, state=added)
    states.add_gradient(5, state=added)
    assert added.item() == 1


def test_misuse_is_refused() -> None:
    states = _states(30, interval=3)
    states.write(0, 10, state=torch.zeros(1))
    with pytest.raises(RuntimeError, match="in order"):
        states.write(0, 10, state=torch.zeros(1))
    with pytest.raises(RuntimeError, match="written again"):
        states.write_again(0, 10, state=torch.zeros(1))  # capture is not over
    with pytest.raises(RuntimeError, match="in order"):
        states.write(10, 31, state=torch.zeros(1))
    states.write(10, 20, state=torch.zeros(1))
    with pytest.raises(RuntimeError, match="read when"):
        states.read(10)  # dropped
    with pytest.raises(RuntimeError, match="20 written"):
        states.check_complete()
    states.write(20, 30, state=torch.zeros(1))
    with pytest.raises(RuntimeError, match="are left"):
        states.check_complete()
    with pytest.raises(RuntimeError, match="reverse order"):
        states.take_gradient(10, 20)
    states.add_gradient(30, state=torch.ones(1))
    with pytest.raises(RuntimeError, match="is gathered"):
        states.add_gradient(20, state=torch.ones(1))
    states.take_gradient(20, 30)
    with pytest.raises(RuntimeError, match="is gathered"):
        states.add_gradient(30, state=torch.ones(1))  # it was taken
    with pytest.raises(RuntimeError, match="read when"):
        states.read(30)
    states.write_again(0, 10, state=torch.zeros(1))
    with pytest.raises(RuntimeError, match="written again"):
        states.write_again(0, 10, state=torch.zeros(1))
