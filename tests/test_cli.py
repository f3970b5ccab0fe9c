"""The commands as a user runs them, under torchrun on two ranks: what they write, and how they refuse."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_longstraw.demo import demo_groups
from tests.ranks import Layout, Ranks
from tests.torchrun import ROOT, start_torchrun, torchrun

CONFIG = ROOT / "examples" / "dense" / "tiny.yaml"
SMALL = ["--set", "model.transformer.num_layers=2", "--set", "schedule.prompt_chunk_tokens=64"]


def _torchrun(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return torchrun(2, *arguments, capture_output=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "groups.jsonl"
    groups = demo_groups(3, prompt_bytes=200, responses=3)
    path.write_text("".join(json.dumps(g) + "\n" for g in groups))
    return path


def test_train_writes_metrics_and_weights(rollouts: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = _torchrun(
        "train",
        "--config",
        CONFIG,
        "--rollouts",
        rollouts,
        "--output",
        output,
        "--set",
        "data.groups_per_step=2",
        *SMALL,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["groups"] for line in lines] == [2, 1]
    for line in lines:
        assert line["grad_norm"] > 0
        assert line["prompt_tokens"] == 200 * line["groups"]
        assert line["peak_bytes"] > line["state_gradient_bytes"] == line["state_bytes"] > 0
        assert line["seconds"].keys() == {"step", "capture", "replay", "prompt_backward"}
        assert all(seconds > 0 for seconds in line["seconds"].values())
    assert "step 2/2" in done.stdout
    weights = [load_file(output / "weights" / f"tp{rank:02d}-pp00.safetensors") for rank in (0, 1)]
    assert weights[0].keys() == weights[1].keys()
    assert weights[0]["embedding.word_embeddings.weight"].shape == (128, 128)
    assert torch.equal(weights[0]["decoder.final_layernorm.weight"], weights[1]["decoder.final_layernorm.weight"])


def test_compare_writes_the_documented_json(rollouts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = _torchrun(
        "compare", "--config", CONFIG, "--rollouts", rollouts, "--json", out, "--limit", 2, "--max-prompt-tokens", 150,
        "--dtype", "float64", "--pp", 2, "--tp", 1, *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "PASSED" in done.stdout
    result = json.loads(out.read_text())
    assert result.keys() >= {"config", "world_size", "groups", "all"}
    assert result["config"]["parallel"]["pp"] == result["world_size"] == 2
    assert result["all"]["relative_l2"] <= 1e-9
    assert len(result["groups"]) == 2
    for entry in result["groups"]:
        assert entry["prompt_tokens"] == 150
        assert len(entry["response_tokens"]) == 3
        assert entry["loss"]["stock"] == pytest.approx(entry["loss"]["longstraw"], abs=1e-12)
        assert entry["logprob_max_abs_diff"] <= 1e-12
        assert entry["grad"]["relative_l2"] <= 1e-9
        assert entry["grad"]["cosine"] >= 1 - 1e-9
        assert entry["grad"]["worst_parameter"].keys() >= {"name", "rank", "relative_l2"}
        assert [r["rank"] for r in entry["grad"]["per_rank"]] == [0, 1]
        assert entry["peak_bytes"].keys() == {"stock", "longstraw"}
        assert entry["seconds"].keys() == {"stock", "longstraw", "capture", "replay", "prompt_backward"}


def test_detached_fails_the_gate_and_says_so(rollouts: Path, tmp_path: Path) -> None:
    done = _torchrun(
        "compare", "--config", CONFIG, "--rollouts", rollouts, "--json", tmp_path / "o.json", "--limit", 1,
        "--prompt-gradient", "detached", *SMALL,
    )  # fmt: skip
    assert done.returncode == 1
    assert "DIFFERENT, as it must be" in done.stdout


def _written(path: Path) -> Any:
    """The JSON that a command wrote; NaN and Infinity are not JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


