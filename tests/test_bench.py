"""The benchmark: its points, its CSV file, its arithmetic, a sweep on ranks, and how it refuses."""

import builtins
import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_longstraw import bench as module
from megatron_longstraw.bench import COLUMNS, Point, Sweep, Table, bench, bisect, longest, ratio_lines, ratios
from megatron_longstraw.bench_plot import draw
from megatron_longstraw.child import EndedBySignal, signals_end_the_command
from megatron_longstraw.cli import main
from megatron_longstraw.config import ConfigError, RunConfig, load_config
from tests.ranks import Layout, Ranks
from tests.torchrun import ROOT

CONFIG = ROOT / "examples" / "dense" / "tiny.yaml"
MEASURED = {"seconds": 2.0, "peak_bytes": 100, "flops": 1000, "state_bytes": 0, "tokens_per_second": 5.5, "loss": -0.25}


def _sweep(output: Path, **changes: Any) -> Sweep:
    fields: dict[str, Any] = {
        "run": load_config(CONFIG),
        "ranks": 2,
        "output": output,
        "prompt_tokens": [512, 1024],
        "response_tokens": [16],
        "responses": [2],
        "modes": ["stock", "exact"],
    }
    return Sweep(**{**fields, **changes})


def _in_chunks(tokens: int) -> RunConfig:
    run = load_config(CONFIG)
    return replace(run, schedule=replace(run.schedule, prompt_chunk_tokens=tokens))


def _fake(answer: Callable[[Point], dict[str, Any]], seen: list[Point]) -> Any:
    def measure(sweep: Sweep, point: Point, *, probe: bool) -> dict[str, Any]:
        seen.append(point)
        return answer(point)

    return measure


def test_points_are_written_as_they_come_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, seen = _sweep(tmp_path / "out"), list[Point]()

    def answer(point: Point) -> dict[str, Any]:
        if point == Point("exact", 512, 16, 2):
            return {"seconds": 1.0, "error": "OutOfMemoryError: no, really"}
        if point == Point("exact", 1024, 16, 2):
            raise KeyboardInterrupt
        return MEASURED

    monkeypatch.setattr(module, "measure_in_fresh_ranks", _fake(answer, seen))
    with pytest.raises(KeyboardInterrupt):
        bench(sweep)
    assert [(p.mode, p.prompt_tokens) for p in seen] == [
        ("stock", 512), ("exact", 512), ("stock", 1024), ("exact", 1024),
    ]  # fmt: skip
    lines = list(csv.DictReader((sweep.output / "points.csv").open()))
    assert [line["error"] for line in lines] == ["", "OutOfMemoryError: no, really", ""]
    seen.clear()
    monkeypatch.setattr(module, "measure_in_fresh_ranks", _fake(lambda _: MEASURED, seen))
    rows = bench(sweep)
    assert seen == [Point("exact", 1024, 16, 2)]
    assert [row["seconds"] for row in rows] == [2.0, 1.0, 2.0, 2.0]
    assert rows == list(Table(sweep.output / "points.csv").rows.values())
    assert rows[1]["peak_bytes"] is None
    assert rows[0] == dict.fromkeys(COLUMNS) | MEASURED | {
        "mode": "stock", "prompt_tokens": 512, "response_tokens": 16, "responses": 2, "ranks": 2, "tp": 2, "pp": 1,
        "dtype": "float32", "architecture": "gqa", "repeats": 1, "error": "",
    }  # fmt: skip


