"""What Qwen3.6 keeps of a prompt: nothing leaks, and how much it is."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_longstraw.prompt_state import Phase, PromptState
from megatron_longstraw.recurrent_state import BoundaryStates
from megatron_longstraw.rollouts import RolloutGroup
from megatron_longstraw.work import WorkItem
from tests.exactness import group, response
from tests.qwen36 import build_remembering_model, flat_gradient, precision, qwen_run
from tests.ranks import Layout, Ranks


def _tensors(state: PromptState) -> list[Tensor]:
    found: list[Tensor] = []
    for kept in state.layers().values():
        found += kept.tensors() if isinstance(kept, BoundaryStates) else kept.values.values()
    return found


class _Poison:
    """Checks that responses leave the state as it is, and fills a group's state with NaN when the group ends."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.checked = 0
        self._live: list[Tensor] = []
        self._before: list[Tensor] = []

    def on_item(self, item: WorkItem) -> None:
        if item.segment.phase is not Phase.RESPONSE:
            return
        if not self._live:
            self._live = _tensors(self.runtime.state)
            self._before = [t.clone() for t in self._live]
        assert all(map(torch.equal, self._live, self._before))
        self.checked += 1

    def on_group_end(self, state: PromptState) -> None:
        for tensor in self._live + _tensors(state):
            tensor.fill_(torch.nan)
        self._live = []


def _groups() -> list[RolloutGroup]:
    g = np.random.default_rng(0)
    return [
        group("a", 40, response(g, 5), response(g, 3), response(g, 2)),
        group("b", 30, response(g, 2), response(g, 7)),
        group("a again", 40, response(g, 5)),
    ]


def _leaks(layout: Layout) -> tuple[int, float, list[bool]]:
    """Three groups in one step with poison between them, against each alone and each response alone.

    Returns:
        Responses whose state was checked; distance of the gradient from the sum; per response whether its
        log-probs are the same bits in company and alone.
    """
    import dataclasses

    from megatron_longstraw.schedule import forward_backward
    from megatron_longstraw.trainer import grpo_forward_step, prompt_groups, unwrapped

    run = qwen_run(layout)
    model = build_remembering_model(run)
    together = prompt_groups(_groups(), run, torch.device("cpu"))
    step = grpo_forward_step(run, keep_log_probs=True)

    def run_groups(groups: list[Any], observer: Any = None) -> tuple[list[Tensor], Tensor]:
        for chunk in model:
            chunk.zero_grad_buffer()
        reports = forward_backward(
            forward_step_func=step,
            data_iterator=iter(groups),
            model=model,
            num_microbatches=len(groups),
            options=run.schedule,
            observer=observer,
        )
        return [r["log_probs"] for r in reports], flat_gradient(model)

    with precision(run):
        poison = _Poison(unwrapped(model)[0].runtime)
        log_probs, gradient = run_groups(together, poison)
        alone = [
            run_groups(
                [
                    dataclasses.replace(
                        g,
                        responses=[g.responses[i]],
                        payload=dataclasses.replace(g.payload, responses=[g.payload.responses[i]]),
                    )
                ]
            )
            for g in together
            for i in range(len(g.responses))
        ]
    total = torch.stack([g for _, g in alone]).sum(0)
    same = [torch.equal(a, b) for a, (one, _) in zip(log_probs, alone, strict=False) for b in one]
    return poison.checked, ((gradient - total).norm() / total.norm()).item(), same


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_nothing_leaks_between_responses_and_groups(ranks: Ranks, layout: Layout) -> None:
    """Uninitialised memory is NaN in rank processes too."""
    for checked, apart, same in ranks.run(layout, _leaks, layout):
        assert checked == 6
        assert apart <= 1e-13
        assert all(same)


class _Counts:
    """Keeps what each recurrent layer held at most."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}
        self.bytes = 0

    def on_item(self, item: WorkItem) -> None:
        pass

    def on_group_end(self, state: PromptState) -> None:
        for number, kept in state.layers().items():
            if isinstance(kept, BoundaryStates):
                self.layers[number] = kept.most_states(), kept.bytes(), kept.gradient_bytes()
        self.bytes = state.bytes()


def _count(layout: Layout, schedule: dict[str, Any]) -> dict[int, tuple[int, int, int]]:
    from megatron_longstraw.schedule import forward_backward
    from megatron_longstraw.trainer import build_ddp_model, grpo_forward_step, prompt_groups

    run = qwen_run(layout, "float32", prompt_chunk_tokens=4, **schedule)
    generator = np.random.default_rng(0)
    mine = prompt_groups([group("g", 33, response(generator, 2))], run, torch.device("cpu"))
    counts = _Counts()
    forward_backward(
        forward_step_func=grpo_forward_step(run),
        data_iterator=iter(mine),
        model=build_ddp_model(run),
        num_microbatches=1,
        options=run.schedule,
        observer=counts,
    )
    return counts.layers


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_boundary_interval_bounds_the_states(ranks: Ranks, layout: Layout) -> None:
    """8 prompt chunks: ceil(8 / k) boundaries last, k - 1 come for a while, and a pipeline runs ahead by pp - 1."""
    tp_heads, key_dim, value_dim, channels = 8, 12, 20, 2 * 4 * 12 + 8 * 20
    one = 4 * (tp_heads * key_dim * value_dim + 3 * channels)
    for interval in (1, 3, 50):
        kept = -(-8 // interval)
        bound = kept + min(interval, 8) - 1 + (layout.pp - 1 if interval > 1 else 0)
        for layers in ranks.run(layout, _count, layout, {"boundary_interval": interval}):
            assert layers
            for count, held, gradient in layers.values():
                assert kept <= count <= max(bound, 2), (interval, count, bound)
                assert held == count * one
                assert gradient <= 2 * one
    for layers in ranks.run(layout, _count, layout, {"prompt_gradient": "detached"}):
        assert {(count, gradient) for count, _, gradient in layers.values()} == {(2, 0)}


def _peak(layout: Layout, responses: int) -> int:
    from megatron_longstraw.compare import run_schedule
    from megatron_longstraw.trainer import build_ddp_model

    run = qwen_run(layout, "float32", prompt_chunk_tokens=128, attention_block_tokens=128, log_prob_block_tokens=64)
    generator = np.random.default_rng(0)
    rollouts = [group("g", 600, *(response(generator, 20) for _ in range(responses)))]
    return run_schedule("longstraw", build_ddp_model(run), rollouts, run, torch.device("cpu")).peak_bytes


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(pp=2), pytest.param(Layout(tp=2), marks=pytest.mark.slow)], ids=str
)
def test_peak_does_not_depend_on_the_number_of_responses(ranks: Ranks, layout: Layout) -> None:
    two, eight = (ranks.run(layout, _peak, layout, n) for n in (2, 8))
    for a, b in zip(two, eight, strict=True):
        assert b <= 1.01 * a, (a, b)
