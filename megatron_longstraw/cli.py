"""The command line: ``train`` and ``compare`` under torchrun; ``doctor``, ``demo`` and ``bench`` by themselves.

A mistake of the user's ends every rank with exit status 2 and one line that says what to change.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_longstraw.bench import MODES, Point, Sweep, bench, longest, tell_failure
from megatron_longstraw.bench_plot import draw
from megatron_longstraw.child import EndedBySignal, signals_end_the_command
from megatron_longstraw.config import ConfigError, RunConfig, load_config, parse_override

_USAGE = """\
torchrun --nproc-per-node N -m megatron_longstraw train --config FILE --rollouts FILE --output DIR
       torchrun --nproc-per-node N -m megatron_longstraw compare --config FILE --rollouts FILE --json OUT
       longstraw doctor [--config FILE] [--world-size N]
       longstraw demo
       longstraw bench --ranks N --config FILE --output DIR --prompt-tokens 8192,32768 --responses 2,8,16"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command, and exits.

    With 0; with 1 where `compare` or `doctor` finds a fault, or a point of `bench` failed; with 2 on wrong input; with
    130 or 143 where SIGINT or SIGTERM ended `train` or `bench` before its end.
    """
    options = make_parser().parse_args(arguments)
    try:
        status = options.run(options)
    except _user_errors() as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        status = 2
    except _peer_errors():
        status = 2  # the rank that failed says why
    sys.exit(status)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; `run` of what it returns is the command's function."""
    parser = argparse.ArgumentParser(prog="longstraw", usage=_USAGE, description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog="longstraw")

    train = commands.add_parser("train", help="train over a rollout file (under torchrun)")
    _add_run_options(train)
    _add_rollout_options(train)
    train.add_argument("--output", type=Path, required=True, help="folder for metrics.jsonl and weights/")
    train.add_argument("--steps", type=_positive, help="optimizer steps (default: once through the file)")
    train.set_defaults(run=_train)

    compare = commands.add_parser("compare", help="the same groups by the stock schedule and by ours (under torchrun)")
    _add_run_options(compare)
    _add_rollout_options(compare)
    compare.add_argument("--json", type=Path, required=True, help="where the result goes")
    compare.add_argument("--limit", type=_positive, help="compare the first so many groups")
    compare.add_argument(
        "--stock-attention",
        choices=["longstraw", "megatron"],
        default="longstraw",
        help="attention of the stock side: ours without prompt rows, or Megatron's own (short prompts)",
    )
    compare.set_defaults(run=_compare)

    doctor = commands.add_parser("doctor", help="what is installed, what would be used, and whether a run can start")
    doctor.add_argument("--config", type=Path, help="run configuration (YAML) to check")
    doctor.add_argument("--world-size", type=_positive, metavar="N", help="its ranks (default: the fewest)")
    doctor.add_argument("--nnodes", type=_positive, metavar="N", help="nodes like this one that they are spread over")
    _add_overrides(doctor)
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser("demo", help="train and compare on English text, on two CPU ranks of this machine")
    demo.add_argument("--output", type=Path, help="keep the demo's files here (default: a temporary folder)")
    demo.set_defaults(run=_demo)

    bench = commands.add_parser("bench", help="time and memory over prompt length, response length, G and mode")
    _add_run_options(bench)
    bench.add_argument("--ranks", type=_positive, required=True, help="ranks of this machine that each point gets")
    bench.add_argument("--prompt-tokens", type=_positives, required=True, metavar="P,P,...", help="prompt lengths")
    bench.add_argument("--response-tokens", type=_positives, default=[128], metavar="R,R,...", help="default: 128")
    bench.add_argument("--responses", type=_positives, default=[2], metavar="G,G,...", help="per group; default: 2")
    bench.add_argument("--modes", type=_modes, default=list(MODES), metavar="M,M,...", help=", ".join(MODES))
    bench.add_argument("--repeats", type=_positive, default=1, help="timed steps of a point; the fastest counts")
    bench.add_argument("--no-flops", action="store_true", help="don't count FLOPs, which takes a step a point")
    bench.add_argument("--longest", action="store_true", help="instead: find the longest prompt that fits, from P on")
    bench.add_argument("--memory-limit-gib", type=_above_zero, metavar="X", help="of a rank, with --longest")
    bench.add_argument("--output", type=Path, required=True, help="folder for points.csv and pictures")
    bench.set_defaults(run=_bench)

    point = commands.add_parser("bench-point")  # what bench starts under torchrun; no help, so not listed
    _add_run_options(point)
    point.add_argument("--result", type=Path, required=True)
    point.add_argument("--mode", choices=MODES, required=True)
    for name in ("prompt-tokens", "response-tokens", "responses", "repeats"):
        point.add_argument(f"--{name}", type=_positive, required=True)
    point.add_argument("--probe", action="store_true")
    point.add_argument("--no-flops", action="store_true")
    point.add_argument("--memory-limit-gib", type=_above_zero)
    point.set_defaults(run=_bench_point)
    return parser


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, help="run configuration (YAML)")
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, help="seed")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], help="dtype")
    for name in ("tp", "pp", "vpp", "ep"):
        parser.add_argument(f"--{name}", type=_positive, metavar="N", help=f"parallel.{name}")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any setting, by its dotted name; repeatable"
    )


