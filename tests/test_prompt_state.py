"""Pages, owners and the ledger of rows: the numbered invariants of megatron_longstraw.prompt_state."""

import pytest
import torch

from megatron_longstraw.kept_choices import KeptChoices
from megatron_longstraw.prompt_state import (
    OwnedRows,
    Pages,
    Phase,
    PromptState,
    Runtime,
    Segment,
    StateOptions,
)


def _chunk(start: int, length: int, phase: Phase = Phase.CAPTURE) -> Segment:
    return Segment(phase=phase, start=start, length=length)


def _rows(length: int, pages: Pages, gradient: torch.dtype | None = torch.float32) -> OwnedRows:
    return OwnedRows(
        length=length,
        shapes={"key": (2, 3)},
        pages=pages,
        dtype=torch.float32,
        device=torch.device("cpu"),
        gradient_dtype=gradient,
        constants={"index_key": (4,)},
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("page", [1, 4, 7])
@pytest.mark.parametrize("length", [0, 1, 6, 7, 8, 29, 64])
def test_every_position_has_one_owner_and_load_is_even(size: int, page: int, length: int) -> None:
    owned = [Pages(page, rank, size).owned_before(length) for rank in range(size)]
    assert sum(owned) == length
    assert max(owned) - min(owned) <= page
    by_position = [[(p // page) % size for p in range(length)].count(rank) for rank in range(size)]
    assert owned == by_position


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 29), (3, 5), (8, 16), (7, 23)])
def test_runs_map_positions_to_rows(size: int, start: int, end: int) -> None:
    page = 4
    for rank in range(size):
        pages = Pages(page, rank, size)
        mine = [p for p in range(100) if size == 1 or (p // page) % size == rank]
        expected = [(p - start, mine.index(p)) for p in mine if start <= p < end]
        got = [
            (h, r)
            for here, row in pages.runs(start, end)
            for h, r in zip(range(here.start, here.stop), range(row.start, row.stop), strict=True)
        ]
        assert got == expected


def test_rows_of_all_owners_are_the_prompt() -> None:
    whole = torch.randn(29, 2, 3)
    rebuilt = torch.full_like(whole, torch.nan)
    for rank in range(3):
        pages = Pages(4, rank, 3)
        rows = _rows(29, pages)
        for start in range(0, 29, 10):
            n = min(10, 29 - start)
            padded = torch.cat([whole[start : start + n], torch.full((2, 2, 3), torch.nan)])
            rows.write(_chunk(start, n), key=padded)
        for here, row in pages.runs(0, 29):
            rebuilt[here] = rows.values["key"][row]
    assert torch.equal(rebuilt, whole)


def test_gradient_is_taken_by_the_owner_only() -> None:
    taken = torch.zeros(10, 2, 3)
    for rank in range(2):
        rows = _rows(10, Pages(3, rank, 2))
        rows.write(_chunk(0, 10), key=torch.zeros(10, 2, 3))
        for block in rows.blocks(10, 2):
            rows.add_gradient(10, block, key=torch.ones(block.stop - block.start, 2, 3))
        rows.take_gradient(_chunk(6, 4, Phase.PROMPT), key=taken[6:])
        rows.take_gradient(_chunk(0, 6, Phase.PROMPT), key=taken[:6])
        rows.check_complete()
    assert torch.equal(taken, torch.ones(10, 2, 3))


def test_ledger_refuses_what_would_be_silently_wrong() -> None:
    rows = _rows(10, Pages(4, 0, 1))
    with pytest.raises(RuntimeError, match="captured once and in order"):
        rows.write(_chunk(5, 5), key=torch.zeros(5, 2, 3))
    rows.write(_chunk(0, 5), key=torch.zeros(5, 2, 3))
    with pytest.raises(RuntimeError, match="captured once and in order"):
        rows.write(_chunk(0, 5), key=torch.zeros(5, 2, 3))
    with pytest.raises(RuntimeError, match="rows before 10 read when 5 of 10"):
        list(rows.blocks(10, 4))
    with pytest.raises(RuntimeError, match="5 written"):
        rows.check_complete()
    rows.write(_chunk(5, 5), key=torch.zeros(5, 2, 3))
    with pytest.raises(RuntimeError, match="reverse order"):
        rows.take_gradient(_chunk(0, 5, Phase.PROMPT), key=torch.zeros(5, 2, 3))
    rows.take_gradient(_chunk(5, 5, Phase.PROMPT), key=torch.zeros(5, 2, 3))
    with pytest.raises(RuntimeError, match="comes after"):
        rows.add_gradient(10, slice(0, 10), key=torch.zeros(10, 2, 3))
    with pytest.raises(RuntimeError, match="5 gradients left"):
        rows.check_complete()


def test_dropped_fields_are_gone_and_counted_still() -> None:
    rows = _rows(4, Pages(4, 0, 1))
    rows.write(_chunk(0, 4), key=torch.ones(4, 2, 3), index_key=torch.ones(4, 4))
    before = rows.bytes()
    for _ in range(2):
        rows.drop("index_key")
    assert rows.values.keys() == {"key"} and rows.bytes() == before
    assert rows.read("key", 4, slice(1, 3)).sum() == 2 * 6
    with pytest.raises(RuntimeError, match="index_key of rows before 4 read after it was dropped"):
        rows.read("index_key", 4, slice(0, 4))


def test_constants_have_no_gradient() -> None:
    rows = _rows(4, Pages(4, 0, 1))
    assert rows.values.keys() == {"key", "index_key"} and rows.gradients.keys() == {"key"}
    assert rows.bytes() == 4 * (2 * 3 * 4 + 4 * 4)
    assert rows.gradient_bytes() == 4 * 2 * 3 * 4


def test_detached_rows_have_no_gradient() -> None:
    rows = _rows(4, Pages(4, 0, 1), gradient=None)
    rows.write(_chunk(0, 4), key=torch.zeros(4, 2, 3))
    rows.add_gradient(4, slice(0, 4), key=torch.ones(4, 2, 3))
    assert rows.gradient_bytes() == 0
    rows.check_complete()


@pytest.mark.parametrize("owners", [1, 4])
def test_bytes_are_those_of_the_formula(owners: int) -> None:
    state = PromptState(1000, StateOptions(page_tokens=10))
    for layer in (1, 2):
        for _ in range(3):  # asking again allocates nothing
            state.rows(
                layer,
                shapes={"key": (8, 128), "value": (8, 128)},
                owner_rank=0,
                owners=owners,
                dtype=torch.bfloat16,
                device=torch.device("cpu"),
            )
    assert state.bytes() == 2 * (1000 // owners) * 2 * 8 * 128 * 2
    assert state.gradient_bytes() == 2 * state.bytes()


def test_runtime_outside_the_schedule() -> None:
    runtime = Runtime()
    with pytest.raises(RuntimeError, match="only the schedule runs it"):
        runtime.current_state()


def test_recomputation_sees_its_own_micro_batch() -> None:
    """Whatever ran since, a layer finds the segment and the choices of the micro-batch that it was run for."""
    runtime, first = Runtime(), _chunk(3, 4)
    runtime.begin(first)
    resume = runtime.resumption()
    runtime.micro_batch.chosen[7] = torch.ones(1)
    runtime.begin(_chunk(7, 2))
    assert not runtime.micro_batch.chosen
    with resume:
        assert runtime.segment is first
        assert runtime.micro_batch.is_recomputed and 7 in runtime.micro_batch.chosen
    assert runtime.segment.start == 7 and not runtime.micro_batch.is_recomputed
    runtime.end()
    assert runtime.segment.phase is Phase.PLAIN


def test_choices_are_taken_once_and_last_first() -> None:
    state = PromptState(5, StateOptions())
    kept = state.choices(3)
    choices = [torch.tensor(rows, dtype=torch.int32) for rows in ([[0, -1, -1], [1, 2, 3]], [[0, 1, 2, 4]])]
    kept.keep(0, 4, choices[0])
    kept.keep(4, 5, choices[1])
    with pytest.raises(RuntimeError, match="chunk at 4 kept after that at 4"):
        kept.keep(4, 5, choices[1])
    with pytest.raises(RuntimeError, match=r"chunk at 0 taken when those at \[0, 4\] are left"):
        kept.take(0)
    with pytest.raises(RuntimeError, match=r"layer 3: choices of the chunks at \[0, 4\] are left"):
        state.check_complete()
    assert torch.equal(kept.take(4), choices[1]) and torch.equal(kept.take(0), choices[0])
    with pytest.raises(RuntimeError, match="chunk at 0 taken when"):
        kept.take(0)
    state.check_complete()
    assert (state.bytes(), state.gradient_bytes()) == (2 * (6 + 4) + 4 * 3, 0)


@pytest.mark.parametrize("length", [1, 65535, 65536, 65537, 1 << 20])
def test_choices_come_back_as_they_were(length: int) -> None:
    """Whichever positions, also beside multiples of 65,536, and however many of a row are set, none included."""
    borders = [p for b in range(0, length + 1, 1 << 16) for p in (b - 1, b, b + 1)] + [length - 1]
    candidates = torch.tensor(sorted({p for p in borders if 0 <= p < length}), dtype=torch.int32)
    generator = torch.Generator().manual_seed(length)
    width = min(len(candidates), 40)
    chosen = torch.full((60, width), -1, dtype=torch.int32)
    for i, row in enumerate(chosen):
        count = (0, 1, width)[i] if i < 3 else int(torch.randint(0, width + 1, (), generator=generator))
        row[:count] = candidates[torch.randperm(len(candidates), generator=generator)[:count].sort().values]
    chosen[-1] = candidates[-width:]
    kept = KeptChoices()
    kept.keep(0, length, chosen)
    assert kept.bytes() == 60 * (2 * width + 4 * -(-length // 65536))
    back = kept.take(0)
    assert back.dtype is torch.int32 and torch.equal(back, chosen)
