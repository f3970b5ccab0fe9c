"""Optimizer steps: the same weights on every layout, and as torch's own AdamW makes them from stock's gradient."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_longstraw.config import OptimizerConfig, RunConfig
from tests.exactness import FullParameter, edge_groups, join, rank_device, tiny_run
from tests.glm52 import glm_groups, tiny_glm
from tests.ranks import Layout, Ranks

STEPS = 3
# a large epsilon, so that Adam does not blow the rounding of small gradients up to whole steps
OPTIMIZER = OptimizerConfig(
    lr=1e-2, min_lr=1e-3, lr_decay_style="linear", lr_warmup_steps=1, weight_decay=0.1, adam_eps=1e-3, clip_grad=0.5
)
LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2)]


def _run(layout: Layout) -> RunConfig:
    return tiny_run(layout, optimizer=OPTIMIZER)


def _parts(model: Any) -> list[FullParameter]:
    from megatron_longstraw.models.parameters import named_parameters
    from megatron_longstraw.trainer import unwrapped

    parameters = named_parameters(unwrapped(model))
    return [FullParameter(p.name, p.parameter.detach().clone(), p.shard) for p in parameters]


def _train(layout: Layout) -> dict[str, Any]:
    from megatron_longstraw.trainer import Trainer

    trainer = Trainer(_run(layout), STEPS, rank_device())
    metrics = [trainer.step(edge_groups()[:3]) for _ in range(STEPS)]
    return {"metrics": metrics, "weights": _parts(trainer.model)}


def _reference() -> dict[str, Any]:
    """torch's AdamW and clipping on one rank, on the stock schedule's gradient."""
    from megatron_longstraw.compare import run_schedule
    from megatron_longstraw.models.parameters import named_parameters
    from megatron_longstraw.trainer import build_ddp_model, unwrapped

    run = _run(Layout())
    model = build_ddp_model(run)
    parameters = {p.name: p.parameter for p in named_parameters(unwrapped(model))}
    decayed = [p for p in parameters.values() if p.dim() > 1]
    others = [p for p in parameters.values() if p.dim() == 1]  # Megatron decays no norms and no biases
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], eps=1e-3
    )
    norms, rates = [], [0.0, 1e-2, 5.5e-3]  # warm-up from 0, then a line to min_lr over the steps that are left
    for rate in rates:
        gradients = run_schedule("stock", model, edge_groups()[:3], run, rank_device()).gradients
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "rates": rates, "weights": _parts(model)}


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[str, Any]:
    return ranks.run(Layout(), _reference)[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_are_those_of_torchs_adamw(ranks: Ranks, reference: dict[str, Any], layout: Layout) -> None:
    results = ranks.run(layout, _train, layout)
    for result in results:
        metrics = result["metrics"]
        assert [m["lr"] for m in metrics] == pytest.approx(reference["rates"])
        assert [m["grad_norm"] for m in metrics] == pytest.approx(reference["norms"], rel=1e-4)
        assert [m["loss"] for m in metrics] == pytest.approx([m["loss"] for m in results[0]["metrics"]])
    want = join([reference["weights"]])
    for name, tensor in join([r["weights"] for r in results]).items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def _blow_up() -> tuple[str, bool]:
    from megatron_longstraw.measure import NonFiniteGradientError
    from megatron_longstraw.trainer import Trainer

    layout = Layout(dp=2)
    trainer = Trainer(_run(layout), STEPS, rank_device())
    before = [p.tensor for p in _parts(trainer.model)]
    groups = edge_groups()[:2]
    if torch.distributed.get_rank() == 0:  # one rank only, and only in a gradient
        weight = next(trainer.model[0].parameters())
        weight.register_hook(lambda gradient: gradient * float("inf"))
    try:
        trainer.step(groups)
    except RuntimeError as error:
        same = all(torch.equal(a, b.tensor) for a, b in zip(before, _parts(trainer.model), strict=True))
        return str(error), same
    raise AssertionError(f"{NonFiniteGradientError.__name__} was not raised")


def test_gradient_that_is_not_finite_stops_all_ranks_and_changes_nothing(ranks: Ranks) -> None:
    answers = ranks.run(Layout(dp=2), _blow_up)
    assert answers[0][0].startswith("step 1 (groups uneven chunks, one token): the gradient is not finite")
    assert answers[1][0].startswith(f"rank 0 failed: NonFiniteGradientError: {answers[0][0]}")
    assert all(same for _, same in answers)


def _stopped(folder: str) -> tuple[int | None, int, list[str]]:
    """Training that one rank alone is told to end, while its second step runs."""
    from megatron_longstraw import trainer

    class Signalled(trainer.Trainer):
        def step(self, groups: Any) -> dict[str, Any]:
            if self.steps_done == 1 and torch.distributed.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().step(groups)

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "Trainer", Signalled)
        rollouts, output = Path(folder) / "groups.jsonl", Path(folder) / "run"
        ended_by = trainer.train(_run(Layout(dp=2)), rollouts, output, 9, rank_device())
    assert signal.getsignal(signal.SIGTERM) is handler
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return ended_by, len(lines), sorted(path.name for path in (output / "weights").iterdir())


def test_signal_to_one_rank_ends_all_after_the_step_and_saves(ranks: Ranks, tmp_path: Path) -> None:
    group = {"prompt": "abcdef", "responses": [{"text": "gh", "reward": 1.0}, {"text": "i", "reward": 0.0}]}
    lines = [json.dumps({"group_id": name, **group}) + "\n" for name in "ab"]
    (tmp_path / "groups.jsonl").write_text("".join(lines))
    want = (signal.SIGTERM, 2, ["tp00-pp00.safetensors"])
    assert ranks.run(Layout(dp=2), _stopped, str(tmp_path)) == [want, want]


_SIGNALS = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from megatron_longstraw.distributed import StopSignal
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
with StopSignal(torch.device("cpu")) as stop:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    while stop.agreed() is None:
        pass
    print("agreed on", stop.agreed(), flush=True)
    time.sleep(1.5)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
"""