def _compare(ranks: Ranks, tmp_path: Path, *groups: dict[str, Any]) -> tuple[int, str, Any]:
    """`compare` on one rank: its status, what it wrote to standard output, and the JSON."""
    (tmp_path / "groups.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    out = tmp_path / "out.json"
    arguments = ["compare", "--config", CONFIG, "--tp", 1, "--rollouts", tmp_path / "groups.jsonl", "--json", out]
    ((status, screen),) = ranks.run(Layout(), _output_of_main, [str(a) for a in [*arguments, *SMALL]])
    return status, screen, _written(out)


@pytest.mark.parametrize(
    "response",
    [{"text": "de", "reward": 1.0}, {"text": "de", "reward": 1.0, "loss_mask": [0, 0]}],
    ids=["equal rewards", "masks of 0"],
)
def test_compare_of_nothing_does_not_pass(ranks: Ranks, tmp_path: Path, response: dict[str, Any]) -> None:
    nothing = GROUP | {"responses": [response, response]}
    status, screen, result = _compare(ranks, tmp_path, nothing, nothing | {"group_id": "h"})
    assert status == 1
    assert "NOTHING COMPARED: the gradient is 0 on both sides" in screen
    assert screen.count("(nothing trained: the gradient is 0)") == 2
    assert not result["passed"]
    assert result["all"]["is_zero"]


def test_a_group_of_nothing_among_others_passes(ranks: Ranks, tmp_path: Path) -> None:
    nothing = GROUP | {"responses": [{"text": "de", "reward": 1.0}] * 2}
    something = {**GROUP, "group_id": "h", "responses": [{"text": "de", "reward": 1.0}, {"text": "fg", "reward": 0.0}]}
    status, screen, result = _compare(ranks, tmp_path, nothing, something)
    assert status == 0, screen
    assert "PASSED" in screen
    assert [entry["grad"]["is_zero"] for entry in result["groups"]] == [True, False]


def test_stock_gradient_that_is_not_finite_is_said_to_be(ranks: Ranks, tmp_path: Path) -> None:
    response = {"text": "de", "reward": 1.0, "old_logprobs": [-1.0, -1.0], "advantage": 1e39}
    status, screen, result = _compare(ranks, tmp_path, GROUP | {"responses": [response]})
    assert status == 1
    assert "the stock schedule's own gradient is not finite" in screen
    assert "FAILED" not in screen
    assert result["all"]["relative_l2"] is None
    assert not result["all"]["stock_is_finite"]


GROUP = {"group_id": "g", "prompt": "abc", "responses": [{"text": "de", "reward": 1.0}]}


def _changed(**fields: Any) -> str:
    return json.dumps(GROUP | fields)


def _outcome(arguments: list[str]) -> tuple[int, str, str]:
    """The command on a rank that has joined already, and stays so; its status, output and errors."""
    from megatron_longstraw.cli import main

    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "destroy_process_group", lambda: None)
        try:
            main(arguments)
        except SystemExit as end:
            return int(end.code or 0), out.getvalue(), errors.getvalue()
    raise AssertionError("main does not return")


def _main(arguments: list[str]) -> tuple[int, str]:
    """Status and what was written to standard error."""
    status, _, errors = _outcome(arguments)
    return status, errors


def _output_of_main(arguments: list[str]) -> tuple[int, str]:
    """Status and what was written to standard output."""
    status, out, errors = _outcome(arguments)
    return status, out + errors


def _one_lacks_its_file(folder: str) -> tuple[int, str]:
    rank = torch.distributed.get_rank()
    config = str(CONFIG) if rank == 0 else f"{folder}/only.yaml"
    return _main(["train", "--config", config, "--rollouts", "none", "--output", folder])


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ('{"group_id": "g", "prompt"', [], "bad.jsonl:1"),
        (json.dumps({"group_id": "g", "prompt": "abc"}), [], "bad.jsonl:1"),
        (_changed(responses=[{"text": "de", "reward": 1.0, "loss_mask": [1]}]), [], "loss_mask"),
        (_changed(responses=[{"text": "de", "reward": float("nan")}]), [], "reward"),
        (_changed(responses=[{"ids": [1, 256], "reward": 1.0}]), [], "256"),
        ("", [], "bad.jsonl"),
        (_changed(responses=[]), [], "responses"),
        (_changed(), ["--set", "schedule.chunk=3"], "unknown key schedule.chunk"),
        (_changed(), ["--steps", "3", "--set", "optimizer.lr_warmup_steps=3"], "less than the run's 3 steps"),
        (_changed(), ["--tp", "3"], "parallel.tp=3"),
        (_changed(), ["--pp", "4", "--set", "model.transformer.num_layers=4"], "start a multiple of 8 ranks"),
        (_changed(), ["--set", "model.transformer.hidden_dropout=0.1"], "hidden_dropout=0.1"),
        (_changed(), ["--set", "model.transformer.recompute_granularity=full"], "recompute_granularity='full'"),
        (_changed(), ["--set", "model.transformer.no_such_field=1"], "no_such_field"),
        (_changed(), ["--set", "model.backend=transformer_engine"], "model.backend=transformer_engine"),
        (_changed(), ["--set", "dtype=float64"], "dtype=float64 is for compare"),
        (_changed(), ["--set", "objective.kl_coef=0.1"], "ref_logprobs"),
    ],
    ids=[
        "broken JSON", "missing field", "mask of the wrong length", "NaN reward", "id beyond the vocabulary",
        "empty file", "no responses", "unknown key", "warm-up", "tp does not divide", "too few ranks", "dropout",
        "recomputation", "unknown Megatron field", "no Transformer Engine", "float64 training", "KL without reference",
    ],
)  # fmt: skip
def test_bad_input_is_one_error_on_all_ranks(
    ranks: Ranks, tmp_path: Path, lines: str, options: list[str], message: str
) -> None:
    bad, output = tmp_path / "bad.jsonl", tmp_path / "run"
    bad.write_text(lines + "\n")
    arguments = ["train", "--config", CONFIG, "--rollouts", bad, "--output", output, *SMALL, *options]
    answers = ranks.run(Layout(tp=2), _main, [str(a) for a in arguments])
    assert [status for status, _ in answers] == [2, 2]
    errors = [line for _, text in answers for line in text.splitlines()]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert message in errors[0]
    assert not (output / "metrics.jsonl").exists()


