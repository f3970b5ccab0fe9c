"""A child process, such as torchrun, that does not outlive the command that started it.

SIGINT, SIGTERM and SIGHUP become `EndedBySignal`; while a child runs they end it first. A signal that was ignored when
the command started (nohup, a shell's background job) stays ignored.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 60.0
"""Seconds for the child to end its own children; torchrun gives its ranks 30 before it kills them."""


class EndedBySignal(Exception):
    """A signal asked the command to end, and its child has ended. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"{signal.Signals(number).name} ended it")


@contextlib.contextmanager
def signals_end_the_command() -> Iterator[None]:
    """While entered, a signal raises `EndedBySignal` wherever the main thread is."""

    def end(number: int, frame: FrameType | None) -> None:
        raise EndedBySignal(number)

    with _handled_by(end):
        yield


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """The command that runs ``python -m megatron_longstraw`` with these arguments on ranks of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*command, "-m", "megatron_longstraw", *arguments]


def run_child(
    command: Sequence[str], screen: IO[Any] | None = None, environment: Mapping[str, str] | None = None
) -> int:
    """Runs a command in a session of its own to its end, and returns its exit status.

    A signal to this process is handed to the child's group once, however often it comes: a second one would keep
    torchrun from ending its ranks, which are in sessions of their own.

    Args:
        command: the program and its arguments.
        screen: an open file that gets all that it writes; None leaves it to this process's own.
        environment: of the child; None is this process's.

    Raises:
        EndedBySignal: after the child's end.
    """
    got: list[int] = []
    with _handled_by(lambda number, frame: got.append(number)):  # raising could lose the child that is just starting
        errors = None if screen is None else subprocess.STDOUT
        child = subprocess.Popen(command, stdout=screen, stderr=errors, env=environment, start_new_session=True)
        while not got:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=0.5)
        _end(child)
        raise EndedBySignal(got[0])


def _end(child: subprocess.Popen[Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_PATIENCE)
            return


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number in _SIGNALS:
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number in _SIGNALS:
            signal.signal(number, before[number])
