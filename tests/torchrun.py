"""The command line under torchrun, on CPU ranks."""

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

from megatron_longstraw import child

ROOT = Path(__file__).resolve().parents[1]


def torchrun(ranks: int, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m megatron_longstraw`` on ranks of this machine, from the checkout.

    Args:
        ranks: number of ranks.
        arguments: of the command.
        options: of subprocess.run.
    """
    command, environment = _command(ranks, *arguments)
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, **options)


def start_torchrun(ranks: int, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """The same, without waiting for its end; options are of subprocess.Popen."""
    command, environment = _command(ranks, *arguments)
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **options)


def drop_override() -> None:
    """Before exec in a child: root then needs the permissions that others need, for its own files too."""
    drop_from_bounding_set, override, read_search = 24, 1, 2  # PR_CAPBSET_DROP, CAP_DAC_* of Linux
    for capability in (override, read_search):
        ctypes.CDLL(None).prctl(drop_from_bounding_set, capability)


def _command(ranks: int, *arguments: Any) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return child.torchrun(ranks, *map(str, arguments)), environment