def test_input_that_one_rank_lacks_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(Layout(tp=2), _one_lacks_its_file, str(tmp_path))
    assert [status for status, _ in answers] == [2, 2]
    assert "only.yaml" in answers[1][1]
    assert not answers[0][1]


def test_torchrun_ends_with_the_error(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"group_id": "g", "prompt"\n')
    done = _torchrun("train", "--config", CONFIG, "--rollouts", bad, "--output", tmp_path / "run", *SMALL)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")] == [
        line for line in done.stderr.splitlines() if "bad.jsonl:1" in line
    ]
    assert f'File "{ROOT}/megatron_longstraw' not in done.stderr


def test_result_never_lands_on_an_input(ranks: Ranks, rollouts: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(rollouts.read_bytes())
    for target, message in ((copy, "is an input of this command"), (tmp_path / "no" / "x.json", "can't be written")):
        arguments = ["compare", "--config", CONFIG, "--rollouts", copy, "--json", target, *SMALL]
        answers = ranks.run(Layout(tp=2), _main, [str(a) for a in arguments])
        assert [status for status, _ in answers] == [2, 2]
        assert f"--json {target}: {message}" in answers[0][1]
    assert copy.read_bytes() == rollouts.read_bytes()


def test_weights_that_could_not_be_saved_or_read_stop_before_training(
    ranks: Ranks, rollouts: Path, tmp_path: Path
) -> None:
    (tmp_path / "weights").touch()
    arguments = ["train", "--config", CONFIG, "--rollouts", rollouts, "--output", tmp_path, *SMALL]
    answers = ranks.run(Layout(tp=2), _main, [str(a) for a in arguments])
    assert [status for status, _ in answers] == [2, 2]
    assert f"--output {tmp_path}: can't be written" in answers[0][1]
    arguments[6] = tmp_path / "run"
    arguments += ["--set", f"model.weights={tmp_path}"]
    answers = ranks.run(Layout(tp=2), _main, [str(a) for a in arguments])
    assert [status for status, _ in answers] == [2, 2]
    assert [text for _, text in answers if text] == [answers[0][1]]
    assert "weights of architecture gqa can't be read" in answers[0][1]


def test_output_of_another_run_is_kept(ranks: Ranks, rollouts: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("precious")
    arguments = ["train", "--config", CONFIG, "--rollouts", rollouts, "--output", tmp_path, *SMALL]
    answers = ranks.run(Layout(tp=2), _main, [str(a) for a in arguments])
    assert [status for status, _ in answers] == [2, 2]
    assert "metrics.jsonl is there already" in answers[0][1]
    assert (tmp_path / "metrics.jsonl").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_recurrent_run_says_its_delta_rule(ranks: Ranks, tmp_path: Path) -> None:
    config = ROOT / "examples" / "qwen36" / "tiny.yaml"
    options = ["--rollouts", tmp_path / "none.jsonl", "--output", tmp_path / "run", "--dtype", "float32"]
    arguments = ["train", "--config", config, *options, "--prompt-gradient", "detached"]
    answers = ranks.run(Layout(tp=2), _output_of_main, [str(a) for a in arguments])
    assert "float32; layers: local; delta rule: torch; prompt gradient: detached" in answers[0][1]
    assert [status for status, _ in answers] == [2, 2]
    assert "none.jsonl" in answers[0][1]


def _ranks_of(agent: int) -> list[int]:
    """Process ids of the ranks that a torchrun started."""
    return [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
@pytest.mark.slow
def test_signal_ends_after_the_step_with_weights_saved(rollouts: Path, tmp_path: Path, number: signal.Signals) -> None:
    """To one rank, as the launch scripts send it to all: torchrun itself kills its ranks after 30 seconds."""
    output = tmp_path / "run"
    command = ["train", "--config", CONFIG, "--rollouts", rollouts, "--output", output, "--steps", 10000, *SMALL]
    with start_torchrun(2, *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
        lines = []
        for line in agent.stdout:
            lines.append(line)
            if line.startswith("step 2/"):
                os.kill(_ranks_of(agent.pid)[1], number)
                break
        out, errors = agent.communicate(timeout=120)
    out = "".join(lines) + out
    steps = len((output / "metrics.jsonl").read_text().splitlines())
    assert 2 <= steps < 10000
    assert f"{number.name} ended it after step {steps}/10000; wrote {output}/metrics.jsonl and {output}/weights" in out
    assert f"exitcode  : {128 + number}" in errors
    assert len(list((output / "weights").glob("*.safetensors"))) == 2


def test_without_torchrun() -> None:
    command = [
        sys.executable,
        "-m",
        "megatron_longstraw",
        "train",
        "--config",
        CONFIG,
        "--rollouts",
        "x",
        "--output",
        "y",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "start ranks with torchrun" in done.stderr
    assert "Traceback" not in done.stderr