def test_folder_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure_in_fresh_ranks", _fake(lambda _: MEASURED, []))
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="holds something else"):
        bench(_sweep(tmp_path))
    with pytest.raises(ConfigError, match="holds something else"):
        bench(_sweep(tmp_path / "thesis.tex"))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    sweep = _sweep(tmp_path / "out")
    bench(sweep)
    other = replace(sweep, run=load_config(CONFIG, [("schedule.prompt_chunk_tokens", 64)]))
    for changed in (other, replace(sweep, ranks=4)):
        with pytest.raises(ConfigError, match="another run or other ranks"):
            bench(changed)
    (own := tmp_path / "own").mkdir()
    (own / "config.yaml").write_text("precious: true")
    with pytest.raises(ConfigError, match="another run or other ranks"):
        bench(_sweep(own))
    assert (own / "config.yaml").read_text() == "precious: true"
    (own / "config.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="another run or other ranks"):
        bench(_sweep(own))
    bench(replace(sweep, modes=["detached"]))  # the same run: more points
    assert load_config(sweep.output / "config.yaml") == sweep.run


def test_broken_csv_is_refused_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = _sweep(tmp_path / "out", modes=["exact"])
    monkeypatch.setattr(module, "measure_in_fresh_ranks", _fake(lambda _: MEASURED, []))
    bench(sweep)
    path = sweep.output / "points.csv"
    whole = path.read_text()
    path.write_text(whole[:-20])
    with pytest.raises(ConfigError, match=r"points\.csv:3: not a line of a benchmark"):
        bench(sweep)
    path.write_bytes(whole.encode().replace(b"exact", b"ex\xffct"))
    with pytest.raises(ConfigError, match=r"points\.csv:2: not a line of a benchmark \(mode"):
        bench(sweep)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="needs the columns mode,prompt_tokens"):
        bench(sweep)


def _row(mode: str, **values: Any) -> dict[str, Any]:
    point = {"mode": mode, "prompt_tokens": 512, "response_tokens": 16, "responses": 8}
    return {**dict.fromkeys(COLUMNS), **point, "error": "", **values}


def test_ratios_and_the_flop_bound() -> None:
    stock = _row("stock", seconds=60.0, flops=3000, peak_bytes=4 * 2**20)
    exact = _row("exact", seconds=12.0, flops=500, peak_bytes=2**20)
    ratio = ratios(exact, stock)
    # at stock's 50 operations a second 500 take 10 seconds
    assert (ratio.faster, ratio.smaller, ratio.bound) == (5.0, 4.0, 10.0)
    assert ratio.of_bound == pytest.approx(1.2)
    assert ratios(_row("exact", seconds=12.0), stock).bound is None
    assert ratios(_row("exact", flops=500), stock) == replace(ratio, faster=None, smaller=None, of_bound=None)
    few = _row("exact", seconds=9.0, flops=500, peak_bytes=2**20 - 2**10) | {"responses": 2}
    lines = ratio_lines([few, stock, exact])
    assert lines[2].split() == ["512", "16", "2", "exact", "9.00", "-", "-", "1.0", "-"]  # no stock of its shape
    assert lines[4].split() == ["512", "16", "8", "exact", "12.00", "5.00", "1.20", "1.0", "4.00"]
    assert lines[5].endswith("with G=8 against G=2: +1,024 (+0.098%)")


def test_bisection() -> None:
    for most in range(20):
        for start in (1, 2, 3, 7, 16, 40):
            assert bisect(lambda n, most=most: n <= most, start) == (most, most + 1)  # type: ignore[misc]