def _add_rollout_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rollouts", type=Path, required=True, help="rollout groups (JSONL)")
    parser.add_argument("--max-prompt-tokens", type=_positive, metavar="N", help="keep the last N tokens of prompts")
    parser.add_argument("--prompt-gradient", choices=["exact", "detached"], help="schedule.prompt_gradient")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs an integer >= 1, got {text!r}")
    return int(text)


def _positives(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= 1 for part in parts) or len(set(map(int, parts))) < len(parts):
        raise argparse.ArgumentTypeError(f"needs different integers >= 1 with commas between, got {text!r}")
    return [int(part) for part in parts]


def _modes(text: str) -> list[str]:
    parts = text.split(",")
    if not set(parts) <= set(MODES) or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"needs some of {','.join(MODES)} with commas between, got {text!r}")
    return parts


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"needs a number > 0, got {text!r}")
    return value


_OVERRIDES = {
    "seed": "seed",
    "dtype": "dtype",
    "prompt_gradient": "schedule.prompt_gradient",
    "max_prompt_tokens": "data.max_prompt_tokens",
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "vpp": "parallel.vpp",
    "ep": "parallel.ep",
}


def load_run(options: argparse.Namespace) -> RunConfig:
    """The run configuration of a command's options; ConfigError where it can't be used."""
    overrides, sources = [parse_override(text) for text in options.set], {}
    for option, key in _OVERRIDES.items():
        value = getattr(options, option, None)
        if value is not None:
            overrides.append((key, value))
            sources[key] = f"--{option.replace('_', '-')}"
    return load_config(options.config, overrides, sources)


def _start(options: argparse.Namespace) -> tuple[RunConfig, Any]:
    """Joins the ranks, reads the configuration, and lays Megatron's groups out; fails on all ranks together."""
    import torch.distributed as dist

    from megatron_longstraw import distributed
    from megatron_longstraw.doctor import check_run

    distributed.quiet()
    device = distributed.start()
    with distributed.together(ConfigError):
        run = load_run(options)
        kernels = check_run(run, dist.get_world_size())
    distributed.initialize_model_parallel(run.parallel)
    if dist.get_rank() == 0:
        print(_what_runs(run, kernels, dist.get_world_size(), dist.get_backend()), flush=True)
    return run, device


def _what_runs(run: RunConfig, kernels: dict[str, str], ranks: int, transport: str) -> str:
    parallel = run.parallel
    backend, delta_rule = kernels["layers"], kernels.get("delta rule")
    interleaved = f" (interleaved x {parallel.vpp})" if parallel.vpp else ""
    untested = " (Megatron's provider; not tested by this project yet)" if backend == "transformer_engine" else ""
    return (
        f"{ranks} ranks ({transport}): tp {parallel.tp} x pp {parallel.pp}{interleaved} "
        f"x dp {ranks // (parallel.tp * parallel.pp)}, ep {parallel.ep}; {run.dtype}; layers: {backend}{untested}; "
        f"{f'delta rule: {delta_rule}; ' if delta_rule else ''}prompt gradient: {run.schedule.prompt_gradient}"
    )


def _train(options: argparse.Namespace) -> int:
    run, device = _start(options)
    from megatron_longstraw.trainer import train

    ended_by = train(run, options.rollouts, options.output, options.steps, device)
    return _leave(0 if ended_by is None else 128 + ended_by)


def _compare(options: argparse.Namespace) -> int:
    run, device = _start(options)
    import torch.distributed as dist

    from megatron_longstraw import compare
    from megatron_longstraw.distributed import together
    from megatron_longstraw.trainer import run_reader

    with together(ValueError, OSError):
        groups = list(itertools.islice(run_reader(run, options.rollouts)(), options.limit))
        _check_result_file(options)
    head = {"config": dataclasses.asdict(run), "stock_attention": options.stock_attention}
    entries: list[dict[str, Any]] = []

    def show(entry: dict[str, Any]) -> None:
        if dist.get_rank() != 0:
            return
        if not entries:
            print(compare.TABLE_HEAD, "-" * len(compare.TABLE_HEAD), sep="\n")
        print(compare.table_row(entry), flush=True)
        entries.append(entry)
        _write_json(options.json, {**head, "world_size": dist.get_world_size(), "groups": entries, "all": None})

    result = compare.compare(run, groups, device, plain_attention=options.stock_attention, on_group=show)
    if dist.get_rank() == 0:
        _write_json(options.json, {**head, **result})
        print(compare.verdict(run, result), f"wrote {options.json}", sep="\n", flush=True)
    return _leave(0 if result["passed"] else 1)


