"""Makes unmodified Megatron-Core run on CPU ranks over gloo, for tests, demos and rehearsals.

Megatron asks CUDA for its device, streams, events and RNG. `install` answers these questions for a machine
without a GPU: the device is the CPU, streams and events do nothing (CPU work is in order), the RNG is torch's
CPU generator. Only entry points and tests call it; no other module knows of it, and on a machine with a GPU
it refuses.

What differs from a GPU run and therefore is not exercised here: NCCL, streams and their overlap, batched
point-to-point operations, and every kernel that exists for CUDA only.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed: list[TorchFunctionMode] = []


def install() -> None:
    """Answers Megatron's CUDA calls with the CPU, in this process, from now on. Idempotent.

    Raises:
        RuntimeError: there is a CUDA device, or Megatron was imported before (its fused functions are
            decorated for ``torch.compile`` at import).
    """
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("the CPU platform is for machines without a CUDA device; this one has a device")
    if "megatron.core.transformer" in sys.modules:
        raise RuntimeError("install the CPU platform before anything imports megatron.core")

    _replace_cuda_namespace()
    _share_gloo_device()
    from megatron.core import jit

    jit.disable_jit_fuser()  # else every rank compiles C++ for minutes
    _replace_rng()
    _accept_split_tensors()
    mode = _CudaMeansCpu()
    mode.__enter__()
    _installed.append(mode)


def is_installed() -> bool:
    """Whether this process runs Megatron on the CPU."""
    return bool(_installed)


class _CudaMeansCpu(TorchFunctionMode):
    """Turns ``device="cuda"`` literals into the CPU, and names CPU tensor types as Megatron expects them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        result = func(*args, **kwargs) if kwargs else func(*args)
        if func is torch.Tensor.type and isinstance(result, str):
            # the distributed optimizer tells parameters apart by "torch.cuda.FloatTensor" and the like
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


class _NullStream:
    """Stands for a CUDA stream or event; on the CPU all work is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: Any = None) -> "_NullStream":
        return event or self

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def _null_stream_context(stream: Any) -> Iterator[None]:
    yield


def _replace_cuda_namespace() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.set_device = cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = _NullStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _NullStream()
    cuda.stream = _null_stream_context
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    module: Any = torch.nn.Module
    module.cuda = lambda self, *args, **kwargs: self


def _share_gloo_device() -> None:
    """Gives all gloo groups of this process one device.

    Each device has a thread that wakes a hundred times a second, and Megatron makes some forty groups: with a
    device each they take a large part of a small machine.
    """
    from torch.distributed import distributed_c10d

    gloo: Any = distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class SharedDeviceGloo(gloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[misc]


def _replace_rng() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _accept_split_tensors() -> None:
    """gloo wants split sizes as lists; on a CPU, Megatron's alltoall dispatcher has them as tensors."""
    distributed: Any = torch.distributed
    inner = distributed.all_to_all_single

    def all_to_all_single(output: Any, input: Any, *splits: Any, **kwargs: Any) -> Any:
        def as_list(value: Any) -> Any:
            return value.tolist() if isinstance(value, torch.Tensor) else value

        return inner(output, input, *map(as_list, splits), **{k: as_list(v) for k, v in kwargs.items()})

    distributed.all_to_all_single = all_to_all_single
