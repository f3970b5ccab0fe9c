"""Starts the process group and lays Megatron's parallel groups over it; agreement between ranks."""

import contextlib
import functools
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_longstraw import cpu_platform
from megatron_longstraw.config import ConfigError, ParallelConfig

_TIMEOUT = timedelta(hours=24)
"""Of every collective. A data-parallel rank with few or short groups waits for the one with the most in the one
reduction at the end of a step, and torchrun ends all ranks when one dies."""


def quiet() -> None:
    """Silences what Megatron and torch warn of on every rank: each optional package that is not installed."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # read by Megatron
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def start() -> torch.device:
    """Joins the ranks that torchrun started: NCCL with one GPU a rank, or gloo where there is no GPU.

    A process that has joined stays as it is.

    Returns:
        This rank's device.

    Raises:
        ConfigError: the process was not started by torchrun.
    """
    if dist.is_initialized():
        return torch.device(torch.cuda.current_device())
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start ranks with torchrun --nproc-per-node N -m megatron_longstraw ..."
        )
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=_TIMEOUT)
        return device
    cpu_platform.install()
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    return torch.device("cpu")


def initialize_model_parallel(parallel: ParallelConfig) -> None:
    """Lays Megatron's parallel groups over the world, in place of those that were there before.

    Raises:
        ConfigError: the world size is no multiple of tp * pp, or what is left can't hold ep.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    check_world_size(parallel, dist.get_world_size())
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=int(_TIMEOUT.total_seconds() // 60),
        create_gloo_process_groups=False,
    )
    random.model_parallel_cuda_manual_seed(0, force_reset_rng=True)  # nothing random is left in a step


def check_world_size(parallel: ParallelConfig, world_size: int) -> None:
    """Raises ConfigError where the ranks can't hold the layout."""
    shard = parallel.tp * parallel.pp
    if world_size % shard:
        raise ConfigError(
            f"{world_size} ranks can't hold parallel.tp={parallel.tp} x pp={parallel.pp}: "
            f"start a multiple of {shard} ranks (torchrun --nproc-per-node {shard})"
        )
    if (world_size // parallel.pp) % parallel.ep:
        raise ConfigError(
            f"parallel.ep={parallel.ep} must divide the {world_size // parallel.pp} ranks of a pipeline stage"
        )


@contextlib.contextmanager
def together(*errors: type[Exception]) -> Iterator[None]:
    """Makes an error of one rank an error of all, so that none waits for ranks that have left.

    Every rank enters and leaves this at the same point.

    Args:
        errors: what is shared; another exception passes as it is.

    Raises:
        errors: on the lowest rank that has one.
        PeerError: on all others, where any rank has one.
    """
    mine: Exception | None = None
    try:
        yield
    except errors as error:
        mine = error
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if mine is None else f"{type(mine).__name__}: {mine}")
    first = next((rank for rank, text in enumerate(everyone) if text is not None), None)
    if first is None:
        return
    if mine is not None and first == dist.get_rank():
        raise mine
    raise PeerError(f"rank {first} failed: {everyone[first]}") from mine


_COMPARED = ("tp", "pp", "cp", "dp", "dp_cp")


def check_process_groups(collection: Any, name: str) -> None:
    """Refuses process groups that aren't parallel_state's: ranks that they leave out would be waited for.

    Args:
        collection: Megatron's ProcessGroupCollection, with all groups or some; None for parallel_state's own.
        name: what to call it in an error.

    Raises:
        ConfigError: a group has other ranks; names it.
    """
    if collection is None:
        return
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection

    if isinstance(collection, MultiModuleProcessGroupCollection):
        raise ConfigError(f"{name} has several modules: needs one model on one grid of ranks, or None")
    if not parallel_state.is_initialized():
        raise ConfigError(f"{name} is given, but not Megatron's parallel_state: call initialize_model_parallel first")
    own = ProcessGroupCollection.use_mpu_process_groups(list(_COMPARED))
    for field in _COMPARED:
        group = getattr(collection, field, None)
        if group is None:
            continue
        ranks = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
        needed = dist.get_process_group_ranks(getattr(own, field))
        if ranks != needed:
            raise ConfigError(
                f"{name}.{field} has the ranks {ranks}: needs {needed}, as Megatron's parallel_state has, "
                "whose ranks all take part; training on a part of them is not supported"
            )


class PeerError(RuntimeError):
    """Another rank failed; that rank tells the reason."""


class StopSignal:
    """While entered, SIGINT and SIGTERM are requests to stop, which the ranks agree on between two steps.

    A second signal ends the process at once, with 128 + its number. One within a second of the first is not a second
    one: launchers hand the same signal on in several ways. A thread reads the signals, since Python's own handlers
    wait for the main thread to come back from a collective, which may take as long as a step.

    Args:
        device: this rank's.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)
    _SAME = 1.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._number = 0

    def __enter__(self) -> "StopSignal":
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end)
        self._handlers_before: dict[signal.Signals, Any] = {s: signal.signal(s, _do_nothing) for s in self._SIGNALS}
        threading.Thread(target=self._watch, name="stop-signal", daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write_end)  # the thread reads the end

    def agreed(self) -> int | None:
        """The signal that any rank got, on every rank; None where none did. All ranks ask together."""
        number = torch.tensor(self._number, device=self._device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number) or None

    def _watch(self) -> None:
        first = 0.0
        while number := int.from_bytes(os.read(self._read_end, 1)):
            if number not in self._SIGNALS:
                continue
            if not self._number:
                self._number, first = number, time.monotonic()
                if dist.get_rank() == 0:
                    name = signal.Signals(number).name
                    print(
                        f"{name}: the current step is the last, then weights are saved; again: end at once", flush=True
                    )
            elif time.monotonic() - first > self._SAME:
                os._exit(128 + number)
        os.close(self._read_end)


def _do_nothing(number: int, frame: Any) -> None:
    """A handler that there has to be, so that Python notes the signal."""


@functools.lru_cache
def consecutive_group(size: int) -> dist.ProcessGroup:
    """The group of `size` consecutive ranks of the world that holds this rank. All ranks must ask together."""
    mine = None
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, timeout=_TIMEOUT)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None
    return mine
