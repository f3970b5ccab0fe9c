"""Measures one point of a benchmark on the ranks that torchrun started: one mode, one shape, one fresh process.

A group of random ids goes through `megatron_longstraw.compare.run_step`: forward, backward and the reduction of
gradients, without an optimizer step, which is the same in every mode. In order:

1. One response to a short prompt, unmeasured, so that caches, kernels and communicators are there.
2. The timed steps.
3. Bytes and FLOPs in a step of their own, as counting slows a step: on a GPU bytes come from the timed steps, as
   the allocator counts anyway.

What is measured is written as soon as it is there, so that a failure of a later step loses nothing.
"""

import contextlib
import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_longstraw.compare import Step, run_step
from megatron_longstraw.config import ConfigError, RunConfig
from megatron_longstraw.flops import FlopCounter, uncounted
from megatron_longstraw.measure import PHASES, DevicePeak, PeakBytes
from megatron_longstraw.models import transformer_config
from megatron_longstraw.models.backend import resolve_backend
from megatron_longstraw.rollouts import Response, RolloutGroup
from megatron_longstraw.trainer import build_ddp_model, largest, persistent_tensors

_WARM_UP_TOKENS = 64
"""Of the unmeasured prompt; on a GPU after a whole prompt chunk, whose kernels may differ from those of few tokens."""


@dataclass(frozen=True, kw_only=True)
class PointOptions:
    """What is run.

    Attributes:
        mode: "stock" (with full recomputation), "stock-no-recompute", "detached" or "exact".
        prompt_tokens, response_tokens, responses: of each group; every data-parallel rank has one.
        repeats: timed steps; the fastest counts.
        flops: whether to count FLOPs.
        probe: one step, for its bytes only.
        memory_limit_gib: what CUDA's allocator may take; on the CPU, what the counted bytes may be.
    """

    mode: Literal["stock", "stock-no-recompute", "detached", "exact"]
    prompt_tokens: int
    response_tokens: int
    responses: int
    repeats: int = 1
    flops: bool = True
    probe: bool = False
    memory_limit_gib: float | None = None


def measure_point(
    run: RunConfig, options: PointOptions, device: torch.device, result: Path, device_bytes_before: int | None
) -> None:
    """Measures a point; rank 0 writes it to a JSON file as it grows.

    Args:
        run: the run configuration; Megatron's parallel state is laid out as it says.
        options: what is run.
        device: this rank's.
        result: the file.
        device_bytes_before: what `megatron_longstraw.measure.device_bytes` said before this process had a context on
            the device; on the CPU, or where NVML can't be asked, None.

    Raises:
        ConfigError: the memory limit can't be set.
    """
    row: dict[str, Any] = {}
    for part in _measurements(run, options, device, device_bytes_before):
        row |= part
        if dist.get_rank() == 0:
            result.write_text(json.dumps(row), encoding="utf-8")


def random_groups(
    count: int, prompt_tokens: int, response_tokens: int, responses: int, vocab_size: int, seed: int
) -> list[RolloutGroup]:
    """Groups of random ids, rewards and old log-probs, the same on every rank and for every mode."""
    draw = np.random.default_rng([seed, prompt_tokens, response_tokens])

    def response() -> Response:
        ids = draw.integers(0, vocab_size, response_tokens)
        # near those of a model that knows nothing, so that some ratios are clipped, and the loss is not 0 in sum
        old = -np.log(vocab_size) + 0.2 * draw.normal(size=response_tokens)
        mask = np.ones(response_tokens, dtype=bool)
        return Response(ids=ids, mask=mask, reward=float(draw.normal()), old_log_probs=old)

    return [
        RolloutGroup(
            group_id=str(index),
            prompt_ids=draw.integers(0, vocab_size, prompt_tokens),
            responses=tuple(response() for _ in range(responses)),
            temperature=1.0,
            meta=None,
            source="bench",
        )
        for index in range(count)
    ]


def _measurements(
    run: RunConfig, options: PointOptions, device: torch.device, device_bytes_before: int | None
) -> Iterator[dict[str, Any]]:
    """The columns of the point's row, in parts; the same on every rank."""
    if options.mode == "detached" or options.mode == "exact":
        run = replace(run, schedule=replace(run.schedule, prompt_gradient=options.mode))
    cuda = device.type == "cuda"
    if cuda and options.memory_limit_gib is not None:
        _limit_memory(options.memory_limit_gib, device)
    model = build_ddp_model(run)
    ranks_of_groups = parallel_state.get_data_parallel_world_size()
    memory = PeakBytes(persistent_tensors(model))

    def step(prompt_tokens: int, responses: int, within: Any = None) -> Step:
        shape = prompt_tokens, options.response_tokens, responses
        groups = random_groups(ranks_of_groups, *shape, run.model.vocab_size, run.seed)
        gc.collect()
        dist.barrier()
        name = "stock" if options.mode.startswith("stock") else "longstraw"
        recompute = options.mode != "stock-no-recompute"
        return run_step(name, model, groups, run, device, recompute=recompute, within=within)

    tiny = _WARM_UP_TOKENS + (run.schedule.prompt_chunk_tokens if cuda else 0)
    step(min(tiny, options.prompt_tokens), 1)
    whole = options.prompt_tokens, options.responses
    if cuda:
        torch.cuda.empty_cache()
        with DevicePeak(device) as on_device:
            times = [_times(step(*whole, memory), device) for _ in range(options.repeats)]
        yield _fastest(times, options, ranks_of_groups)
        yield _integers(largest({"peak_bytes": memory.peak}, device))
        if device_bytes_before is not None:
            yield _integers(largest({"nvml_bytes": on_device.peak - device_bytes_before}, device))
    elif not options.probe:
        yield _fastest([_times(step(*whole), device) for _ in range(options.repeats)], options, ranks_of_groups)
    counter = None
    wanted = options.flops and not options.probe
    if wanted and uncounted(transformer_config(run), resolve_backend(run.model.backend)[1]) is None:
        counter = FlopCounter()
    if cuda and counter is None:
        return
    step(*whole, _both(contextlib.nullcontext() if cuda else memory, counter or contextlib.nullcontext()))
    if not cuda:
        yield _integers(largest({"peak_bytes": memory.peak}, device))
    if counter is not None:
        flops = torch.tensor(counter.total, dtype=torch.int64, device=device)
        dist.all_reduce(flops)
        yield {"flops": int(flops)}


def _limit_memory(gib: float, device: torch.device) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    if gib * 2**30 > total:
        raise ConfigError(f"--memory-limit-gib {gib:g}: needs at most the GPU's {total / 2**30:.1f} GiB")
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total, device)


def _times(step: Step, device: torch.device) -> dict[str, float]:
    """A step's seconds and bytes of state, the largest of any rank, and its loss; nothing of its tensors."""
    seconds = {f"{phase}_seconds": step.seconds[phase] for phase in PHASES if phase in step.seconds}
    state = {"state_bytes": step.state_bytes, "state_gradient_bytes": step.state_gradient_bytes}
    return {**largest({"seconds": step.seconds["all"], **seconds, **state}, device), "loss": step.loss}


def _fastest(times: list[dict[str, float]], options: PointOptions, groups: int) -> dict[str, Any]:
    best = min(times, key=lambda step: step["seconds"])
    tokens = groups * (options.prompt_tokens + options.responses * options.response_tokens)
    state = _integers({name: best[name] for name in ("state_bytes", "state_gradient_bytes")})
    return {**best, **state, "tokens_per_second": tokens / best["seconds"]}


def _integers(values: dict[str, float]) -> dict[str, int]:
    return {name: int(value) for name, value in values.items()}


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield
