"""The benchmark: a sweep over prompt length, response length, G and mode, each point on ranks of its own.

    DIR/config.yaml     the run, with all overrides; a folder with another one is refused
    DIR/points.csv      a line a point, written as soon as it is measured
    DIR/longest.csv     the same for the probes of --longest (longest-0.5GiB.csv: of a GPU held to that limit)
    DIR/logs/           what each point's ranks printed
    DIR/R<n>.png        time against G, peak bytes against G and against P, for responses of n tokens

Modes are "stock" (Megatron's schedule with full recomputation, the one others are compared with),
"stock-no-recompute", "detached" and "exact" (ours). A point that fails is a line with an error, and the sweep goes
on. A point whose line is there already is not run again: a sweep that was cut off goes on where it was.

The FLOP bound of a mode is the time that it would take at the FLOP/s of the stock schedule with full recomputation:
seconds(stock) * flops(mode) / flops(stock).
"""

import contextlib
import csv
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_longstraw.child import run_child, torchrun
from megatron_longstraw.config import ConfigError, RunConfig

MODES = ("stock", "stock-no-recompute", "detached", "exact")
_REFERENCE = "stock"

_KEYS = ("mode", "prompt_tokens", "response_tokens", "responses")
_NUMBERS = (
    "seconds",
    "capture_seconds",
    "replay_seconds",
    "prompt_backward_seconds",
    "peak_bytes",
    "nvml_bytes",
    "state_bytes",
    "state_gradient_bytes",
    "flops",
    "tokens_per_second",
    "loss",
)
COLUMNS = (*_KEYS, "ranks", "tp", "pp", "dtype", "architecture", "repeats", *_NUMBERS, "error")

_HEAD = "# ranks: "
"""How config.yaml begins."""

Row = Mapping[str, Any]
"""Column -> value; None where the CSV file has nothing."""


class Point(NamedTuple):
    """What one line of the CSV file is of."""

    mode: str
    prompt_tokens: int
    response_tokens: int
    responses: int

    def __str__(self) -> str:
        return f"{self.mode} P={self.prompt_tokens:,} R={self.response_tokens:,} G={self.responses}"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a benchmark runs.

    Args:
        run: the run configuration.
        ranks: started for each point.
        output: the folder.
        prompt_tokens, response_tokens, responses, modes: each point is one of each.
        repeats: timed steps of a point; the fastest counts.
        flops: whether to count FLOPs, in a step of their own.
        memory_limit_gib: of a rank, for `longest`.
        gpu: ranks have a GPU each, whose allocator holds them to the limit; on the CPU counted bytes are compared.
    """

    run: RunConfig
    ranks: int
    output: Path
    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    responses: Sequence[int]
    modes: Sequence[str]
    repeats: int = 1
    flops: bool = True
    memory_limit_gib: float | None = None
    gpu: bool = False

    def points(self) -> list[Point]:
        """All points; the modes of a shape one after the other, so that ratios are there early."""
        shapes = itertools.product(self.prompt_tokens, self.response_tokens, self.responses)
        return [Point(mode, *shape) for shape in shapes for mode in self.modes]


Measure = Callable[[Sweep, Point, bool], dict[str, Any]]


def bench(sweep: Sweep) -> list[Row]:
    """Measures every point that has no line yet, prints each, then the ratios; returns the lines of all its points.

    Raises:
        ConfigError: the output folder holds something else, or the ranks refuse the configuration.
    """
    prepare_output(sweep)
    table = Table(sweep.output / "points.csv")
    points = sweep.points()
    known = sum(point in table.rows for point in points)
    if known:
        print(f"{known} of {len(points)} points are in {table.path} already, and stay as they are", flush=True)
    for index, point in enumerate(points, 1):
        if point not in table.rows:
            print(f"{index}/{len(points)} {point} ...", flush=True)
            table.add(point, _row(sweep, point, measure_in_fresh_ranks(sweep, point, probe=False)))
            print("  " + _line(table.rows[point]), flush=True)
    rows = [table.rows[point] for point in points]
    print("\n".join(["", *ratio_lines(rows), "", f"wrote {table.path}"]), flush=True)
    return rows


def longest(sweep: Sweep, measure: Callable[..., dict[str, Any]] | None = None) -> dict[str, tuple[int, int]]:
    """The longest prompt that fits, to one prompt chunk, for each mode; by doubling and bisection.

    Starts at the first of the sweep's prompt lengths, rounded up to prompt chunks; takes the first of the others.

    Args:
        sweep: what is run; with a memory limit on the CPU.
        measure: measures a point; by default `measure_in_fresh_ranks`.

    Returns:
        mode -> (the longest prompt that fits, 0 where none does; the shortest one tried that does not).

    Raises:
        ConfigError: as `bench`; or a probe failed for another reason than memory.
    """
    prepare_output(sweep)
    measure = measure or measure_in_fresh_ranks
    held = sweep.gpu and sweep.memory_limit_gib is not None  # a probe under another limit says nothing of this one
    name = f"longest-{sweep.memory_limit_gib}GiB.csv".replace(".0GiB", "GiB") if held else "longest.csv"
    table = Table(sweep.output / name)
    chunk = sweep.run.schedule.prompt_chunk_tokens

    def fits(mode: str, chunks: int) -> bool:
        point = Point(mode, chunks * chunk, sweep.response_tokens[0], sweep.responses[0])
        if point not in table.rows:
            print(f"{point} ...", flush=True)
            table.add(point, _row(sweep, point, measure(sweep, point, probe=True)))
            print("  " + _line(table.rows[point]), flush=True)
        error = table.rows[point]["error"]
        if error and not _out_of_memory(error):
            raise ConfigError(f"{point}: can't tell whether it fits: {error}; see {sweep.output / 'logs'}")
        within = _fits(sweep, table.rows[point])
        print(f"{point} {'fits' if within else 'does not fit'}", flush=True)
        return within

    found = {}
    for mode in sweep.modes:
        start = -(-sweep.prompt_tokens[0] // chunk)
        chunks, over = bisect(functools.partial(fits, mode), start)
        found[mode] = chunks * chunk, over * chunk
    print("\n".join(["", *_longest_lines(sweep, found), f"wrote {table.path}"]), flush=True)
    return found


def _fits(sweep: Sweep, row: Row) -> bool:
    """Whether a probe that ran, or ran out of memory, is within the sweep's limit, whatever it was under then."""
    if sweep.gpu or sweep.memory_limit_gib is None or row["peak_bytes"] is None:
        return not row["error"]
    return bool(row["peak_bytes"] <= sweep.memory_limit_gib * 2**30)


