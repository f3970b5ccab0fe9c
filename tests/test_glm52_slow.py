"""GLM-5.2 at its 78 layers, and on real agent histories on every layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_longstraw.config import ParallelConfig, RunConfig
from megatron_longstraw.rollouts import RolloutGroup
from tests.exactness import group, rank_device, response, two_steps
from tests.glm52 import TINY_GLM, UNEVEN
from tests.ranks import Layout, Ranks
from tests.torchrun import ROOT, torchrun

pytestmark = pytest.mark.slow

CONFIG = ROOT / "examples" / "glm52" / "tiny.yaml"
# as many layers as have each kind (dense, experts, their own index, another's), so that twelve runs take an hour
FEW_LAYERS = ["--set", "model.transformer.num_layers=5", "--set", "model.transformer.moe_layer_freq=[0, 0, 0, 1, 1]"]
# of these groups' responses two or three make a pack
PACKED = ["--set", "schedule.pack_tokens=2048"]
BOUND = {"float32": 1e-5, "float64": 1e-9}
LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4, ep=4),
    Layout(pp=2),
    Layout(tp=2, pp=2, ep=2),
    Layout(dp=2, ep=2),
]


def _all_layers(dtype: str, **parallel: Any) -> RunConfig:
    transformer = {**TINY_GLM.transformer, "num_layers": 78, "moe_layer_freq": [0] * 3 + [1] * 75}
    # as deep as this, float32 is well-conditioned at Megatron's own spread only
    transformer |= {"hidden_size": 16, "init_method_std": 0.02}
    return RunConfig(
        model=replace(TINY_GLM, transformer=transformer),
        parallel=ParallelConfig(pp=4, **parallel),
        schedule=UNEVEN,
        dtype=dtype,  # type: ignore[arg-type]
    )


def _groups() -> list[RolloutGroup]:
    g = np.random.default_rng(2)
    return [group("deep", 53, response(g, 4), response(g, 7))]


def _train_step(run: RunConfig, groups: list[RolloutGroup]) -> dict[str, Any]:
    from megatron_longstraw.models.parameters import named_parameters
    from megatron_longstraw.trainer import Trainer, unwrapped

    trainer = Trainer(run, 1, rank_device())
    before = {p.name: p.parameter.detach().clone() for p in named_parameters(unwrapped(trainer.model))}
    metrics = trainer.step(groups)
    after = {p.name: p.parameter.detach() for p in named_parameters(unwrapped(trainer.model))}
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return {"grad_norm": metrics["grad_norm"], "changed": len(changed), "of": len(before)}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_all_78_layers_on_pp4(ranks: Ranks, dtype: str) -> None:
    run = _all_layers(dtype, pipeline_layers=(18, 20, 20, 20))
    for result in ranks.run(Layout(pp=4), two_steps, run, _groups(), timeout=1800):
        for step in result["steps"]:
            assert step["comparison"]["passed"], step["comparison"]
            assert all(torch.equal(bias, step["stock_buffers"][name]) for name, bias in step["buffers"].items())


def test_78_layers_interleaved(ranks: Ranks) -> None:
    """PP4 with two model chunks a stage, each of which starts on a computing layer."""
    layers = (10, 8, 12, 8, 12, 8, 12, 8)
    run = _all_layers("float64", vpp=2, pipeline_layers=layers)
    for result in ranks.run(Layout(pp=4, vpp=2), two_steps, run, _groups(), timeout=1800):
        assert all(step["comparison"]["passed"] for step in result["steps"])


def test_78_layers_train_a_step_on_pp4(ranks: Ranks) -> None:
    run = _all_layers("float32", pipeline_layers=(18, 20, 20, 20))
    for result in ranks.run(Layout(pp=4), _train_step, run, _groups(), timeout=1800):
        assert 0 < result["grad_norm"] < 1e4
        assert result["changed"] >= 0.5 * result["of"]  # experts without tokens, and the indexer, get no gradient


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compare_on_real_rollouts(agent_rollouts: Path, tmp_path: Path, layout: Layout, dtype: str) -> None:
    out = tmp_path / "out.json"
    stages = ["--set", "parallel.pipeline_layers=[2, 3]"] if layout.pp == 2 else []
    torchrun(
        layout.world_size, "compare", "--config", CONFIG, "--rollouts", agent_rollouts, "--limit", 3,
        "--max-prompt-tokens", 4096, "--dtype", dtype, "--json", out, *FEW_LAYERS, *stages,
        *(PACKED if dtype == "float64" else []),
        "--tp", layout.tp, "--pp", layout.pp, "--ep", layout.ep, check=True,
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert result["passed"]
    assert result["all"]["relative_l2"] <= BOUND[dtype]
    # ties of float32 go either way (one query in ten thousands), those of float64 don't come up
    choices = result["all"]["index_choices"]
    assert choices["queries"] > 3 * 3 * 4096  # three layers choose
    assert choices["different"] <= {"float32": 10, "float64": 0}[dtype]