def test_longest_prompt_and_its_restart(tmp_path: Path) -> None:
    chunk, seen = 2048, list[Point]()
    sweep = _sweep(tmp_path / "out", run=_in_chunks(chunk), prompt_tokens=[3000], memory_limit_gib=1.0)

    def answer(point: Point) -> dict[str, Any]:
        if point.mode == "stock" and point.prompt_tokens > 3 * chunk:
            return {"error": "OutOfMemoryError: CUDA out of memory."}
        return {"peak_bytes": 2**30 // (5 * chunk) * point.prompt_tokens}

    found = {"stock": (3 * chunk, 4 * chunk), "exact": (5 * chunk, 6 * chunk)}
    assert longest(sweep, _fake(answer, seen)) == found
    assert len(set(seen)) == len(seen)
    assert seen[0] == Point("stock", 2 * chunk, 16, 2)
    assert longest(sweep, _fake(answer, again := [])) == found
    assert again == []
    with pytest.raises(ConfigError, match="can't tell whether it fits: ValueError"):
        longest(replace(sweep, modes=["detached"]), _fake(lambda _: {"error": "ValueError: no"}, []))


@pytest.mark.parametrize("gpu", [False, True])
def test_longest_prompt_under_another_limit_in_the_same_folder(tmp_path: Path, gpu: bool) -> None:
    """On a GPU the allocator stops the rank; its peak says nothing of a lower limit."""
    seen = list[Point]()

    def measure(sweep: Sweep, point: Point, *, probe: bool) -> dict[str, Any]:
        seen.append(point)
        peak = point.prompt_tokens * 2**15
        if gpu and peak > sweep.memory_limit_gib * 2**30:  # type: ignore[operator]
            return {"error": "OutOfMemoryError: CUDA out of memory."}
        return {"peak_bytes": peak}

    sweep = _sweep(tmp_path / "out", run=_in_chunks(2048), prompt_tokens=[2048], modes=["exact"], gpu=gpu)
    for limit, tokens in ((0.5, 16384), (1.0, 32768), (0.25, 8192)):
        assert longest(replace(sweep, memory_limit_gib=limit), measure)["exact"][0] == tokens
    count = len(seen)
    assert longest(replace(sweep, memory_limit_gib=1.0), measure)["exact"][0] == 32768
    assert len(seen) == count  # what is known is not measured again
    names = {"longest-0.5GiB.csv", "longest-1GiB.csv", "longest-0.25GiB.csv"} if gpu else {"longest.csv"}
    assert {path.name for path in sweep.output.glob("*.csv")} == names


def test_picture_and_what_is_missing_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        _row(mode, seconds=g * 1.0, flops=g, peak_bytes=2**20, ranks=1, tp=1, pp=1) | {"responses": g}
        for mode in ("stock", "exact")
        for g in (2, 8)
    ]
    rows.append(_row("detached", error="OutOfMemoryError: x"))
    assert draw(rows, tmp_path) == [tmp_path / "R16.png"]
    assert (tmp_path / "R16.png").read_bytes().startswith(b"\x89PNG")
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="the picture needs matplotlib"):
        draw(rows, tmp_path)


def _bench(*options: Any) -> None:
    main(["bench", *map(str, options)])


GOOD = ["--ranks", 2, "--config", CONFIG, "--prompt-tokens", "64"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--modes", "stock,fast"], "needs some of stock,stock-no-recompute,detached,exact with commas between"),
        (["--modes", "stock,stock"], "needs some of stock"),
        (["--prompt-tokens", "64,x"], "needs different integers >= 1 with commas between, got '64,x'"),
        (["--responses", "2,0"], "got '2,0'"),
        (["--responses", "2,02"], "got '2,02'"),
        (["--response-tokens", ""], "got ''"),
        (["--memory-limit-gib", "0"], "needs a number > 0"),
        (["--memory-limit-gib", "1"], "--memory-limit-gib needs --longest"),
        (["--longest"], "--longest on the CPU needs --memory-limit-gib"),
        (["--longest", "--memory-limit-gib", "1", "--responses", "2,4"], "--responses [2, 4]: --longest takes one"),
        (["--ranks", "3"], "3 ranks can't hold parallel.tp=2"),
        (["--set", "schedule.chunk=3"], "unknown key schedule.chunk"),
    ],
)
def test_bad_options_are_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        _bench(*GOOD, "--output", tmp_path / "out", *options)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_sweep_of_two_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--set", "model.transformer.num_layers=2", "--set", "schedule.prompt_chunk_tokens=16", "--tp", 1]
    options = [
        "--ranks",
        1,
        "--config",
        CONFIG,
        "--prompt-tokens",
        50,
        "--response-tokens",
        4,
        "--responses",
        2,
        *small,
    ]
    with pytest.raises(SystemExit) as end:
        _bench(*options, "--modes", "stock-no-recompute,exact", "--output", tmp_path / "out")
    assert end.value.code == 0, capsys.readouterr()
    stock, exact = csv.DictReader((tmp_path / "out" / "points.csv").open())
    assert stock["error"] == exact["error"] == ""
    assert float(stock["loss"]) == pytest.approx(float(exact["loss"]), rel=1e-4)
    assert float(stock["loss"]) != 0
    for row in (stock, exact):
        assert float(row["seconds"]) > 0
        assert float(row["tokens_per_second"]) == pytest.approx(58 / float(row["seconds"]))
        assert int(row["flops"]) > 1e6
        assert int(row["peak_bytes"]) > 1e6
        assert row["nvml_bytes"] == ""
    assert stock["capture_seconds"] == ""
    phases = sum(float(exact[f"{phase}_seconds"]) for phase in ("capture", "replay", "prompt_backward"))
    assert phases <= float(exact["seconds"])
    rows = 2 * 49 * 2 * 2 * 16 * 4  # layers x positions x (key, value) x heads x dim x float32
    assert int(exact["state_bytes"]) == int(exact["state_gradient_bytes"]) == rows
    assert (tmp_path / "out" / "R4.png").exists()


