"""The demo: real GRPO groups on this machine's CPU, trained, then compared with the stock schedule.

Groups are made on the spot from English text that every Python carries (`pydoc_data.topics`): a prompt is a long
piece of the Python reference, its responses are the text that really follows (reward 1) and pieces from elsewhere.
"""

import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from megatron_longstraw.child import run_child, torchrun
from megatron_longstraw.config import ConfigError

_CONFIG = Path(__file__).resolve().parents[1] / "examples" / "dense" / "tiny.yaml"
_RANKS = 2
_STEPS = 3
_PROMPT_BYTES = 8400
_RESPONSES = 8


def demo(output: Path | None) -> int:
    """Trains three steps, compares one group, prints what came out; returns the exit status."""
    if not _CONFIG.is_file():
        raise ConfigError(f"the demo needs a checkout of the project: {_CONFIG} is not there")
    with tempfile.TemporaryDirectory() as temporary:
        folder = output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rollouts, result = folder / "rollouts.jsonl", folder / "compare.json"
        rollouts.write_text("".join(json.dumps(group) + "\n" for group in demo_groups(_STEPS)), encoding="utf-8")
        print(
            f"== {_STEPS} GRPO steps: one group a step, {_RESPONSES} responses to a prompt of {_PROMPT_BYTES:,} bytes"
        )
        inputs = ["--config", str(_CONFIG), "--rollouts", str(rollouts)]
        status = _torchrun("train", *inputs, "--output", str(folder / "run"))
        if status == 0:
            print("\n== One group, by the stock schedule and by ours, from the same weights")
            status = _torchrun("compare", *inputs, "--limit", "1", "--json", str(result))
        if status == 0:
            print("\n" + _summary(json.loads(result.read_text(encoding="utf-8"))))
        return status


def demo_groups(
    count: int, *, prompt_bytes: int = _PROMPT_BYTES, responses: int = _RESPONSES
) -> Iterator[dict[str, Any]]:
    """Rollout groups in the form of the rollout file, the same each time."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace").decode()
    draw = random.Random(0)
    for index in range(count):
        start = draw.randrange(len(text) - prompt_bytes - 400)
        end = start + prompt_bytes
        group: list[dict[str, Any]] = []
        for response in range(responses):
            length = draw.randrange(60, 240)
            place = end if response == 0 else draw.randrange(len(text) - length)
            reward = 1.0 if response == 0 else draw.choice([0.0, 0.25])
            group.append({"text": text[place : place + length], "reward": reward})
        yield {"group_id": f"python-reference-{index}", "prompt": text[start:end], "responses": group}


def _torchrun(*arguments: str) -> int:
    # CPU ranks also on a machine with GPUs: two ranks can't share one over NCCL
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return run_child(torchrun(_RANKS, *arguments), environment=environment)


def _summary(result: dict[str, Any]) -> str:
    """The comparison in the words of a newcomer."""
    entry = result["groups"][0]
    loss, peak, seconds, gradient = entry["loss"], entry["peak_bytes"], entry["seconds"], entry["grad"]
    mebibytes = {name: f"{value / 2**20:,.0f} MiB" for name, value in peak.items()}
    rows = [
        ("", "stock schedule", "longstraw", ""),
        ("loss", f"{loss['stock']:+.7f}", f"{loss['longstraw']:+.7f}", ""),
        ("gradient", "the reference", f"{gradient['relative_l2']:.1e} apart", "relative L2, all parameters and ranks"),
        (
            "peak memory",
            mebibytes["stock"],
            mebibytes["longstraw"],
            f"{peak['stock'] / peak['longstraw']:.1f} x less, per rank",
        ),
        (
            "time",
            f"{seconds['stock']:.1f} s",
            f"{seconds['longstraw']:.1f} s",
            f"{seconds['stock'] / seconds['longstraw']:.1f} x faster",
        ),
    ]
    title = (
        f"{len(entry['response_tokens'])} responses to one prompt of {entry['prompt_tokens']:,} tokens, "
        f"{result['world_size']} ranks:"
    )
    return "\n".join([title, *(f"  {a:12} {b:>16} {c:>16}   {d}".rstrip() for a, b, c, d in rows)])
