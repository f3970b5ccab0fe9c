"""The schedule: a group is two calls of Megatron's own schedule, whichever that is (1F1B, interleaved, none).

    call A, forward only, no autograd:   prompt chunks 0 .. C-1            (capture the prompt)
    call B, forward and backward:        responses 1 .. G,                 (replay the responses)
                                         then prompt chunks C-1 .. 0       (prompt backward; exact mode only)

Of recurrent layers' states at chunk boundaries capture may keep every k-th only (`boundary_interval`). Then the
first k - 1 chunks of each run of k flow forward once more, without autograd, before the run's backward.

Why this is the gradient of the loss. Let z be the prompt's state. Then
``dL/dtheta = sum_i dl_i/dtheta at fixed z + (dz/dtheta)^T sum_i dl_i/dz``. Replay gives the first term and
gathers ``dl_i/dz`` on the state's rows; the prompt's chunks, run backwards from there, give the second.

Invariants, on every pipeline stage:
1. Backwards run in the order of forwards (1F1B does), so all responses' backwards precede those of the prompt,
   and chunk c's precedes chunk c-1's: a chunk's rows have their whole gradient when its backward starts.
2. State is written in call A only (a boundary that was dropped is written again with the same values), so a
   forward in call B, also a recomputed one, depends on nothing that changes.
3. Gradients are reduced over ranks once, after the last group.
4. The number of groups may differ between data-parallel ranks; all join the one reduction.
5. Where experts are spread over data-parallel ranks, these ranks run their micro-batches in step: the same number
   of each phase, idle work filling up, as each takes part in the others' collectives.

`docs/schedule.txt` has the picture; a test draws it from a real run.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longstraw import work
from megatron_longstraw.config import ConfigError, ScheduleConfig, check_transformer_settings
from megatron_longstraw.prompt_state import Phase, PromptState, Runtime, StateOptions
from megatron_longstraw.work import PromptGroup, WorkItem

LossFunction = Callable[[Tensor], tuple[Tensor, list[Any]]]
ForwardStep = Callable[[Iterator[WorkItem], Any], tuple[Tensor, LossFunction]]
"""Takes the next work item, runs the model on it; returns its output and a function from the output to the
share that the item's responses have in the loss (shares are summed, never averaged) and one report for each."""


class Observer(Protocol):
    """Is told how a step goes, on this rank."""

    def on_item(self, item: WorkItem) -> None:
        """Before the forward of a micro-batch, through the first model chunk of the rank."""

    def on_group_end(self, state: PromptState) -> None:
        """After the last backward of a group, before its state is dropped."""


def get_forward_backward_func(options: ScheduleConfig, observer: Observer | None = None) -> Callable[..., list[Any]]:
    """`forward_backward` with its options set; takes the same arguments as Megatron's schedules."""
    return functools.partial(forward_backward, options=options, observer=observer)


