"""GLM-5.2: gradients and expert biases of ours are the stock schedule's, on every layout, and every layout's are one
rank's. What this does not exercise: NCCL, Transformer Engine's grouped experts."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longstraw.compare import GATES
from tests.exactness import join, two_steps
from tests.glm52 import glm_groups, tiny_glm
from tests.ranks import Layout, Ranks

LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2, ep=2),  # experts across data-parallel ranks: micro-batches in step
    Layout(tp=4, ep=4),
    Layout(tp=2, pp=2, ep=2),
    Layout(tp=2, dp=2, ep=4),
]


def _check(results: list[dict[str, Any]], dtype: str = "float64") -> None:
    for step, result in itertools.product((0, 1), results):
        outcome = result["steps"][step]
        assert outcome["comparison"]["passed"], (step, outcome["comparison"])
        assert all(difference <= 1e-13 for difference in outcome["log_probs"]), outcome["log_probs"]
        assert outcome["buffers"].keys() == outcome["stock_buffers"].keys()
        for name, bias in outcome["buffers"].items():
            assert bias.abs().max() > 0, name
            assert torch.equal(bias, outcome["stock_buffers"][name]), name


def _check_same(got: dict[str, Tensor], want: dict[str, Tensor], dtype: str = "float64") -> None:
    gate = GATES[dtype]
    assert got.keys() == want.keys()
    whole = torch.cat([w.flatten() for w in want.values()]).norm()
    for name in want:
        apart = (got[name] - want[name]).norm()
        assert apart <= gate.relative * want[name].norm() + gate.floor * whole, (name, apart, want[name].norm())


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks.run(Layout(), two_steps, tiny_glm(Layout()), glm_groups())


def test_one_rank_equals_stock(one_rank: list[dict[str, Any]]) -> None:
    _check(one_rank)
    gradients = join([r["steps"][0]["ours"] for r in one_rank])
    without = {name for name, gradient in gradients.items() if not gradient.any()}
    assert without == {name for name in gradients if ".indexer." in name}  # as in stock without the KL loss


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_steps_equal_stock_and_one_rank(ranks: Ranks, one_rank: list[dict[str, Any]], layout: Layout) -> None:
    results = ranks.run(layout, two_steps, tiny_glm(layout), glm_groups())
    _check(results)
    weights = join([r["weights"] for r in results])
    for name, tensor in join([r["weights"] for r in one_rank]).items():
        assert torch.equal(weights[name], tensor), name
    for step, side in itertools.product((0, 1), ("stock", "ours")):
        want = join([r["steps"][step]["stock"] for r in one_rank])
        _check_same(join([r["steps"][step][side] for r in results]), want)
    for step, result in itertools.product((0, 1), results):
        for name, bias in result["steps"][step]["buffers"].items():
            assert torch.equal(bias, one_rank[0]["steps"][step]["buffers"][name]), name
