"""The picture of a benchmark: seconds and peak bytes against G for each prompt length, and both against P."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_longstraw.bench import MODES, Row, ratios, stock_of
from megatron_longstraw.config import ConfigError

_COLOURS = dict(zip(MODES, ("tab:gray", "tab:brown", "tab:blue", "tab:red"), strict=True))


def draw(rows: Sequence[Row], output: Path) -> list[Path]:
    """Draws one picture for each response length; points without a number are left out.

    Args:
        rows: lines of a benchmark.
        output: the folder for ``R<n>.png``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"the picture needs matplotlib ({error}): install it and run this again") from error

    paths = []
    for response_tokens in dict.fromkeys(row["response_tokens"] for row in rows):
        same = [row for row in rows if row["response_tokens"] == response_tokens]
        prompts = sorted({row["prompt_tokens"] for row in same})
        most = max(row["responses"] for row in same)
        figure = Figure(figsize=(4.2 * (len(prompts) + 1), 8), layout="constrained")
        axes = figure.subplots(2, len(prompts) + 1, squeeze=False)
        for column, prompt in enumerate(prompts):
            of_prompt = [row for row in same if row["prompt_tokens"] == prompt]
            _column(axes[:, column], of_prompt, rows, "responses", "G", f"P = {prompt:,}")
        of_most = [row for row in same if row["responses"] == most]
        _column(axes[:, -1], of_most, rows, "prompt_tokens", "P", f"G = {most}")
        for axis in axes[:, -1]:
            axis.set_xscale("log", base=2)
            axis.set_xticks(prompts, [f"{prompt:,}" for prompt in prompts])
            axis.set_xlim(prompts[0] / 1.1, prompts[-1] * 1.1)  # where all points failed there are no others
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
        first = same[0]
        figure.suptitle(
            f"{first['architecture']}, {first['dtype']}, {first['ranks']} ranks (tp {first['tp']} x pp {first['pp']}), "
            f"responses of {response_tokens:,} tokens"
        )
        paths.append(output / f"R{response_tokens}.png")
        figure.savefig(paths[-1], dpi=130)
    return paths


def _column(axes: Any, some: Sequence[Row], rows: Sequence[Row], x: str, label: str, title: str) -> None:
    """Seconds (above, with the FLOP bound) and peak bytes (below) of some lines against a column."""
    time, memory = axes
    for mode in MODES:
        lines = sorted((row for row in some if row["mode"] == mode), key=lambda row: row[x])
        style = {"color": _COLOURS[mode], "label": mode, "marker": "o", "markersize": 4}
        for axis, name, unit in ((time, "seconds", 1), (memory, "peak_bytes", 2**30)):
            there = [(row[x], row[name] / unit) for row in lines if row[name] is not None]
            if there:
                axis.plot(*zip(*there, strict=True), **style)
        stocks = [(row, stock_of(row, rows)) for row in lines if mode != "stock"]
        bounds = [(row[x], ratios(row, stock).bound) for row, stock in stocks if stock is not None]
        there = [(at, bound) for at, bound in bounds if bound is not None]
        if there:
            time.plot(*zip(*there, strict=True), color=_COLOURS[mode], linestyle=":", label=f"{mode}: FLOP bound")
    time.set_title(title)
    for axis, name in ((time, "seconds"), (memory, "peak GiB of a rank")):
        axis.set_xticks(sorted({row[x] for row in some}))
        axis.set_xlabel(label)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