def test_a_rank_that_refuses_ends_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        _bench(*GOOD, "--output", tmp_path, "--ranks", 1, "--tp", 1, "--set", "model.backend=transformer_engine")
    assert end.value.code == 2
    assert "model.backend=transformer_engine can't be used" in capsys.readouterr().err
    assert not (tmp_path / "points.csv").exists()
    corrected = _sweep(tmp_path)  # nothing was measured: the folder may be taken over
    module.prepare_output(corrected)
    assert load_config(tmp_path / "config.yaml") == corrected.run


def test_points_that_failed_are_counted_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"stock": MEASURED, "exact": {"error": "OutOfMemoryError: no"}}
    monkeypatch.setattr(module, "measure_in_fresh_ranks", _fake(lambda point: answers[point.mode], []))
    for modes, status, said in (("stock,exact", 1, "1 of 2 points failed"), ("exact", 1, "1 of 1"), ("stock", 0, "")):
        with pytest.raises(SystemExit) as end:
            _bench(*GOOD, "--modes", modes, "--output", tmp_path / "out")
        assert end.value.code == status
        text = capsys.readouterr().out
        assert said in text
        assert ("points failed" in text) == bool(status)


TORCHRUN = """\
import os, signal, subprocess, sys, time
from pathlib import Path
# as torchrun does: the rank is in a session of its own, and ends by the signal's handler, which takes a while
rank = subprocess.Popen(["sleep", "600"], start_new_session=True)
def end(number, frame):
    signal.signal(number, lambda *_: os._exit(3))  # a second signal would leave the rank
    time.sleep(0.5)
    rank.kill()
    rank.wait()
    Path("ended").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
Path("rank.new").write_text(str(rank.pid))
Path("rank.new").rename("rank")
time.sleep(600)
"""