def _out_of_memory(error: str) -> bool:
    return error.startswith("OutOfMemory") or any(text in error for text in ("out of memory", "_ALLOC_FAILED"))


def bisect(fits: Callable[[int], bool], start: int) -> tuple[int, int]:
    """The largest n >= 1 that fits (0 where none does) and n + 1, which does not; what fits, fits with fewer.

    Doubles or halves from `start`, then bisects.
    """
    if fits(start):
        low, high = start, 2 * start
        while fits(high):
            low, high = high, 2 * high
    else:
        low, high = start // 2, start
        while low and not fits(low):
            low, high = low // 2, low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high


class Table:
    """A CSV file of points; lines are added at its end and never changed.

    Args:
        path: the file; made with the first line.

    Raises:
        ConfigError: the file has other columns, or a line that was cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[Point, Row] = {}
        if path.exists():
            self._read()

    def add(self, point: Point, row: Row) -> None:
        """Writes a point's line, at once."""
        new = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(row)
        self.rows[point] = row

    def _read(self) -> None:
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ConfigError(f"{self.path}: needs the columns {','.join(COLUMNS)}; name another folder")
            for row in reader:
                try:
                    parsed = _parsed(row)
                except (ValueError, TypeError) as error:
                    message = f"{self.path}:{reader.line_num}: not a line of a benchmark ({error}); delete it"
                    raise ConfigError(message) from error
                self.rows[Point(*(parsed[key] for key in _KEYS))] = parsed


def _parsed(row: Mapping[str, str]) -> Row:
    """A line's values: numbers where they are, None where nothing is."""
    texts = ("mode", "dtype", "architecture", "error")
    floats = ("tokens_per_second", "loss")
    values: dict[str, Any] = {}
    for name in COLUMNS:
        text = row[name]
        if text is None or None in row:
            raise ValueError(f"needs {len(COLUMNS)} values")
        if name in texts:
            values[name] = text
        elif name in floats or name.endswith("seconds"):
            values[name] = float(text) if text else None
        else:
            values[name] = int(text) if text or name in _KEYS else None
    if values["mode"] not in MODES:
        raise ValueError(f"mode {values['mode']!r}")
    return values


