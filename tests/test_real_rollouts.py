"""Acceptance on real agent histories: `compare` on every layout, `train` over the whole file."""

import json
from pathlib import Path

import pytest

from tests.exactness import LAYOUTS
from tests.ranks import Layout
from tests.torchrun import ROOT, torchrun

pytestmark = pytest.mark.slow

CONFIG = ROOT / "examples" / "dense" / "tiny.yaml"
BOUND = {"float32": 1e-5, "float64": 1e-9}
# float64 is slow on a CPU: a quarter of the width, half the heads, and half the layers where they can be had
NARROW = ["--set", "model.transformer.hidden_size=32", "--set", "model.transformer.num_attention_heads=4"]
# of these groups' responses two or three make a pack; tiny.yaml's packs are too small for any two
PACKED = ["--set", "schedule.pack_tokens=2048"]


def _narrow(layout: Layout) -> list[str]:
    return NARROW + ([] if layout.vpp else ["--set", "model.transformer.num_layers=4"])


def _parallel(layout: Layout) -> list[str]:
    options = ["--tp", str(layout.tp), "--pp", str(layout.pp)]
    return options + (["--vpp", str(layout.vpp)] if layout.vpp else [])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compare(agent_rollouts: Path, tmp_path: Path, layout: Layout, dtype: str) -> None:
    out = tmp_path / "out.json"
    torchrun(
        layout.world_size, "compare", "--config", CONFIG, "--rollouts", agent_rollouts, "--limit", 3,
        "--max-prompt-tokens", 4096, "--dtype", dtype, "--json", out, *_parallel(layout),
        *(_narrow(layout) + PACKED if dtype == "float64" else []), check=True,
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert result["passed"]
    assert len(result["groups"]) == 3
    for entry in result["groups"]:
        assert entry["prompt_tokens"] == 4096
        assert entry["grad"]["relative_l2"] <= BOUND[dtype]
        assert entry["logprob_max_abs_diff"] <= {"float32": 1e-5, "float64": 1e-12}[dtype]
    assert result["all"]["relative_l2"] <= BOUND[dtype]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_train_over_all_groups(agent_rollouts: Path, tmp_path: Path, layout: Layout) -> None:
    """A smaller model: with prompts to 42k tokens attention takes all the time, and it grows with layers x heads."""
    torchrun(
        2, "train", "--config", CONFIG, "--rollouts", agent_rollouts, "--output", tmp_path / "run",
        "--set", "data.groups_per_step=4", "--set", "model.transformer.num_layers=2",
        "--set", "model.transformer.hidden_size=32", "--set", "model.transformer.num_attention_heads=2",
        *_parallel(layout), check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["groups"] for line in lines) == 30
    assert all(0 < line["grad_norm"] < 1e3 for line in lines)
    assert len(list((tmp_path / "run" / "weights").iterdir())) == 2