def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[PromptGroup] | Sequence[Iterator[PromptGroup]],
    model: Any,
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int = 1,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
    options: ScheduleConfig,
    observer: Observer | None = None,
) -> list[Any]:
    """Runs forward and backward of groups, with Megatron's keyword-only signature.

    Args:
        forward_step_func: as Megatron's, but its iterator yields a `WorkItem`, and its loss function returns
            (loss, reports), with a report for each response of the item, where losses of all items of all ranks
            are summed to the objective. It is called for prompt chunks too; what it returns as their loss function
            is not.
        data_iterator: yields `PromptGroup`; of a list (interleaved schedule) the first is read.
        model: model, or list of model chunks, built with a `Runtime` (see `megatron_longstraw.models`).
        num_microbatches: groups to take from the iterator; may be 0 on some data-parallel ranks.
        forward_only: capture and run the responses without backward.
        options: how the schedule runs.
        observer: is told of every micro-batch.
        seq_length, micro_batch_size, decoder_seq_length: ignored; lengths vary, a micro-batch is [T, 1, hidden].
        first_val_step, adjust_tensor_shapes_fn, p2p_communicator, pg_collection, force_all_reduce: Megatron's.

    Returns:
        On the last pipeline stage the reports of all non-empty responses, in order; elsewhere an empty list.

    Raises:
        ConfigError: the model's Megatron settings don't allow it (names the setting), or a loss function returns no
            list with a report for each response.
    """
    if collect_non_loss_data:
        raise ConfigError("collect_non_loss_data=True is not supported: reports come from the loss function")
    chunks = model_chunks(model)
    check_model(chunks)
    groups: Any = data_iterator[0] if isinstance(data_iterator, list | tuple) else data_iterator
    arguments = {
        "first_val_step": first_val_step,
        "adjust_tensor_shapes_fn": adjust_tensor_shapes_fn,
        "p2p_communicator": p2p_communicator,
        "pg_collection": pg_collection,
    }
    config = model_config(chunks)
    finalize = config.finalize_model_grads_func
    reports: list[Any] = []
    with temporary_settings(config, finalize_model_grads_func=None):
        call = functools.partial(
            _call_megatron,
            forward_step_func=forward_step_func,
            chunks=chunks,
            observer=observer,
            arguments=arguments,
        )
        (rounds,) = _largest_counts(config, num_microbatches)
        for round_ in range(rounds):
            group = next(groups) if round_ < num_microbatches else None
            reports += _run_group(group, call, chunks, options, forward_only, observer)
    if finalize is not None and not forward_only:
        finalize(chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
    return reports


def stock_forward_backward(
    *,
    forward_step_func: ForwardStep,
    groups: Sequence[PromptGroup],
    model: Any,
    recompute: bool = True,
    force_all_reduce: bool = False,
    observer: Observer | None = None,
) -> list[Any]:
    """The same groups through stock Megatron, for comparison: each response behind a prompt of its own.

    Args:
        recompute: with full recomputation, one layer at a time: Megatron's own, or, for models with experts or a
            sparse index, that of `megatron_longstraw.models.layers.PromptLayer`. Megatron's own sparse attention
            can't be recomputed, and isn't.
        others: as `forward_backward`.

    Returns:
        As `forward_backward`.
    """
    chunks = model_chunks(model)
    config = model_config(chunks)
    runtime, multiple = _runtime(chunks), _length_multiple(config)
    items = [item for group in groups for item in work.whole_sequences(group, multiple)]
    (count,) = _largest_counts(config, len(items))
    items = work.filled(items, count, Phase.PLAIN, work.no_group(_device(chunks)), multiple)
    finalize = config.finalize_model_grads_func
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    # Megatron's recomputation forgets which micro-batch a layer was run for: IndexShare then takes another one's
    # index, and routers count another one's padding
    ours = bool(config.num_moe_experts) or config.experimental_attention_variant == "dsa"
    recompute = recompute and runtime.plain_is_recomputable
    runtime.recompute_plain = recompute and ours
    try:
        with temporary_settings(config, finalize_model_grads_func=None, **(full if recompute and not ours else {})):
            reports = _call_megatron(items, forward_step_func, chunks, observer, {})
    finally:
        runtime.end()
    if finalize is not None:
        finalize(chunks, None, force_all_reduce=force_all_reduce)
    return reports


def check_model(model: Any) -> None:
    """Refuses models, Megatron settings and DDP settings under which the schedule would not be exact.

    Args:
        model: model or list of model chunks, wrapped or not.

    Raises:
        ConfigError: names the setting.
    """
    chunks = model_chunks(model)
    config = model_config(chunks)
    check_transformer_settings(vars(config))
    for name in ("variable_seq_lengths", "calculate_per_token_loss"):
        if not getattr(config, name):
            raise ConfigError(f"{name}=False is not supported: set it to True, as lengths vary and losses are summed")
    for name in ("grad_sync_func", "param_sync_func"):
        if getattr(config, name) is not None:
            raise ConfigError(f"{name} is set: gradients are reduced once, after the last group; leave it unset")
    for chunk in chunks:
        ddp = getattr(chunk, "ddp_config", None)
        for name in ("overlap_grad_reduce", "overlap_param_gather", "use_megatron_fsdp"):
            if getattr(ddp, name, False):
                raise ConfigError(f"{name}=True is not supported: gradients are reduced once, after the last group")


def _run_group(
    group: PromptGroup | None,
    call: Callable[..., list[Any]],
    chunks: Sequence[Any],
    options: ScheduleConfig,
    forward_only: bool,
    observer: Observer | None,
) -> list[Any]:
    """Capture, replay, prompt backward of one group; None takes part in the groups of other ranks."""
    config, runtime = model_config(chunks), _runtime(chunks)
    exact = options.prompt_gradient == "exact" and not forward_only
    group = group if group is not None and group.has_work else None
    capture, replay, prompt = _work(group, options, forward_only, _length_multiple(config), runtime)
    count_chunks, count_responses = _largest_counts(config, len(capture), len(replay))
    if not count_responses:
        return []
    with_graph = [*replay, *prompt] if exact else replay
    tokens = [item.segment.padded_tokens(runtime.sequence_multiple) for item in with_graph]
    runtime.recompute_above = _recompute_above(tokens, options, config)
    runtime.keep_attention = options.keep_attention
    idle_group = group or work.no_group(_device(chunks))
    fill = functools.partial(work.filled, group=idle_group, multiple=_length_multiple(config))
    if group is not None:
        runtime.state = PromptState(len(group.prompt) - 1, _state_options(options, exact, config))
    try:
        with torch.no_grad():
            call(fill(capture, count_chunks, Phase.CAPTURE), forward_only=True)
        items = fill(replay, count_responses, Phase.RESPONSE)
        if exact:
            items += fill(prompt, count_chunks, Phase.PROMPT)
        with torch.set_grad_enabled(not forward_only):
            reports = call(items, forward_only=forward_only)
        if runtime.state is not None:
            runtime.state.check_complete()
            if observer is not None:
                observer.on_group_end(runtime.state)
        return reports
    finally:
        runtime.end()


def _work(
    group: PromptGroup | None, options: ScheduleConfig, forward_only: bool, multiple: int, runtime: Runtime
) -> tuple[list[WorkItem], list[WorkItem], list[WorkItem]]:
    """The group's capture, replay and prompt backward, each in order of running."""
    if group is None:
        return [], [], []
    count = 0 if forward_only else sum(1 for response in group.responses if len(response))
    chunk, interval = options.prompt_chunk_tokens, options.boundary_interval if runtime.recurrent else 1
    return (
        work.prompt_chunks(group, Phase.CAPTURE, chunk, multiple, multiplicity=count),
        work.responses(group, multiple, min(count, 1), options.pack_tokens, runtime.sequence_multiple),
        work.prompt_backward(group, chunk, multiple, interval),
    )


def _recompute_above(tokens: Sequence[int], options: ScheduleConfig, config: Any) -> int | None:
    """Up to how many tokens of a micro-batch its layers are not recomputed, as that would save no memory.

    All layers of such a micro-batch keep half of what one layer of the group's longest one keeps.

    Args:
        tokens: of the group's micro-batches with a graph.
    """
    if not options.recompute:
        return None
    if not tokens or _in_step(config):
        return 0  # a recomputed layer needs the other ranks in its collectives, whatever the length of theirs
    if config.pipeline_model_parallel_size > 1:
        return 0  # short ones would be in flight beside the recomputed layer of the longest
    return max(tokens) // (2 * config.num_layers)


def _in_step(config: Any) -> bool:
    """Whether data-parallel ranks run their micro-batches in step, as experts are spread over them."""
    tp, ep = config.tensor_model_parallel_size, config.expert_model_parallel_size
    return bool(config.num_moe_experts) and tp % ep != 0


def _largest_counts(config: Any, *counts: int) -> list[int]:
    """The largest counts among the ranks that must run their micro-batches in step with this one."""
    if not _in_step(config):
        return list(counts)
    from megatron.core import parallel_state

    largest = torch.tensor(counts, dtype=torch.int64, device=torch.cuda.current_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
    return [int(count) for count in largest.tolist()]


def _call_megatron(
    items: Sequence[WorkItem],
    forward_step_func: ForwardStep,
    chunks: Sequence[Any],
    observer: Observer | None,
    arguments: dict[str, Any],
    forward_only: bool = False,
) -> list[Any]:
    """One call of Megatron's schedule over work items; returns the reports of responses."""
    from megatron.core.pipeline_parallel import get_forward_backward_func as megatron_schedule

    if not items:
        return []
    config = model_config(chunks)
    interleaved = len(chunks) > 1
    items = work.padded(items, config.pipeline_model_parallel_size if interleaved else 1, _length_multiple(config))
    runtime = _runtime(chunks)

    def step(iterator: Iterator[WorkItem], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        item = next(iterator)
        if observer is not None and model is chunks[0]:
            observer.on_item(item)
        runtime.begin(item.segment)
        output, loss_func = forward_step_func(iter([item]), model)
        return output, functools.partial(_loss, loss_func, len(item.responses))

    reports = megatron_schedule()(
        forward_step_func=step,
        data_iterator=[iter(items) for _ in chunks] if interleaved else iter(items),
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=len(items),
        seq_length=1,  # lengths vary
        micro_batch_size=1,
        forward_only=forward_only,
        **arguments,
    )
    return list(itertools.chain.from_iterable(reports))


def _loss(loss_func: LossFunction, responses: int, output: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
    """What Megatron asks of a loss function: (loss, tokens to divide by: none, what to report)."""
    no_tokens = torch.zeros((), dtype=torch.int, device=output.device)
    if not responses:
        return _ZeroRoot.apply(output), no_tokens, []
    loss, reports = loss_func(output)
    if not isinstance(reports, list) or len(reports) != responses:
        got = f"{len(reports)}" if isinstance(reports, list) else f"a {type(reports).__name__}"
        raise ConfigError(f"the loss function needs to return (loss, list of {responses} reports): got {got}")
    return loss, no_tokens, reports


class _ZeroRoot(torch.autograd.Function):
    """A loss of zero with a gradient of zero, whatever the output holds: where a prompt chunk's backward starts."""

    @staticmethod
    def forward(ctx, output):  # type: ignore[no-untyped-def]
        ctx.like = output.shape, output.dtype, output.device
        return output.new_zeros(())

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device)


def _state_options(options: ScheduleConfig, exact: bool, config: Any) -> StateOptions:
    dtype = torch.float32 if options.state_gradient_dtype == "float32" else config.params_dtype
    return StateOptions(
        page_tokens=options.page_tokens,
        attention_block_tokens=options.attention_block_tokens,
        query_block_tokens=options.query_block_tokens,
        gradient_dtype=dtype if exact else None,
        keep_choices=options.keep_choices and exact,
        boundary_spacing=options.boundary_interval * options.prompt_chunk_tokens,
    )


def model_chunks(model: Any) -> list[Any]:
    """The model chunks of what hosts hand over: one, or a list."""
    return list(model) if isinstance(model, list | tuple) else [model]


def _device(chunks: Sequence[Any]) -> torch.device:
    return next(chunks[0].parameters()).device


def model_config(chunks: Sequence[Any]) -> Any:
    """Megatron's config of the model, wrapped or not."""
    from megatron.core.utils import get_model_config

    return get_model_config(chunks[0])


def _runtime(chunks: Sequence[Any]) -> Runtime:
    from megatron.core.utils import get_attr_wrapped_model

    try:
        runtime = get_attr_wrapped_model(chunks[0], "runtime")
    except RuntimeError:
        runtime = None
    if not isinstance(runtime, Runtime):
        raise ConfigError(
            f"{type(chunks[0]).__name__} has no prompt runtime: build the model with megatron_longstraw.models, or "
            "give a GPTModel that Megatron built to megatron_longstraw.integrations.megatron.adopt"
        )
    return runtime


def _length_multiple(config: Any) -> int:
    return config.tensor_model_parallel_size if config.sequence_parallel else 1


@contextlib.contextmanager
def temporary_settings(config: Any, **values: Any) -> Iterator[None]:
    """Sets fields of a config for a while."""
    before = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