def _check_result_file(options: argparse.Namespace) -> None:
    """Before hours of work: the result can be written, and over no input."""
    if any(options.json.exists() and options.json.samefile(path) for path in (options.rollouts, options.config)):
        raise ConfigError(f"--json {options.json}: is an input of this command; name another file")
    try:
        options.json.open("a").close()
    except OSError as error:
        raise ConfigError(f"--json {options.json}: can't be written: {error.strerror}") from error


def _write_json(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(_finite(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """The same with null in place of numbers that are not finite, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _doctor(options: argparse.Namespace) -> int:
    if options.config is None and (options.set or any(getattr(options, name, None) is not None for name in _OVERRIDES)):
        raise ConfigError("doctor: settings change what --config FILE says; name the file")
    for option, value in (("--world-size", options.world_size), ("--nnodes", options.nnodes)):
        if options.config is None and value is not None:
            raise ConfigError(f"doctor: {option}={value} is of the run that --config FILE says; name the file")
    from megatron_longstraw.distributed import quiet

    quiet()
    from megatron_longstraw.doctor import doctor

    load = None if options.config is None else lambda: load_run(options)
    return doctor(load, options.world_size, options.nnodes)


def _demo(options: argparse.Namespace) -> int:
    from megatron_longstraw.demo import demo

    return _until_signal(lambda: demo(options.output))


def _bench(options: argparse.Namespace) -> int:
    run = load_run(options)
    _check_bench(options)
    import torch

    from megatron_longstraw.distributed import check_world_size

    check_world_size(run.parallel, options.ranks)
    gpus = torch.cuda.device_count()
    if gpus and options.ranks > gpus:
        raise ConfigError(f"--ranks {options.ranks}: this machine has {gpus} GPUs; needs at most one rank a GPU")
    sweep = Sweep(
        run=run,
        ranks=options.ranks,
        output=options.output,
        prompt_tokens=options.prompt_tokens,
        response_tokens=options.response_tokens,
        responses=options.responses,
        modes=options.modes,
        repeats=options.repeats,
        flops=not options.no_flops,
        memory_limit_gib=options.memory_limit_gib,
        gpu=gpus > 0,
    )
    left = f": what was measured is in {options.output}; the same command goes on"
    return _until_signal(lambda: _longest(sweep) if options.longest else _bench_points(sweep), left)


def _until_signal(command: Callable[[], int], left: str = "") -> int:
    """The status of a command that starts children; where a signal ended it, that is said, with what is left."""
    try:
        with signals_end_the_command():
            return command()
    except EndedBySignal as end:
        print(f"{end}{left}", flush=True)
        return 128 + end.number


def _bench_points(sweep: Sweep) -> int:
    rows = bench(sweep)
    print(*(f"wrote {path}" for path in draw(rows, sweep.output)), sep="\n", flush=True)
    failed = sum(bool(row["error"]) for row in rows)
    if failed:
        print(f"{failed} of {len(rows)} points failed: see their error and {sweep.output / 'logs'}", flush=True)
    return 1 if failed else 0


def _longest(sweep: Sweep) -> int:
    if not sweep.gpu and sweep.memory_limit_gib is None:
        raise ConfigError("--longest on the CPU needs --memory-limit-gib: counted bytes are held against it")
    longest(sweep)
    return 0


def _check_bench(options: argparse.Namespace) -> None:
    if not options.longest:
        if options.memory_limit_gib is not None:
            raise ConfigError("--memory-limit-gib needs --longest")
        return
    for name in ("prompt_tokens", "response_tokens", "responses"):
        values = getattr(options, name)
        if len(values) > 1:
            raise ConfigError(f"--{name.replace('_', '-')} {values}: --longest takes one number")


def _bench_point(options: argparse.Namespace) -> int:
    try:
        # what other processes have of the GPU: to be asked before this one has a context there
        import torch

        from megatron_longstraw.measure import device_bytes

        before = device_bytes(int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else None
        run, device = _start(options)
        from megatron_longstraw.bench_point import PointOptions, measure_point

        shape = {name: getattr(options, name) for name in Point._fields}
        point = PointOptions(
            **shape,
            repeats=options.repeats,
            flops=not options.no_flops,
            probe=options.probe,
            memory_limit_gib=options.memory_limit_gib,
        )
        measure_point(run, point, device, options.result, before)
    except Exception as error:
        if not isinstance(error, _peer_errors()):  # the rank that failed tells
            tell_failure(options.result, error)
        raise
    _leave(0)
    sys.stdout.flush()
    os._exit(0)  # taking Megatron and CUDA down in order takes longer than many a point


def _leave(status: int) -> int:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    return status


def _user_errors() -> tuple[type[BaseException], ...]:
    from megatron_longstraw.rollouts import RolloutError

    errors: list[type[BaseException]] = [ConfigError, RolloutError, OSError]
    if "torch" in sys.modules:
        from megatron_longstraw.measure import NonFiniteGradientError

        errors.append(NonFiniteGradientError)
    return tuple(errors)


def _peer_errors() -> tuple[type[BaseException], ...]:
    if "torch" not in sys.modules:
        return ()
    from megatron_longstraw.distributed import PeerError

    return (PeerError,)