def prepare_output(sweep: Sweep) -> None:
    """Makes the output folder, or takes the one of a sweep of the same run, or of one that measured nothing.

    Raises:
        ConfigError: the folder holds something else, or can't be written.
    """
    output, config = sweep.output, sweep.output / "config.yaml"
    text = f"{_HEAD}{sweep.ranks}\n" + yaml.safe_dump(_plain(dataclasses.asdict(sweep.run)), sort_keys=False)
    try:
        found = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else text
        unused = found.startswith(_HEAD) and not any(output.glob("*.csv"))  # of a run that was refused
        if found != text and not unused:
            raise ConfigError(
                f"--output {output}: holds a benchmark of another run or other ranks; name another folder"
            )
        if output.exists() and not config.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(f"--output {output}: holds something else; name another folder, or an empty one")
        (output / "logs").mkdir(parents=True, exist_ok=True)
        config.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: can't be written: {error.strerror}") from error


def _plain(value: Any) -> Any:
    """Dictionaries, lists and scalars only, as YAML has them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def measure_in_fresh_ranks(sweep: Sweep, point: Point, *, probe: bool) -> dict[str, Any]:
    """Starts ranks for one point and waits for them.

    Args:
        sweep: what the point is of.
        point: what is run.
        probe: one step for its bytes, under the sweep's memory limit; nothing is timed.

    Returns:
        The columns that were measured, and "error" where something failed.

    Raises:
        ConfigError: a rank refused the configuration: no point of the sweep would run.
        EndedBySignal: SIGINT, SIGTERM or SIGHUP came; the ranks have ended.
    """
    name = f"{point.mode}-P{point.prompt_tokens}-R{point.response_tokens}-G{point.responses}"
    name += "-probe" if probe else ""
    logs = sweep.output / "logs"
    result, failure, log = (logs / f"{name}.{ending}" for ending in ("json", "error", "log"))
    for stale in (result, failure):
        stale.unlink(missing_ok=True)
    command = torchrun(sweep.ranks, "bench-point", "--config", str(sweep.output / "config.yaml"))
    command += ["--result", str(result), "--repeats", str(sweep.repeats), "--mode", point.mode]
    for key in _KEYS[1:]:
        command += ["--" + key.replace("_", "-"), str(getattr(point, key))]
    command += [] if sweep.flops else ["--no-flops"]
    if probe:
        command += ["--probe"]
        command += [] if sweep.memory_limit_gib is None else ["--memory-limit-gib", str(sweep.memory_limit_gib)]
    with log.open("w", encoding="utf-8") as screen:
        status = run_child(command, screen)
    row: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if failure.exists() and (text := failure.read_text(encoding="utf-8")):  # empty: ended before it could tell
        told = json.loads(text)
        if told["kind"] == ConfigError.__name__:
            raise ConfigError(told["text"])
        row["error"] = f"{told['kind']}: {told['text']}"
    elif status:
        row["error"] = f"the ranks ended with status {status}: see {log}"
    return row


def tell_failure(result: Path, error: Exception) -> None:
    """Leaves a rank's error where `measure_in_fresh_ranks` finds it; the first rank that fails is the one that tells.

    Other ranks may wait for it in a collective until torchrun ends them, or fail because it has left.
    """
    text = str(error).strip().partition("\n")[0]
    told = json.dumps({"kind": type(error).__name__, "text": text}).encode()
    with contextlib.suppress(FileExistsError), result.with_suffix(".error").open("xb", buffering=0) as file:
        file.write(told)  # at once: the other ranks' end may be this one's


def _row(sweep: Sweep, point: Point, measured: Row) -> dict[str, Any]:
    run = sweep.run
    return {
        **dict.fromkeys(COLUMNS),
        **point._asdict(),
        "ranks": sweep.ranks,
        "tp": run.parallel.tp,
        "pp": run.parallel.pp,
        "dtype": run.dtype,
        "architecture": run.model.architecture,
        "repeats": sweep.repeats,
        "error": "",
        **measured,
    }


@dataclass(frozen=True)
class Ratios:
    """A point beside the stock schedule with full recomputation at the same shape.

    Attributes:
        faster: seconds(stock) / seconds.
        smaller: peak_bytes(stock) / peak_bytes.
        bound: least seconds at the FLOP/s of stock.
        of_bound: seconds / bound.
    """

    faster: float | None
    smaller: float | None
    bound: float | None
    of_bound: float | None


def ratios(row: Row, stock: Row) -> Ratios:
    """What a line is against the stock schedule's; None where one of the two lacks a number."""
    faster = _quotient(stock["seconds"], row["seconds"])
    share = _quotient(row["flops"], stock["flops"])
    bound = None if share is None or stock["seconds"] is None else stock["seconds"] * share
    return Ratios(faster, _quotient(stock["peak_bytes"], row["peak_bytes"]), bound, _quotient(row["seconds"], bound))


