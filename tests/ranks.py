"""Real gloo ranks for tests: started once per world size and test run, laid out anew for each layout.

What this does not exercise: NCCL, CUDA streams, more than one machine.
"""

import contextlib
import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parallel layout; `dp` is what is left of the world, so the world has tp * pp * dp ranks."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    dp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        names = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp or 1, "dp": self.dp, "ep": self.ep}
        return "-".join(f"{name}{size}" for name, size in names.items() if size > 1) or "tp1"


class RankError(AssertionError):
    """A test body raised on some rank."""


class Ranks:
    """Pools of rank processes, one pool per world size, started at first use.

    Args:
        device: "cpu" (gloo), or "cuda" (NCCL, a GPU a rank).
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._pools: dict[int, _Pool] = {}

    def run(self, layout: Layout, body: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
        """Runs `body(*args)` on every rank of a layout; returns what each returned, by rank.

        Args:
            layout: the parallel layout that Megatron's parallel_state is set up with.
            body: a function of a test module (sent by name); what it returns must be picklable.
            timeout: seconds after which the ranks are taken to hang, and are ended.

        Raises:
            RankError: with the traceback of each rank that raised, or the names of those that hang.
        """
        pool = self._pools.get(layout.world_size)
        if pool is None or pool.broken:
            pool = self._pools[layout.world_size] = _Pool(layout.world_size, self._device)
        return pool.run(layout, body, args, timeout)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.end()


class _Pool:
    def __init__(self, world_size: int, device: str) -> None:
        from torch.distributed import TCPStore

        self.broken = False
        context = multiprocessing.get_context("spawn")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # ranks meet there
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = rank, world_size, self._store.port, device, theirs
            process = context.Process(target=_serve, args=arguments, daemon=True)
            hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
            with _environment(OMP_NUM_THREADS="1", **hidden):
                process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, layout: Layout, body: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for connection in self._connections:
            connection.send((layout, body, args))
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < len(self._connections):
            waiting = {c: r for r, c in enumerate(self._connections) if r not in answers}
            # once a rank has failed the others may wait for it for ever
            failed = [r for r, (fine, _) in answers.items() if not fine]
            ready = wait(list(waiting), timeout=10.0 if failed else timeout)
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, f"rank {rank} died\n")
        problems = [f"rank {r}: {text}" for r, (fine, text) in sorted(answers.items()) if not fine]
        missing = sorted(set(range(len(self._connections))) - set(answers))
        if missing:
            problems.append(f"ranks {missing} gave no answer: they hang")
            self.end()
        if problems:
            raise RankError(f"{layout}:\n" + "\n".join(problems))
        return [answers[rank][1] for rank in range(len(self._connections))]

    def end(self) -> None:
        self.broken = True
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, world_size: int, port: int, device: str, connection: Connection) -> None:
    """The life of a rank process: takes bodies, answers (fine, result or traceback)."""
    from megatron_longstraw import cpu_platform, distributed

    distributed.quiet()
    if device == "cpu":
        cpu_platform.install()
    import torch

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        # NaN in every uninitialised buffer, so that reading one shows
        torch.use_deterministic_algorithms(True)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=world_size
    )
    current: Layout | None = None
    while True:
        try:
            layout, body, args = connection.recv()
        except EOFError:
            return
        try:
            if layout != current:
                _lay_out(layout)
                if current is None:
                    gc.freeze()  # what was imported; else the collection below takes longer than many a test
                current = layout
            answer = (True, body(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        gc.collect()
        connection.send(answer)


def _lay_out(layout: Layout) -> None:
    import torch
    from torch.distributed import distributed_c10d

    from megatron_longstraw.config import ParallelConfig
    from megatron_longstraw.distributed import consecutive_group, initialize_model_parallel

    # each gloo group has a thread that wakes a hundred times a second: those of former layouts would take the machine
    consecutive_group.cache_clear()
    world = distributed_c10d._get_default_group()
    for group in [g for g in distributed_c10d._world.pg_map if g is not world]:
        torch.distributed.destroy_process_group(group)

    initialize_model_parallel(ParallelConfig(tp=layout.tp, pp=layout.pp, vpp=layout.vpp, ep=layout.ep))


@contextlib.contextmanager
def _environment(**values: str) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
