"""Measures a step: peak bytes of tensors, seconds per phase, and shows its progress."""

import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_longstraw.prompt_state import Phase, PromptState
from megatron_longstraw.work import PromptGroup, WorkItem

_PHASES = {
    Phase.CAPTURE: "capture",
    Phase.RESPONSE: "replay",
    Phase.PLAIN: "stock",
    Phase.RECAPTURE: "prompt_backward",
    Phase.PROMPT: "prompt_backward",
}

PHASES = ("capture", "replay", "prompt_backward")
"""The phases of our schedule, by the names that seconds go by."""

_MOMENT = 1e-3  # seconds
_SAMPLE_SECONDS = 0.05
_GROUPS_SHOWN = 16


class NonFiniteGradientError(RuntimeError):
    """A step's gradient has NaN or infinity; nothing was updated.

    Args:
        step: counted from 1.
        group_ids: of the step's groups, over all data-parallel ranks.
    """

    def __init__(self, step: int, group_ids: Sequence[str]) -> None:
        shown = ", ".join(group_ids[:_GROUPS_SHOWN])
        more = f" and {len(group_ids) - _GROUPS_SHOWN} more" if len(group_ids) > _GROUPS_SHOWN else ""
        super().__init__(
            f"step {step} (group{'s' if len(group_ids) > 1 else ''} {shown}{more}): the gradient is not finite; the "
            "weights before this step are saved: look at the learning rate, and at temperature, advantage, "
            "old_logprobs and ref_logprobs in the rollouts of this step"
        )


class PeakBytes:
    """Measures the most bytes that tensors hold at once while it is entered.

    On CUDA it is the allocator's ``max_memory_allocated``. On the CPU every storage that an operator makes is
    counted while it lives, on top of the tensors given; workspace inside operators is invisible there.

    Args:
        existing: tensors that live already and are to count (parameters, gradient buffers).
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        self.peak = 0
        self._mode = None if torch.cuda.is_available() else _LiveBytes(existing)

    def __enter__(self) -> "PeakBytes":
        if self._mode is None:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._mode is None:
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self._mode.__exit__(*error)
            self.peak = self._mode.peak


class _LiveBytes(TorchDispatchMode):
    """Counts live storages: each once, from the operator that returns it to its end."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in existing:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def freed(_: Any) -> None:
            if self._storages.pop(key, None) is not None:
                self.live -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.live += size
        if self.live > self.peak:
            # gloo's thread drops the tensors of a finished collective a moment after its wait, and needs the
            # interpreter's lock for it: without this a peak is now and then one collective's input too high
            time.sleep(_MOMENT)
            self.peak = max(self.peak, self.live)


def device_bytes(device: int) -> int | None:
    """Bytes in use on a GPU as NVML has it: of all processes, with CUDA's own. None where NVML can't be asked."""
    import pynvml

    try:
        return torch.cuda.device_memory_used(device)
    except (RuntimeError, pynvml.NVMLError):  # no NVML in a container, or no right to ask about a shared GPU
        return None


class DevicePeak:
    """The most `device_bytes` while it is entered, of samples that a thread takes; 0 where there are none.

    Args:
        device: this rank's GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak = 0
        self._device = device.index
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "DevicePeak":
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended.set()
        self._thread.join()
        self._take()  # the allocator has given nothing back yet

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._take()

    def _take(self) -> None:
        self.peak = max(self.peak, device_bytes(self._device) or 0)


class StepMeter:
    """An observer of the schedule: seconds by phase, bytes of state, and a progress line.

    Seconds are this rank's wall-clock time from the first micro-batch of a phase to the first of the next. Under
    pipeline parallelism phases overlap, so there they say where this rank's time goes, not how long a phase is.

    Args:
        groups: the groups this rank runs, in order.
        screen: where to show progress; None shows none.
    """

    def __init__(self, groups: Sequence[PromptGroup], screen: TextIO | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.state_bytes = self.state_gradient_bytes = 0
        self._groups = [g for g in groups if g.has_work]
        self._group = 0
        self._phase: Phase | None = None
        self._phase_start = self._last_shown = time.perf_counter()
        self._phase_tokens = 0
        self._screen = screen
        self._show_every = 0.5 if screen is not None and screen.isatty() else 10.0  # a log is not a screen

    def on_item(self, item: WorkItem) -> None:
        phase = item.segment.phase
        if phase is Phase.IDLE:
            return
        if phase is not self._phase:
            self._end_phase()
            self._phase = phase
        elif self._screen is not None and time.perf_counter() - self._last_shown > self._show_every:
            self._show()
        self._phase_tokens += item.segment.length

    def on_group_end(self, state: PromptState) -> None:
        self._end_phase()
        self._group += 1
        self.state_bytes = max(self.state_bytes, state.bytes())
        self.state_gradient_bytes = max(self.state_gradient_bytes, state.gradient_bytes())

    def close(self) -> None:
        """Ends the last phase and clears the progress line."""
        self._end_phase()
        if self._screen is not None and self._screen.isatty():
            self._screen.write("\r\x1b[K")
            self._screen.flush()

    def _end_phase(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._phase is not None:
            name = _PHASES[self._phase]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._phase_start
        self._phase, self._phase_start, self._phase_tokens = None, now, 0

    def _show(self) -> None:
        assert self._screen is not None and self._phase is not None
        where, total = self._progress()
        self._last_shown = time.perf_counter()
        rate = self._phase_tokens / max(self._last_shown - self._phase_start, 1e-9)
        line = (
            f"{where}{_PHASES[self._phase].replace('_', ' ')}  "
            f"{self._phase_tokens:,}/{total:,} tokens  {rate:,.0f} tokens/s  "
            f"{max(total - self._phase_tokens, 0) / max(rate, 1e-9):.0f} s left"
        )
        self._screen.write(f"\r\x1b[K{line}" if self._screen.isatty() else f"{line}\n")
        self._screen.flush()

    def _progress(self) -> tuple[str, int]:
        """Which group runs, and the tokens of the running phase."""
        if self._phase is Phase.PLAIN:  # the stock schedule runs all groups at once
            responses = [(len(g.prompt), r) for g in self._groups for r in g.responses if len(r)]
            return "", sum(prompt + len(r) - 1 for prompt, r in responses)
        group = self._groups[self._group]
        where = f"group {self._group + 1}/{len(self._groups)}  "
        if self._phase is Phase.RESPONSE:
            return where, sum(map(len, group.responses))
        return where, len(group.prompt) - 1


def screen_of(rank: int) -> TextIO | None:
    """Where a rank shows progress: rank 0 on standard error, the others nowhere."""
    return sys.stderr if rank == 0 else None