def test_second_signal_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", _SIGNALS], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 130, done.stderr
    assert "agreed on 2" in done.stdout
    assert done.stdout.count("SIGINT: the current step is the last") == 1


def _saved(layout: Layout, folder: str) -> tuple[set[str], dict[str, list[str]]]:
    """A step, then all weights to a folder: the names of the rank's tensors, and those of each file."""
    from megatron_longstraw.models.parameters import named_tensors
    from megatron_longstraw.trainer import Trainer, unwrapped

    trainer = Trainer(replace(tiny_glm(layout, dtype="float32"), optimizer=OPTIMIZER), STEPS, rank_device())
    trainer.step(glm_groups())
    trainer.save(Path(folder))
    files = {path.name: load_file(path) for path in sorted(Path(folder).iterdir())}
    mine = {item.name: item for item in named_tensors(unwrapped(trainer.model))}
    for name, item in mine.items():
        place = f"tp{item.shard.rank:02d}-" if not item.is_expert else "experts-"
        (saved,) = [tensors[name] for file, tensors in files.items() if file.startswith(place) and name in tensors]
        assert torch.equal(saved, item.tensor.cpu()), name
        assert item.tensor.any() or not name.endswith("expert_bias"), name  # or a file without it would do
    return set(mine), {file: sorted(tensors) for file, tensors in files.items()}


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(), ["experts-ep00-pp00", "tp00-pp00"]),
        (Layout(tp=2, ep=2), ["experts-ep00-pp00", "experts-ep01-pp00", "tp00-pp00", "tp01-pp00"]),
        (Layout(dp=2, ep=2), ["experts-ep00-pp00", "experts-ep01-pp00", "tp00-pp00"]),
        (Layout(pp=2), ["experts-ep00-pp01", "tp00-pp00", "tp00-pp01"]),
    ],
    ids=str,
)
def test_every_tensor_is_saved_also_experts(ranks: Ranks, tmp_path: Path, layout: Layout, names: list[str]) -> None:
    """Each in one file of its rank, or in one of experts (the first of two stages has none); expert biases, too."""
    results = ranks.run(layout, _saved, layout, str(tmp_path))
    files = results[0][1]
    assert list(files) == [f"{name}.safetensors" for name in names]
    assert set().union(*(mine for mine, _ in results)) == set().union(*files.values())
    experts = [n for file, tensors in files.items() if file.startswith("experts") for n in tensors]
    assert len(experts) == len(set(experts)) and all(".experts." in n for n in experts)
    assert any(name.endswith("expert_bias") for tensors in files.values() for name in tensors)


def _bfloat16() -> list[dict[str, Any]]:
    from megatron_longstraw.trainer import Trainer

    run = replace(_run(Layout(tp=2)), dtype="bfloat16")
    trainer = Trainer(run, STEPS, rank_device())
    return [trainer.step(edge_groups()[:3]) for _ in range(STEPS)]


def test_bfloat16_trains_like_float32(ranks: Ranks, reference: dict[str, Any]) -> None:
    for metrics in ranks.run(Layout(tp=2), _bfloat16):
        assert [m["grad_norm"] for m in metrics] == pytest.approx(reference["norms"], rel=0.05)
        assert metrics[0]["state_gradient_bytes"] == 2 * metrics[0]["state_bytes"]
