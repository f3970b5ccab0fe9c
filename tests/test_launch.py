"""The launch scripts: the command that each prints is one that the package takes, and what they refuse."""

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_longstraw.cli import load_run, make_parser
from megatron_longstraw.config import RunConfig
from megatron_longstraw.rollouts import load_tokenizer, read_groups
from tests.ranks import Layout, Ranks
from tests.torchrun import ROOT, drop_override

LAUNCH = ROOT / "launch"
INPUT = ["--rollouts", "groups.jsonl", "--output", "runs/it's 1"]
NODE = ["--node-rank", "2", "--master-addr", "node0", "--master-port", "1234"]
TINY = ROOT / "examples" / "dense" / "tiny.yaml"
SCRIPTS = {"glm52_32gpu.sh": NODE, "qwen36_8gpu.sh": []}


def _launch(script: str, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    command = ["bash", str(LAUNCH / script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **options)


def _printed(script: str, *arguments: Any, behind: tuple[str, ...] = ()) -> list[str]:
    done = _launch(script, *arguments, "--print", "--", *behind)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def _refused(script: str, *arguments: Any, **options: Any) -> str:
    done = _launch(script, *arguments, **options)
    assert done.returncode == 2
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{script}: error: ")
    return line


def _split(command: list[str]) -> tuple[dict[str, str], list[str]]:
    """torchrun's options, and what the package gets."""
    start, module = command.index("torch.distributed.run"), command.index("megatron_longstraw")
    assert command[start - 1] == "-m"
    assert command[module - 1] == "-m"
    options = command[start + 1 : module - 1]
    return dict(zip(options[::2], options[1::2], strict=True)), command[module + 1 :]


def _run(arguments: list[str]) -> tuple[RunConfig, Any]:
    options = make_parser().parse_args(arguments)
    return load_run(options), options


def _layers(run: RunConfig, world_size: int) -> str:
    """What each rank checks before it builds anything; the layers that the model gets."""
    from megatron_longstraw.doctor import check_run

    return check_run(run, world_size)["layers"]


@pytest.mark.parametrize(
    ("script", "world_size", "layout"),
    [("glm52_32gpu.sh", 32, {"tp": 8, "pp": 4, "ep": 8}), ("qwen36_8gpu.sh", 8, {"tp": 8, "pp": 1, "ep": 1})],
)
def test_printed_command_is_valid_at_full_size(
    ranks: Ranks, script: str, world_size: int, layout: dict[str, int]
) -> None:
    input_ = [*INPUT, *SCRIPTS[script], "--weights", "/data/it's: GLM"]
    command = _printed(script, *input_, behind=("--steps", "3", "--prompt-gradient=detached"))
    torchrun, arguments = _split(command)
    assert int(torchrun["--nnodes"]) * int(torchrun["--nproc-per-node"]) == world_size
    node = ("2", "node0", "1234") if SCRIPTS[script] else ("0", "127.0.0.1", "29500")
    assert (torchrun["--node-rank"], torchrun["--master-addr"], torchrun["--master-port"]) == node
    assert arguments[0] == "train"
    run, options = _run(arguments)
    assert (str(options.rollouts), str(options.output), options.steps) == (INPUT[1], INPUT[3], 3)
    assert run.model.weights == run.data.tokenizer == "/data/it's: GLM"
    assert run.schedule.prompt_gradient == "detached"
    assert {name: getattr(run.parallel, name) for name in layout} == layout
    assert ranks.run(Layout(), _layers, run, world_size) == ["local"]


@pytest.mark.parametrize(("model", "script"), [("glm52", "glm52_32gpu.sh"), ("qwen36", "qwen36_8gpu.sh")])
def test_cpu_smoke_has_the_flags_of_the_big_one(ranks: Ranks, model: str, script: str) -> None:
    torchrun, arguments = _split(_printed(script, *INPUT, *SCRIPTS[script], "--tokenizer", "bytes"))
    smoke = _printed("cpu_smoke.sh", model, *INPUT)
    smoke_torchrun, smoke_arguments = _split(smoke)
    assert smoke[:3] == ["env", "OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES="]
    assert smoke_torchrun.keys() == torchrun.keys()
    config = arguments.index("--config") + 1
    assert smoke_arguments[config] == str(ROOT / "examples" / model / "tiny.yaml")
    assert [*arguments[:config], *arguments[config + 1 :]] == [
        *smoke_arguments[:config],
        *smoke_arguments[config + 1 :],
    ]
    run, _ = _run(smoke_arguments)
    assert ranks.run(Layout(), _layers, run, int(smoke_torchrun["--nproc-per-node"])) == ["local"]


def test_cpu_smoke_has_rollouts_that_can_be_read() -> None:
    run, options = _run(_split(_printed("cpu_smoke.sh", "glm52"))[1])
    assert not options.output.exists()
    tokenizer, vocab_size = load_tokenizer(run.data.tokenizer), run.model.vocab_size
    groups = list(read_groups(options.rollouts, tokenizer=tokenizer, vocab_size=vocab_size, temperature=1.0))
    assert [len(group.responses) for group in groups] == [2, 2]
    assert len(groups[0].prompt_ids) > 600


@pytest.mark.parametrize("script", [*SCRIPTS, "cpu_smoke.sh", "slurm.sh"])
def test_help(tmp_path: Path, script: str) -> None:
    done = _launch(script, "--help", env={"TMPDIR": str(tmp_path)})
    assert not list(tmp_path.iterdir())
    assert done.returncode == 0
    assert "--rollouts FILE" in done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("qwen36_8gpu.sh", [], "--rollouts FILE is missing"),
        ("qwen36_8gpu.sh", ["--rollouts"], "--rollouts needs a value"),
        ("qwen36_8gpu.sh", ["--rollouts", "x"], "--output DIR is missing"),
        ("qwen36_8gpu.sh", INPUT, "--weights DIR or --tokenizer PATH is missing"),
        ("qwen36_8gpu.sh", [*INPUT, "--steps", "3"], "unknown argument --steps"),
        ("qwen36_8gpu.sh", [*INPUT, "--weigths=/w"], "unknown argument --weigths"),
        ("qwen36_8gpu.sh", [*INPUT, "--weights", "/w", "--nnodes", "two"], "--nnodes two: needs a whole number"),
        ("qwen36_8gpu.sh", [*INPUT, "--weights", "/w", "--nnodes=2"], "--node-rank is missing"),
        ("qwen36_8gpu.sh", [*INPUT, "--weights", "/w", "--node-rank", "1"], "--node-rank 1: needs a whole number"),
        ("cpu_smoke.sh", ["qwen36", *NODE, "--nnodes=3"], "--output DIR is missing: the 3 nodes share it"),
        ("glm52_32gpu.sh", [*INPUT, "--weights", "/w", *NODE, "--nnodes", "6"], "--nnodes 6: needs a multiple of 4"),
        ("glm52_32gpu.sh", [*INPUT, "--weights", "/w", "--node-rank", "1"], "--master-addr is missing"),
        ("qwen36_8gpu.sh", [*INPUT, "--weights", "/w"], "--rollouts groups.jsonl: no such file"),
        ("cpu_smoke.sh", ["gpt"], "needs glm52 or qwen36 first"),
        ("slurm.sh", ["launch/nothing.sh"], "launch/nothing.sh: no such launch script"),
        ("slurm.sh", [str(LAUNCH / "qwen36_8gpu.sh")], "this is no Slurm job"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line(tmp_path: Path, script: str, arguments: list[str], message: str) -> None:
    assert message in _refused(script, *arguments, env={"TMPDIR": str(tmp_path)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "values", "needed"),
    [
        ("--nnodes", [0, 2**63, 2**64 + 1, 10**20 - 1, "1e3", "-1", "01"], "from 1 to 99999"),
        ("--node-rank", [1, 2**64, 10**20], "from 0 to 0"),
        ("--master-port", [0, 65536, 70000, 2**64 + 29500], "from 1 to 65535"),
    ],
)
def test_numbers_are_held_against_their_ranges(option: str, values: list[Any], needed: str) -> None:
    for value in values:
        refused = _refused("qwen36_8gpu.sh", *INPUT, "--weights", "/w", option, value)
        assert f"{option} {value}: needs a whole number {needed}" in refused


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """Shows four GPUs; in place of torchrun, writes its arguments down."""
    path = tmp_path / "python"
    path.write_text(
        f'#!/bin/sh\ncase $2 in *.launch_check) echo 4 ;; *) printf "%s\\n" "$@" >{tmp_path}/started ;; esac\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def inputs(tmp_path: Path) -> list[Any]:
    (tmp_path / "groups.jsonl").touch()
    return ["--rollouts", tmp_path / "groups.jsonl", "--output", tmp_path / "run", "--tokenizer", "bytes"]


def test_wrong_machine_is_told_before_a_rank_starts(tmp_path: Path, fake_python: Path, inputs: list[Any]) -> None:
    python = ["--python", fake_python]
    assert "shows 4 GPUs: needs 8" in _refused("qwen36_8gpu.sh", *inputs, *python)
    assert "shows 4 GPUs: needs 8" in _refused("glm52_32gpu.sh", *inputs, *python, *NODE)
    for arguments, message in (
        (["--weights", tmp_path / "none"], "none: no such folder"),
        (["--weights", tmp_path], "has no .safetensors file"),
        (["--tokenizer", tmp_path / "t.json"], "t.json: no such file or folder"),
    ):
        assert message in _refused("qwen36_8gpu.sh", *inputs, *python, *arguments)
    (tmp_path / "groups.jsonl").chmod(0)
    assert "groups.jsonl: can't be read" in _refused("qwen36_8gpu.sh", *inputs, *python, preexec_fn=drop_override)
    (tmp_path / "groups.jsonl").chmod(0o600)
    assert "can't import megatron_longstraw and torch" in _refused("qwen36_8gpu.sh", *inputs, "--python", "/bin/false")
    assert not (tmp_path / "started").exists()


def test_output_that_cant_be_used_is_told_before_a_rank_starts(
    tmp_path: Path, fake_python: Path, inputs: list[Any]
) -> None:
    used, locked = tmp_path / "used", tmp_path / "locked"
    used.mkdir()
    (used / "metrics.jsonl").touch()
    (locked / "weights").mkdir(parents=True)
    (locked / "weights").chmod(0o555)
    for output, message in (
        (used, "a run's metrics.jsonl is there already"),
        (fake_python, "python is no folder"),
        (fake_python / "new" / "run", "python is no folder"),
        (locked, "locked/weights allows no new files"),
        (locked / "weights" / "new" / "run", "locked/weights allows no new files"),
    ):
        arguments = [*inputs, "--output", output, "--python", fake_python]
        refused = _refused("qwen36_8gpu.sh", *arguments, preexec_fn=drop_override)
        assert f"--output {output}: " in refused and message in refused
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer", ROOT / "examples"], f"data.tokenizer='{ROOT}/examples': got No such file"),
        (["--", "--tp", "4"], "parallel.tp=4"),
        (["--", "--stepz", "2"], "unrecognized arguments: --stepz 2"),
    ],
    ids=["tokenizer", "layout", "option"],
)
def test_what_ranks_would_refuse_is_told_before_one_starts(tmp_path: Path, arguments: list[Any], message: str) -> None:
    arguments = ["--output", tmp_path / "run", "--python", sys.executable, *arguments]
    assert message in _refused("cpu_smoke.sh", "qwen36", *arguments)
    assert not (tmp_path / "run").exists()


def _told(node_rank: int, port: int, *train: Any) -> tuple[int, str]:
    """Status and words of what a launch script asks before it starts a rank."""
    from megatron_longstraw import launch_check

    node = ["--world-size", 2, "--node-rank", node_rank, "--master-port", port, "--rollouts", "g.jsonl"]
    arguments = ["train", "--config", TINY, "--rollouts", "g.jsonl", "--output", "./out", *train]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            launch_check.main([*map(str, node), "--output", "out/", *map(str, arguments)])
            status = 0
        except SystemExit as end:
            status = end.code
    return status, out.getvalue()


def test_what_ranks_would_refuse_one_by_one(ranks: Ranks) -> None:
    port = 0  # any that is free
    with socket.create_server(("127.0.0.1", 0)) as other:
        used = other.getsockname()[1]
        for arguments, message in (
            ((0, port, "--dtype", "float64"), "dtype=float64 is for compare"),
            (
                (0, port, "--steps", 2, "--set", "optimizer.lr_warmup_steps=2"),
                "optimizer.lr_warmup_steps=2: needs less",
            ),
            ((0, port, "--rollouts", "h.jsonl"), "--rollouts h.jsonl behind --: needs to stand before it"),
            ((0, port, "--out=other"), "--output other behind --: needs to stand before it"),
            ((0, used), f"--master-port {used}: Address already in use"),
        ):
            ((status, text),) = ranks.run(Layout(), _told, *arguments)
            assert status == 2
            assert text.startswith(f"error: {message}") and text.count("\n") == 1
        for arguments in ((0, port), (1, used)):  # the port is node 0's
            assert ranks.run(Layout(), _told, *arguments) == [(0, "0\n")]


def test_weights_without_a_tokenizer_are_told_before_a_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    arguments = ["--weights", tmp_path, "--output", tmp_path / "run", "--python", sys.executable]
    assert f"data.tokenizer='{tmp_path}': got No such file" in _refused("cpu_smoke.sh", "qwen36", *arguments)
    arguments += ["--tokenizer", "bytes"]
    assert f"{tmp_path}/model.safetensors: can't be read" in _refused("cpu_smoke.sh", "qwen36", *arguments)


def test_cdpath_is_not_heard(tmp_path: Path) -> None:
    """With it, cd takes a folder that it finds there, and prints it."""
    (tmp_path / "launch").mkdir()
    arguments = ["bash", "launch/cpu_smoke.sh", "glm52", *INPUT, "--print"]
    environment = {**os.environ, "CDPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    _, package = _split(shlex.split(done.stdout))
    assert package[package.index("--config") + 1] == str(ROOT / "examples" / "glm52" / "tiny.yaml")


def test_what_runs_is_what_is_printed(tmp_path: Path, fake_python: Path, inputs: list[Any]) -> None:
    fake_python.write_text(fake_python.read_text().replace("echo 4", "echo 8"))
    arguments = [*inputs, "--python", fake_python, "--", "--seed", 1]
    assert _launch("qwen36_8gpu.sh", *arguments).returncode == 0
    printed = _printed("qwen36_8gpu.sh", *inputs, "--python", fake_python)
    assert (tmp_path / "started").read_text().splitlines() == [*printed[1:], "--seed", "1"]


def test_cpu_smoke_says_where_its_output_goes(tmp_path: Path, fake_python: Path) -> None:
    """And leaves nothing there itself."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    for output, told in (([], True), (["--output", tmp_path / "run"], False)):
        done = _launch("cpu_smoke.sh", "glm52", *output, "--python", fake_python, env={"TMPDIR": str(temporary)})
        assert done.returncode == 0
        started = (tmp_path / "started").read_text().splitlines()
        folder = started[started.index("--output") + 1]
        assert done.stderr == (f"cpu_smoke.sh: output goes to {folder}\n" if told else "")
        assert folder.startswith(f"{temporary}/") == told
    assert not list(temporary.iterdir())


def test_slurm_hands_its_nodes_to_each(tmp_path: Path) -> None:
    """With scontrol and srun of our own; a real cluster is not here."""
    for name, body in (("scontrol", "printf 'gpu07\\ngpu08\\n'"), ("srun", 'printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "41"}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = LAUNCH / "qwen36_8gpu.sh"
    done = _launch("slurm.sh", script, *INPUT, "--weights", "/w", "--print", env=job | path)
    assert done.returncode == 0, done.stderr
    arguments = done.stdout.splitlines()
    task = arguments[arguments.index("bash") :]
    outcome = subprocess.run(task, env={**os.environ, "SLURM_NODEID": "1"}, capture_output=True, text=True, check=True)
    torchrun, _ = _split(shlex.split(outcome.stdout))
    assert torchrun["--nnodes"] == "2"
    assert torchrun["--node-rank"] == "1"
    assert torchrun["--master-addr"] == "gpu07"
    assert torchrun["--master-port"] == "20041"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glm52", "qwen36"])
def test_cpu_smoke_trains(tmp_path: Path, model: str) -> None:
    output = tmp_path / "run"
    options = ["--output", output, "--master-port", _free_port(), "--python", sys.executable]
    done = _launch("cpu_smoke.sh", model, *options, "--", "--steps", 2)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in lines)
    assert list((output / "weights").glob("tp01-pp00.safetensors"))


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(") ")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def _descendants(pid: int) -> list[int]:
    return [d for child in _children(pid) for d in (child, *_descendants(child))]


def _hear_signals() -> None:
    """In a new child: a test run in the background, or under nohup, ignores signals, and bash can't trap those."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _smoke(tmp_path: Path, torchrun: str, *options: Any) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """cpu_smoke.sh with a command in the place of Python for torchrun, and without procps, which a container may lack.

    Its standard output ends when all that it started have ended. The list is for the ids of what the script started,
    to be killed where a test fails.
    """
    python, tools = tmp_path / "python", tmp_path / "tools"
    python.write_text(f'#!/bin/sh\ncase $2 in *.launch_check) echo 0 ;; *) exec {torchrun} "$@" ;; esac\n')
    python.chmod(0o755)
    tools.mkdir()
    for name in ("bash", "env", "setsid", "dirname", "cat", "sleep"):
        (tools / name).symlink_to(str(shutil.which(name)))
    command = ["bash", LAUNCH / "cpu_smoke.sh", "qwen36", "--output", tmp_path / "run", "--python", python, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(tools)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), env=environment, preexec_fn=_hear_signals, **pipes) as script:
        running: list[int] = []
        try:
            yield script, running
        except BaseException:
            for pid in {*running, script.pid, *_descendants(script.pid)}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise


RANKS = """
import os, signal, subprocess, sys

def say(text):
    os.write(1, (text + "\\n").encode())  # whole lines, which print need not write

NAMES = ("SIGHUP", "SIGINT", "SIGTERM")
if sys.argv[1] == "rank":
    subprocess.Popen(["sleep", "1000"])
    for name in NAMES:
        signal.signal(getattr(signal, name), lambda number, _: say(signal.Signals(number).name))
    say("up")
    while True:
        signal.pause()
for name in NAMES:
    signal.signal(getattr(signal, name), lambda *_: say("torchrun got one"))
command = ["sleep", "1000"] if "--starting" in sys.argv else [sys.executable, __file__, "rank"]
ranks = [subprocess.Popen(command, start_new_session=True) for _ in range(2)]
if "--starting" in sys.argv:
    say("up\\nup")
sys.exit(max(rank.wait() != 0 for rank in ranks))
"""
SIGNALS = pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)


@SIGNALS
def test_signal_ends_a_node_that_waits_for_others(tmp_path: Path, number: signal.Signals) -> None:
    """The real torchrun, of node 1; node 0 takes its call and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as node0:
        others = ["--nnodes", 2, "--node-rank", 1, "--master-addr", "127.0.0.1"]
        with _smoke(tmp_path, sys.executable, *others, "--master-port", node0.getsockname()[1]) as (script, running):
            node0.settimeout(120)
            call, _ = node0.accept()
            running += _descendants(script.pid)
            with call:
                script.send_signal(number)
                script.communicate(timeout=60)
    assert script.returncode == 128 + number


@SIGNALS
def test_a_second_signal_kills_ranks_that_hear_none(tmp_path: Path, number: signal.Signals) -> None:
    """The first goes to the ranks, and not to torchrun, which would kill them after 30 seconds."""
    (tmp_path / "ranks.py").write_text(RANKS)
    with _smoke(tmp_path, f"{sys.executable} {tmp_path}/ranks.py") as (script, running):
        assert [script.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        running += _descendants(script.pid)
        script.send_signal(number)
        heard = "SIGINT" if number == signal.SIGINT else "SIGTERM"
        assert [script.stdout.readline() for _ in range(2)] == [f"{heard}\n"] * 2
        script.send_signal(number)
        assert script.communicate(timeout=60)[0] == ""
    assert script.returncode == 128 + number


@SIGNALS
def test_signal_ends_ranks_that_have_no_handler_yet(tmp_path: Path, number: signal.Signals) -> None:
    """A script in the background has its commands ignore SIGINT, which ranks would inherit."""
    (tmp_path / "ranks.py").write_text(RANKS)
    with _smoke(tmp_path, f"{sys.executable} {tmp_path}/ranks.py", "--", "--starting") as (script, running):
        assert [script.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        running += _descendants(script.pid)
        script.send_signal(number)
        assert script.communicate(timeout=60)[0] == ""
    assert script.returncode == 128 + number


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_signal_to_the_script_lets_the_step_end(tmp_path: Path, number: signal.Signals) -> None:
    """torchrun alone would kill its ranks after 30 seconds; the script sends the signal to them."""
    output = tmp_path / "run"
    command = ["bash", LAUNCH / "cpu_smoke.sh", "qwen36", "--output", output, "--master-port", _free_port()]
    command += ["--python", sys.executable, "--", "--steps", 10000]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), env=environment, preexec_fn=_hear_signals, **pipes) as script:
        lines = []
        for line in script.stdout:
            lines.append(line)
            if line.startswith("step 1/"):
                script.send_signal(number)
                break
        out, _ = script.communicate(timeout=300)
    assert script.returncode == 128 + number
    steps = len((output / "metrics.jsonl").read_text().splitlines())
    assert f"{number.name} ended it after step {steps}/10000; wrote {output}/metrics.jsonl" in "".join(lines) + out
    assert (output / "weights" / "tp01-pp00.safetensors").exists()
