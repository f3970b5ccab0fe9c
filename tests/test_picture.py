"""The rank x time picture in docs/schedule.txt is what a real run does, and the run keeps the promised order."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_longstraw.config import ScheduleConfig
from megatron_longstraw.prompt_state import Phase
from tests.exactness import group, response, tiny_run
from tests.ranks import Layout, Ranks

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "schedule.txt"
CHUNKS, RESPONSES = 3, 4
LETTER = {Phase.CAPTURE: "c", Phase.RESPONSE: "r", Phase.PROMPT: "p", Phase.IDLE: "i"}

Event = tuple[str, str, int]
"""("F" or "B", name of the work, model chunk)."""


def _record() -> list[Event]:
    """The forwards and backwards of one group on this rank, in order."""
    from megatron.core import parallel_state as ps

    from megatron_longstraw.schedule import forward_backward
    from megatron_longstraw.trainer import build_ddp_model, grpo_forward_step, prompt_groups

    pp, vpp = ps.get_pipeline_model_parallel_world_size(), ps.get_virtual_pipeline_model_parallel_world_size()
    layout = Layout(pp=pp, vpp=vpp)
    run = tiny_run(layout, schedule=ScheduleConfig(prompt_chunk_tokens=8, page_tokens=8))
    model = build_ddp_model(run)
    generator = np.random.default_rng(0)
    rollouts = [group("g", CHUNKS * 8 + 1, *(response(generator, 3) for _ in range(RESPONSES)))]
    inner = grpo_forward_step(run)
    events: list[Event] = []

    def step(items: Iterator[Any], chunk: Any) -> Any:
        item = next(items)
        phase = item.segment.phase
        index = item.segment.start // 8 if phase in (Phase.CAPTURE, Phase.PROMPT) else sum(item.responses)
        name = f"{LETTER[phase]}{index if phase is not Phase.IDLE else ''}"
        place = next(i for i, c in enumerate(model) if c is chunk)
        events.append(("F", name, place))
        output, loss = inner(iter([item]), chunk)
        if output.requires_grad and torch.is_grad_enabled():
            output.register_hook(lambda _: events.append(("B", name, place)))
        return output, loss

    mine = prompt_groups(rollouts, run, torch.device("cpu"))
    forward_backward(
        forward_step_func=step,
        data_iterator=[iter(mine) for _ in model],
        model=model,
        num_microbatches=1,
        options=run.schedule,
    )
    return events


def _numbered(recorded: list[Event]) -> list[tuple[Event, int]]:
    """Events with how often the same came before, which tells idle work apart."""
    seen: Counter[Event] = Counter()
    numbered = []
    for event in recorded:
        numbered.append((event, seen[event]))
        seen[event] += 1
    return numbered


def _draw(by_rank: list[list[Event]]) -> list[str]:
    """Puts events on a clock: each takes one tick, after those before it on its rank and those it depends on.

    A forward follows that of the stage before, a backward that of the stage after; the last stage's backward its
    forward. Stages are (model chunk, rank) in order; work of the second model chunk is marked with an apostrophe.
    """
    ranks, chunks = len(by_rank), 1 + max(chunk for recorded in by_rank for *_, chunk in recorded)
    queues = [_numbered(recorded) for recorded in by_rank]
    ends: dict[tuple[str, str, int, int], int] = {}
    lines, clock = [""] * ranks, [0] * ranks
    while any(queues):
        before = sum(map(len, queues))
        for rank, queue in enumerate(queues):
            while queue:
                (kind, name, chunk), number = queue[0]
                stage, last = chunk * ranks + rank, chunks * ranks - 1
                if kind == "F":
                    ready = 0 if stage == 0 else ends.get(("F", name, stage - 1, number))
                else:
                    needed = ("F", name, last, number) if stage == last else ("B", name, stage + 1, number)
                    ready = ends.get(needed)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                label = (name if kind == "F" else name.upper()) + "'" * chunk
                lines[rank] += "    " * (start - clock[rank]) + f"{label:4}"
                clock[rank] = ends[kind, name, stage, number] = start + 1
                queue.pop(0)
        assert sum(map(len, queues)) < before, "the events can't be put on a clock"
    return [f"rank {rank} | {line.rstrip()}" for rank, line in enumerate(lines)]


@pytest.fixture(scope="module")
def events(ranks: Ranks) -> dict[str, list[list[Event]]]:
    return {str(layout): ranks.run(layout, _record) for layout in (Layout(), Layout(pp=2), Layout(pp=4, vpp=2))}


def test_picture_is_that_of_a_run(events: dict[str, list[list[Event]]], tmp_path: Path) -> None:
    text = [
        f"One group on a pipeline: a prompt of {CHUNKS} chunks, {RESPONSES} responses. Drawn by tests/test_picture.py",
        "from a real run; every forward and backward is one tick.",
        "",
        "c capture   r replay   p prompt backward   i idle (fills an interleaved pipeline)",
        "lower case: forward   UPPER CASE: backward   ': the rank's second model chunk",
        "",
        "no pipeline",
        *_draw(events["tp1"]),
        "",
        "1F1B, 2 stages",
        *_draw(events["pp2"]),
        "",
        "interleaved, 4 stages x 2 model chunks",
        *_draw(events["pp4-vpp2"]),
    ]
    drawn = tmp_path / "schedule.txt"
    drawn.write_text("\n".join(text) + "\n")
    assert PICTURE.is_file() and PICTURE.read_text() == drawn.read_text(), f"stale: cp {drawn} {PICTURE}"


def test_backwards_keep_the_order_that_exactness_needs(events: dict[str, list[list[Event]]]) -> None:
    """Invariant 1 of megatron_longstraw.schedule, on every stage and model chunk."""
    for layout, by_rank in events.items():
        for rank, recorded in enumerate(by_rank):
            for chunk in {c for *_, c in recorded}:
                backwards = [name for kind, name, c in recorded if kind == "B" and c == chunk]
                wanted = [f"r{i}" for i in range(RESPONSES)] + [f"p{i}" for i in reversed(range(CHUNKS))]
                assert [b for b in backwards if not b.startswith("i")] == wanted, (layout, rank, chunk)
                forwards = [name for kind, name, c in recorded if kind == "F" and c == chunk]
                captures = [f for f in forwards if f.startswith("c")]
                assert captures == [f"c{i}" for i in range(CHUNKS)], (layout, rank, chunk)
