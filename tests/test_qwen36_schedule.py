"""Qwen3.6: gradients of ours are the stock schedule's, on every layout, and every layout's are one rank's.

Float64 is the sharp test; its casts to float32 inside Megatron are lifted (`tests.float64`).
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_longstraw.compare import GATES, Gate
from megatron_longstraw.rollouts import RolloutGroup
from tests.exactness import LAYOUTS, edge_groups, group, join, response
from tests.qwen36 import qwen_run, qwen_two_steps
from tests.ranks import Layout, Ranks

LOG_PROBS = {"float32": 5e-6, "float64": 1e-13}
"""Log-probs near -5.5: float32's spacing there is 5e-7."""


def few_groups() -> list[RolloutGroup]:
    """Three prompt chunks, the last of 4; responses and a prompt shorter than the convolution; a prompt of one."""
    g = np.random.default_rng(1)
    return [
        group("three chunks", 59, response(g, 5, [1, 0, 0, 1, 1]), response(g, 1), response(g, 0)),
        group("shorter than the convolution", 3, response(g, 2), response(g, 6)),
        group("one token", 1, response(g, 3)),
    ]


def many_groups() -> list[RolloutGroup]:
    """`edge_groups`, and prompts and responses about the convolution's width of 4 and the delta rule's 64."""
    g = np.random.default_rng(1)
    return [
        *edge_groups(),
        group("as long as the convolution", 5, response(g, 3), response(g, 70)),
        group("more than the rule's 64", 94, response(g, 65)),
    ]


def _run(layout: Layout, dtype: str = "float64", **changes: Any) -> Any:
    layers = {"transformer": {"num_layers": 8}} if layout.vpp else {}
    return qwen_run(layout, dtype, **{**layers, **changes})


def _check(results: list[dict[str, Any]], dtype: str = "float64") -> None:
    for step, rank in itertools.product((0, 1), range(len(results))):
        outcome = results[rank]["steps"][step]
        assert outcome["comparison"]["passed"], (step, rank, outcome["comparison"])
        assert all(difference <= LOG_PROBS[dtype] for difference in outcome["log_probs"]), outcome["log_probs"]
        stock, ours = outcome["loss"]
        assert abs(stock - ours) <= LOG_PROBS[dtype]


def _check_same(got: dict[str, Tensor], want: dict[str, Tensor], gate: Gate) -> None:
    """Two whole gradients: the per-parameter bounds of the gate."""
    assert got.keys() == want.keys()
    whole = torch.cat([w.flatten() for w in want.values()]).norm()
    for name in want:
        apart = (got[name] - want[name]).norm()
        assert apart <= gate.relative * want[name].norm() + gate.floor * whole, (name, apart)


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Any:
    """Stock and ours on one rank, by dtype and layers, each run once."""
    known: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def get(dtype: str, layout: Layout) -> list[dict[str, Any]]:
        run = _run(Layout(), dtype, **({"transformer": {"num_layers": 8}} if layout.vpp else {}))
        key = dtype, run.model.transformer["num_layers"]
        if key not in known:
            known[key] = ranks.run(Layout(), qwen_two_steps, run, few_groups())
        return known[key]

    return get


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_steps_equal_stock_and_one_rank(ranks: Ranks, one_rank: Any, layout: Layout, dtype: str) -> None:
    alone = one_rank(dtype, layout)
    results = alone
    if layout != Layout():
        results = ranks.run(layout, qwen_two_steps, _run(layout, dtype), few_groups())
    _check(results, dtype)
    weights = join([r["weights"] for r in results])
    for name, tensor in join([r["weights"] for r in alone]).items():
        assert torch.equal(weights[name], tensor), name
    for step, side in itertools.product((0, 1), ("stock", "ours")):
        want = join([r["steps"][step]["stock"] for r in alone])
        _check_same(join([r["steps"][step][side] for r in results]), want, GATES[dtype])
