"""The same groups through the stock schedule and through ours: losses, log-probs, every gradient, bytes, seconds.

It compares schedules, not kernels: the stock side runs each response behind a prompt of its own, with Megatron's
full recomputation, on the same weights and ranks, with the same attention kernel (without prompt rows) and the
same log-prob head. ``plain_attention="megatron"`` gives it Megatron's own attention instead.

Sparse attention's choice of positions is not continuous, so the stock side takes the choices that our side made,
and tells where its own would have been others: that may be at ties only (see `index_choices`).
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_longstraw.config import RunConfig
from megatron_longstraw.float64 import keep_float64
from megatron_longstraw.index_choices import IndexChoices
from megatron_longstraw.measure import PHASES, PeakBytes, StepMeter, screen_of
from megatron_longstraw.models.parameters import named_buffers, named_parameters
from megatron_longstraw.rollouts import RolloutGroup
from megatron_longstraw.schedule import forward_backward, stock_forward_backward
from megatron_longstraw.trainer import (
    build_ddp_model,
    grpo_forward_step,
    largest,
    persistent_tensors,
    prompt_groups,
    summed_reports,
    unwrapped,
)


@dataclass(frozen=True)
class Gate:
    """What counts as the same gradient. A parameter may differ by `relative` of itself plus `floor` of the whole.

    The floor is for parameters whose gradient vanishes, which have no relative error worth the name. Index scores
    that are apart by at most `tie` of the largest are equal: which of their positions is chosen is then left open.
    """

    cosine: float
    relative: float
    floor: float
    tie: float


GATES = {
    "float32": Gate(0.99999, 1e-5, 1e-7, 1e-5),
    "float64": Gate(1 - 1e-9, 1e-9, 1e-12, 1e-12),
    # two orders of the same bfloat16 sums differ by their rounding, 2^-8 each
    "bfloat16": Gate(0.999, 5e-2, 1e-2, 5e-2),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """Forward and backward of a global batch by one schedule, on this rank.

    Attributes:
        reports: what the last stage reported of each response.
        loss: of the objective, over all ranks.
        seconds: by phase, and "all".
        state_bytes: of the prompt's state; 0 for the stock schedule.
        state_gradient_bytes: of its gradient.
        expert_bias: name in the whole model -> the routers' bias that the step would leave, on the CPU.
    """

    reports: list[dict[str, Tensor]]
    loss: float
    seconds: dict[str, float]
    state_bytes: int
    state_gradient_bytes: int
    expert_bias: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Run(Step):
    """A step with what a comparison is made of.

    Attributes:
        gradients: name in the whole model -> gradient on this rank, on the CPU.
        peak_bytes: the most bytes of tensors on this rank.
    """

    gradients: dict[str, Tensor]
    peak_bytes: int


def run_schedule(
    name: str,
    model: Sequence[Any],
    groups: Sequence[RolloutGroup],
    run: RunConfig,
    device: torch.device,
    *,
    recompute: bool = True,
) -> Run:
    """`run_step` with its gradients and its peak bytes; takes the same arguments."""
    memory = PeakBytes(persistent_tensors(model))
    step = run_step(name, model, groups, run, device, recompute=recompute, within=memory)
    gradients = {p.name: p.parameter.main_grad.detach().cpu().clone() for p in named_parameters(unwrapped(model))}  # type: ignore[attr-defined]
    return Run(**vars(step), gradients=gradients, peak_bytes=memory.peak)


def run_step(
    name: str,
    model: Sequence[Any],
    groups: Sequence[RolloutGroup],
    run: RunConfig,
    device: torch.device,
    *,
    recompute: bool = True,
    within: contextlib.AbstractContextManager[Any] | None = None,
) -> Step:
    """Loss and gradients of a global batch by one schedule, from the weights as they are; expert biases stay, too.

    Args:
        name: "stock" or "longstraw".
        model: of `build_ddp_model`; its gradient buffers are overwritten.
        groups: the global batch; every rank gives the same.
        recompute: of the stock schedule; ours has schedule.recompute.
        within: is entered for forward and backward, and for nothing else: what counts bytes, for example.
    """
    mine = prompt_groups(groups, run, device)
    meter = StepMeter(mine, screen_of(dist.get_rank()))
    forward_step = grpo_forward_step(run, keep_log_probs=True)
    for chunk in model:
        chunk.zero_grad_buffer()
    # Megatron's shared buffers only grow: what another run left there is not this one's
    parallel_state.get_global_memory_buffer().buffer.clear()
    biases = {buffer.name: buffer.tensor for buffer in named_buffers(unwrapped(model))}
    before = {name: bias.clone() for name, bias in biases.items()}
    start = time.perf_counter()
    # Megatron's casts to float32 would be the floor of a comparison in float64
    precision = keep_float64() if run.dtype == "float64" else contextlib.nullcontext()
    with precision, within or contextlib.nullcontext():
        if name == "stock":
            reports = stock_forward_backward(
                forward_step_func=forward_step,
                groups=mine,
                model=model,
                recompute=recompute,
                observer=meter,
                force_all_reduce=True,
            )
        else:
            reports = forward_backward(
                forward_step_func=forward_step,
                data_iterator=iter(mine),
                model=model,
                num_microbatches=len(mine),
                options=run.schedule,
                observer=meter,
                force_all_reduce=True,  # else each data-parallel rank has a part of the sum only
            )
        meter.close()
    seconds = {**meter.seconds, "all": time.perf_counter() - start}
    after = {name: bias.cpu().clone() for name, bias in biases.items()}
    for name, bias in biases.items():
        bias.copy_(before[name])
    return Step(
        reports=reports,
        loss=summed_reports(reports, device)["loss"],
        seconds=seconds,
        state_bytes=meter.state_bytes,
        state_gradient_bytes=meter.state_gradient_bytes,
        expert_bias=after,
    )


def compare_gradients(ours: dict[str, Tensor], stock: dict[str, Tensor], gate: Gate) -> dict[str, Any]:
    """How far two gradients are apart, over all ranks; parameters that ranks replicate count on each of them.

    Args:
        ours, stock: name -> gradient on this rank.
        gate: the bounds.

    Returns:
        The same on every rank: "cosine", "relative_l2", "worst_parameter" (nearest to its bound, or farthest over
        it), "per_rank", "is_zero" (both gradients are, so that nothing was compared), "stock_is_finite", "passed".
    """
    mine = {name: _products(ours[name], stock[name]) for name in stock}
    everyone: list[dict[str, tuple[float, float, float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    total = _sum(p for rank in everyone for p in rank.values())
    whole = math.sqrt(total[2])

    def excess(products: tuple[float, float, float]) -> float:
        difference, _, norm = _distance(products)
        bound = gate.relative * norm + gate.floor * whole
        if not math.isfinite(bound):
            return math.inf
        return difference / bound if bound else (math.inf if difference else 0.0)

    worst_rank, worst = max(
        ((rank, name) for rank, parameters in enumerate(everyone) for name in parameters),
        key=lambda at: excess(everyone[at[0]][at[1]]),
    )
    per_rank = [{"rank": r, **_closeness(_sum(parameters.values()))} for r, parameters in enumerate(everyone)]
    all_close = all(
        closeness["cosine"] >= gate.cosine and closeness["relative_l2"] <= gate.relative
        for closeness in [_closeness(total), *per_rank]
    )
    return {
        **_closeness(total),
        "worst_parameter": {
            "name": worst,
            "rank": worst_rank,
            "relative_l2": _closeness(everyone[worst_rank][worst])["relative_l2"],
            "of_bound": excess(everyone[worst_rank][worst]),
        },
        "per_rank": per_rank,
        "is_zero": not any(total),
        "stock_is_finite": math.isfinite(total[2]),
        "passed": all_close and excess(everyone[worst_rank][worst]) <= 1,
    }


def run_both(
    model: Sequence[Any], groups: Sequence[RolloutGroup], run: RunConfig, device: torch.device
) -> tuple[Run, Run, dict[str, Any]]:
    """The stock schedule's run, ours, and how the stock side would have chosen otherwise, over all ranks.

    The last is {"queries", "different", "largest_gap"} of `IndexChoices`; zeros for a model without sparse attention.
    """
    choices, runtime = IndexChoices(), unwrapped(model)[0].runtime
    try:
        runtime.on_choice = choices.record
        ours = run_schedule("longstraw", model, groups, run, device)
        runtime.on_choice = choices.replay
        stock = run_schedule("stock", model, groups, run, device)
    finally:
        runtime.on_choice = None
    everyone: list[Any] = [None] * dist.get_world_size()
    first_of_tp = parallel_state.get_tensor_model_parallel_rank() == 0  # the others have the same choices
    mine = (choices.queries, choices.different) if first_of_tp else (0, 0)
    dist.all_gather_object(everyone, (*mine, choices.largest_gap))
    queries, different, gaps = zip(*everyone, strict=True)
    return stock, ours, {"queries": sum(queries), "different": sum(different), "largest_gap": max(gaps)}


def compare(
    run: RunConfig,
    groups: Sequence[RolloutGroup],
    device: torch.device,
    *,
    plain_attention: str = "longstraw",
    on_group: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Compares the two schedules on each group alone, and on all groups in one step.

    Args:
        run: the run configuration; Megatron's parallel state is laid out as it says.
        groups: of the rollout file.
        device: this rank's.
        plain_attention: the stock side's attention, "longstraw" or "megatron".
        on_group: is given each group's entry as soon as it is there.

    Returns:
        The same on every rank: {"config", "world_size", "groups", "all", "passed"}; the README has the fields.
    """
    model = build_ddp_model(run, plain_attention=plain_attention)
    gate = GATES[run.dtype]

    def both(batch: Sequence[RolloutGroup]) -> tuple[Run, Run, dict[str, Any]]:
        stock, ours, choices = run_both(model, batch, run, device)
        gradient = compare_gradients(ours.gradients, stock.gradients, gate)
        apart = [(ours.expert_bias[name] - bias).abs().max().item() for name, bias in stock.expert_bias.items()]
        bias = largest({"bias": max(apart, default=0.0)}, device)["bias"]
        passed = gradient["passed"] and not bias and choices["largest_gap"] <= gate.tie
        return stock, ours, {**gradient, "expert_bias_max_abs_diff": bias, "index_choices": choices, "passed": passed}

    entries = []
    gradient: dict[str, Any] = {}
    for group in groups:
        stock, ours, gradient = both([group])
        entries.append(_entry(group, stock, ours, gradient, device))
        on_group(entries[-1])
    if len(groups) > 1:
        _, _, gradient = both(groups)
    return {
        "world_size": dist.get_world_size(),
        "groups": entries,
        "all": {key: value for key, value in gradient.items() if key != "per_rank"},
        # a group alone may train nothing; of all together something must have been compared
        "passed": gradient["passed"] and all(entry["grad"]["passed"] for entry in entries) and not gradient["is_zero"],
    }