BENCH = """\
import signal, sys
from megatron_longstraw import bench, cli
for number in (signal.SIGINT, signal.SIGHUP):  # which nohup and background jobs ignore
    signal.signal(number, signal.SIG_DFL)
def measure(sweep, point, *, probe):
    if point.mode == "exact":
        with open("log", "w") as log:
            bench.run_child([sys.executable, "torchrun.py"], log)
    return {"seconds": 2.0}
bench.measure_in_fresh_ranks = measure
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda s: s.name)
def test_a_signal_ends_the_ranks_first(tmp_path: Path, number: signal.Signals) -> None:
    """With a stand-in for torchrun; the next test has the real one."""
    (tmp_path / "torchrun.py").write_text(TORCHRUN)
    options = ["bench", *GOOD, "--output", "out", "--modes", "stock,exact"]
    command = [sys.executable, "-c", BENCH, *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        _wait_for((tmp_path / "rank").exists, process)
        process.send_signal(number)
        process.send_signal(number)  # twice is as once
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert errors == ""
    assert out.endswith(f"{number.name} ended it: what was measured is in out; the same command goes on\n")
    assert (tmp_path / "ended").exists()
    assert not Path("/proc", (tmp_path / "rank").read_text()).exists()
    assert [row["mode"] for row in csv.DictReader((tmp_path / "out" / "points.csv").open())] == ["stock"]


def test_a_signal_ends_torchrun_and_its_ranks(tmp_path: Path) -> None:
    options = ["bench", *GOOD[:-1], 100000, "--modes", "stock", "--tp", 1, "--ranks", 1, "--output", tmp_path / "out"]
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_longstraw", *map(str, options)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        _wait_for(lambda: len(_below(process.pid)) == 2, process)
        torchrun, rank = _below(process.pid)
        process.terminate()
        out, errors = process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors == ""
    assert "SIGTERM ended it" in out
    assert not any(Path(f"/proc/{pid}").exists() for pid in (torchrun, rank))


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_end_the_command():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(EndedBySignal, match="SIGTERM ended it"):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def _below(pid: int) -> list[int]:
    """A process's children, and theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [below for child in children for below in (int(child), *_below(int(child)))]


def _wait_for(there: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    while not there():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_ranks_that_die_leave_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, point = _sweep(tmp_path / "out"), Point("exact", 8, 2, 2)
    module.prepare_output(sweep)
    monkeypatch.setattr(sys, "executable", "false")
    row = module.measure_in_fresh_ranks(sweep, point, probe=False)
    assert row["error"].startswith("the ranks ended with status 1: see ")


def test_the_first_rank_that_fails_tells(tmp_path: Path) -> None:
    module.tell_failure(tmp_path / "x.json", MemoryError("first\nwith a second line"))
    module.tell_failure(tmp_path / "x.json", RuntimeError("connection closed"))
    assert [path.name for path in tmp_path.iterdir()] == ["x.error"]
    assert json.loads((tmp_path / "x.error").read_text()) == {"kind": "MemoryError", "text": "first"}


def test_a_rank_tells_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    module.tell_failure(tmp_path / "x.json", MemoryError("first"))
    assert json.loads((tmp_path / "x.error").read_text())["text"] == "first"


def test_a_rank_that_was_ended_before_it_could_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, point = _sweep(tmp_path / "out"), Point("exact", 8, 2, 2)
    module.prepare_output(sweep)

    def run_child(command: list[str], screen: Any) -> int:
        Path(command[command.index("--result") + 1]).with_suffix(".error").touch()
        return 1

    monkeypatch.setattr(module, "run_child", run_child)
    row = module.measure_in_fresh_ranks(sweep, point, probe=False)
    assert row["error"].startswith("the ranks ended with status 1: see ")


def _parameters(config: str) -> int:
    """Of the whole model, as Megatron's modules have them, without memory."""
    import torch

    from megatron_longstraw import models

    run = load_config(config)
    models.transformer_config(run)
    with torch.device("meta"):
        original, models.initialize_weights = models.initialize_weights, lambda *_: None
        try:
            chunks = models.build_model(run)
        finally:
            models.initialize_weights = original
    return sum(p.numel() for chunk in chunks for p in chunk.parameters())


@pytest.mark.parametrize("architecture", ["dense", "qwen36"])
def test_models_for_one_gpu(ranks: Ranks, architecture: str) -> None:
    path = ROOT / "examples" / architecture / "bench_1b.yaml"
    assert load_config(path).parallel.tp == 1
    (parameters,) = ranks.run(Layout(), _parameters, str(path))
    assert 1.0e9 < parameters < 1.2e9