def stock_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The stock schedule's line of the same shape."""
    same = (r for r in rows if r["mode"] == _REFERENCE and all(r[key] == row[key] for key in _KEYS[1:]))
    return next(same, None)


def _quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


_RATIO_HEAD = (
    f"{'P':>9} {'R':>6} {'G':>4}  {'mode':18} {'seconds':>9} {'x faster':>9} {'of FLOP bound':>13} "
    f"{'peak MiB':>10} {'x less':>7}  error"
)


def ratio_lines(rows: Sequence[Row]) -> list[str]:
    """A table of the points and what they are against stock with full recomputation, and how peaks grow with G."""
    lines = [_RATIO_HEAD, "-" * len(_RATIO_HEAD)]
    for row in rows:
        stock = stock_of(row, rows)
        ratio = ratios(row, stock) if stock is not None else Ratios(None, None, None, None)
        peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
        line = (
            f"{row['prompt_tokens']:9,} {row['response_tokens']:6,} {row['responses']:4}  {row['mode']:18} "
            f"{_shown(row['seconds'], '9.2f')} {_shown(ratio.faster, '9.2f')} {_shown(ratio.of_bound, '13.2f')} "
            f"{_shown(peak, '10,.1f')} {_shown(ratio.smaller, '7.2f')}  {row['error']}"
        )
        lines.append(line.rstrip())
    return [*lines, *_growth_lines(rows)]


def _growth_lines(rows: Sequence[Row]) -> Iterator[str]:
    """How many more peak bytes the most responses take than the fewest."""
    measured = [row for row in rows if row["peak_bytes"] is not None]
    shapes = dict.fromkeys((row["mode"], row["prompt_tokens"], row["response_tokens"]) for row in measured)
    for mode, prompt, response in shapes:
        same = [
            r for r in measured if (r["mode"], r["prompt_tokens"], r["response_tokens"]) == (mode, prompt, response)
        ]
        few, many = (pick(same, key=lambda row: row["responses"]) for pick in (min, max))
        if few is not many:
            growth = many["peak_bytes"] - few["peak_bytes"]
            yield (
                f"{mode}, P={prompt:,}, R={response:,}: peak bytes with G={many['responses']} against "
                f"G={few['responses']}: {growth:+,} ({growth / few['peak_bytes']:+.3%})"
            )


def _longest_lines(sweep: Sweep, found: Mapping[str, tuple[int, int]]) -> list[str]:
    shape = f"R={sweep.response_tokens[0]:,}, G={sweep.responses[0]}"
    limit = "the GPU's memory" if sweep.memory_limit_gib is None else f"{sweep.memory_limit_gib:g} GiB a rank"
    lines = [f"longest prompt within {limit} ({shape}), to {sweep.run.schedule.prompt_chunk_tokens:,} tokens:"]
    stock = found.get(_REFERENCE, (0, 0))[0]
    for mode, (tokens, over) in found.items():
        against = f"   {tokens / stock:.2f} x stock" if stock and mode != _REFERENCE else ""
        lines.append(f"  {mode:18} {tokens:12,}   (not {over:,}){against}")
    return lines


def _line(row: Row) -> str:
    peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
    numbers = f"{_shown(row['seconds'], '.2f')} s, peak {_shown(peak, ',.1f')} MiB, loss {_shown(row['loss'], '+.6f')}"
    return f"{numbers}  {row['error']}".rstrip()


def _shown(value: float | None, form: str) -> str:
    if value is not None:
        return f"{value:{form}}"
    return "-".rjust(int(form.partition(".")[0].strip("+,") or 1))