TABLE_HEAD = (
    f"{'group':24} {'prompt':>8} {'G':>3} {'loss stock':>12} {'loss ours':>12} {'log-probs':>9} "
    f"{'gradient':>9} {'cosine':>10} {'peak MiB stock / ours':>22} {'seconds stock / ours':>21}"
)


def table_row(entry: dict[str, Any]) -> str:
    """A group's entry as a line under `TABLE_HEAD`."""
    loss, peak, seconds = entry["loss"], entry["peak_bytes"], entry["seconds"]
    return (
        f"{entry['group_id'][:24]:24} {entry['prompt_tokens']:8,} {len(entry['response_tokens']):3} "
        f"{loss['stock']:+12.6f} {loss['longstraw']:+12.6f} {entry['logprob_max_abs_diff']:9.1e} "
        f"{entry['grad']['relative_l2']:9.1e} {entry['grad']['cosine']:10.7f} "
        f"{peak['stock'] / 2**20:10,.1f} / {peak['longstraw'] / 2**20:9,.1f} "
        f"{seconds['stock']:9.1f} / {seconds['longstraw']:9.1f}"
        f"{'  (nothing trained: the gradient is 0)' if entry['grad']['is_zero'] else ''}"
    )


def verdict(run: RunConfig, result: dict[str, Any]) -> str:
    """What a comparison of all groups means, in words."""
    gate, together = GATES[run.dtype], result["all"]
    worst = together["worst_parameter"]
    bounds = (
        f"{run.dtype}: relative L2 <= {gate.relative:g}, cosine >= {gate.cosine:.9g}, each rank; each parameter "
        f"within {gate.relative:g} of itself + {gate.floor:g} of the whole"
    )
    choices = together["index_choices"]
    chosen = (
        f"index choices: {choices['different']:,} of {choices['queries']:,} would have been others on the stock side, "
        f"between scores apart by {choices['largest_gap']:.1e} at most (ties: {gate.tie:g}); it took ours\n"
        if choices["queries"]
        else ""
    )
    if together["is_zero"]:
        sentence = (
            "NOTHING COMPARED: the gradient is 0 on both sides, as where no token is trained, or all rewards of each "
            "group are equal (advantages of 0); give groups that train something"
        )
    elif not all(gradient["stock_is_finite"] for gradient in (together, *(e["grad"] for e in result["groups"]))):
        sentence = (
            "NOTHING TO COMPARE WITH: the stock schedule's own gradient is not finite; look at temperature, advantage, "
            "old_logprobs and ref_logprobs in the rollouts, and at model.weights"
        )
    elif result["passed"]:
        sentence = f"PASSED: the gradient is the stock schedule's ({bounds})"
    elif run.schedule.prompt_gradient == "detached":
        sentence = f"DIFFERENT, as it must be: prompt_gradient=detached leaves the prompt's gradient out ({bounds})"
    else:
        sentence = f"FAILED: the gradients differ ({bounds})"
    return (
        f"all groups in one step: gradient apart by {together['relative_l2']:.1e} (relative L2), cosine "
        f"{together['cosine']:.9f}; nearest to its bound: {worst['name']} on rank {worst['rank']}, "
        f"{worst['relative_l2']:.1e} of itself, {worst['of_bound']:.2g} of its bound\n{chosen}{sentence}"
    )


def _entry(
    group: RolloutGroup, stock: Run, ours: Run, gradient: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    difference = max(
        (
            (a["log_probs"] - b["log_probs"]).abs().max().item()
            for a, b in zip(ours.reports, stock.reports, strict=True)
        ),
        default=0.0,
    )
    most = largest(
        {
            "difference": difference,
            "stock_bytes": stock.peak_bytes,
            "bytes": ours.peak_bytes,
            "stock": stock.seconds["all"],
            "longstraw": ours.seconds["all"],
            **{phase: ours.seconds.get(phase, 0.0) for phase in PHASES},
        },
        device,
    )
    return {
        "group_id": group.group_id,
        "prompt_tokens": len(group.prompt_ids),
        "response_tokens": [len(r.ids) for r in group.responses],
        "loss": {"stock": stock.loss, "longstraw": ours.loss},
        "logprob_max_abs_diff": most["difference"],
        "grad": gradient,
        "peak_bytes": {"stock": int(most["stock_bytes"]), "longstraw": int(most["bytes"])},
        "seconds": {name: most[name] for name in ("stock", "longstraw", *PHASES)},
    }


def _products(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """|a - b|^2, |a|^2 and |b|^2, summed in float64; the cosine follows."""
    a, b = a.double().flatten(), b.double().flatten()
    return float((a - b).square().sum()), float(a @ a), float(b @ b)


def _sum(products: Any) -> tuple[float, float, float]:
    columns = list(zip(*products, strict=True)) or [(0.0,), (0.0,), (0.0,)]
    return math.fsum(columns[0]), math.fsum(columns[1]), math.fsum(columns[2])


def _distance(products: tuple[float, float, float]) -> tuple[float, float, float]:
    """|a - b|, cosine and |b| of products."""
    square, ours, stock = products
    if not math.isfinite(square):
        return math.inf, -1.0, math.sqrt(stock) if math.isfinite(stock) else math.inf
    # 1 - |a - b|^2 / 2|a||b| of unequal lengths; near 1 it keeps the digits that a . b loses
    lengths = math.sqrt(ours) * math.sqrt(stock)
    gap = square - (math.sqrt(ours) - math.sqrt(stock)) ** 2
    cosine = 1 - gap / (2 * lengths) if lengths else float(ours == stock)
    return math.sqrt(square), cosine, math.sqrt(stock)


def _closeness(products: tuple[float, float, float]) -> dict[str, float]:
    difference, cosine, norm = _distance(products)
    relative = difference / norm if norm and math.isfinite(difference) else (math.inf if difference else 0.0)
    return {"cosine": min(cosine, 1.0), "relative_l2": relative}
