"""The schedule behind a host's own call of Megatron's: its samples, forward step, loss and model, unchanged.

Losses are scaled as Megatron's `forward_step_calc_loss` scales them, by the number of the *host's* micro-batches and
tokens, however many micro-batches run: a pair (loss, report) is divided by `num_microbatches`; a triple (loss, tokens,
report) by its tokens and `num_microbatches`, or, with ``calculate_per_token_loss``, by nothing: the tokens' sum goes to
``finalize_model_grads_func``.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longstraw.config import ConfigError, ScheduleConfig
from megatron_longstraw.distributed import check_process_groups, together
from megatron_longstraw.samples import Sample, group_samples, micro_batch, read_sample
from megatron_longstraw.schedule import (
    ForwardStep,
    LossFunction,
    Observer,
    check_model,
    forward_backward,
    model_chunks,
    model_config,
    temporary_settings,
)
from megatron_longstraw.work import WorkItem

_DEFAULT = ScheduleConfig()
_READS_EVERYWHERE = "longstraw_reads_every_rank"
"""The attribute of a forward step that says: on every tensor-parallel rank the batch is taken from the iterator."""


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    schedule_pg_collection: Any = None,
    *,
    options: ScheduleConfig = _DEFAULT,
    observer: Observer | None = None,
) -> Callable[..., list[Any]]:
    """In place of Megatron's function of this name: a schedule for ordinary samples that shares equal prompts.

    Args:
        pp_size, vp_size: as Megatron's; not read, as the schedule asks Megatron's own function when it runs.
        schedule_pg_collection: as Megatron's, but None or of the groups of parallel_state.
        options: how the schedule runs.
        observer: is told of every micro-batch.

    Returns:
        `forward_backward_samples` with options and observer set; takes the arguments of Megatron's schedules.

    Raises:
        ConfigError: schedule_pg_collection has other groups, or an option is not for a host's forward step; names it.
    """
    check_process_groups(schedule_pg_collection, "schedule_pg_collection")
    check_options(options)
    return functools.partial(forward_backward_samples, options=options, observer=observer)


def check_options(options: ScheduleConfig) -> None:
    """Raises ConfigError for options that don't work behind a host's forward step; names one."""
    if options.pack_tokens:
        raise ConfigError(
            f"schedule.pack_tokens={options.pack_tokens} is not supported: needs 0, as a host's forward step takes one "
            "sample a micro-batch"
        )


def forward_backward_samples(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
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
    options: ScheduleConfig = _DEFAULT,
    observer: Observer | None = None,
) -> list[Any]:
    """Forward and backward of a host's samples, with the arguments and results of Megatron's schedules.

    Args:
        forward_step_func: the host's. It is called for prompt chunks and idle work too, with a loss mask of zero; what
            it returns as their loss function is not called. On every rank it must take its batch from its iterator,
            and not broadcast it over tensor-parallel ranks, where others would wait for one of the host's length.
        data_iterator: yields a mapping with "tokens" and "loss_mask" a micro-batch (`megatron_longstraw.samples`); of a
            list (interleaved schedule) the first is read and the others are moved on. A rank whose iterator is None
            gets the batches of another rank of its model-parallel group; where tensor-parallel ranks differ in this,
            the forward step must say that it doesn't broadcast: ``forward_step.longstraw_reads_every_rank = True``.
        model: model, or list of model chunks: of `megatron_longstraw.models`, or adopted.
        num_microbatches: samples to take from the iterator.
        micro_batch_size: must be 1.
        forward_only: losses without gradients.
        options, observer: as in `get_forward_backward_func`.
        pg_collection: None, or of the groups of parallel_state.
        others: Megatron's; lengths are ignored, as they vary.

    Returns:
        On the last pipeline stage what the loss function reported of each sample, in the host's order; elsewhere [].

    Raises:
        ConfigError: a batch, or a setting of the model, of DDP or of Megatron that can't be used; names it.
    """
    if micro_batch_size != 1:
        raise ConfigError(
            f"micro_batch_size={micro_batch_size} is not supported: needs 1, as the host's mean over the samples of a "
            "micro-batch can't be split"
        )
    check_process_groups(pg_collection, "pg_collection")
    chunks = model_chunks(model)
    config, device = model_config(chunks), next(chunks[0].parameters()).device
    settings = {
        "variable_seq_lengths": True,
        "calculate_per_token_loss": True,  # Megatron divides nothing: the losses that it gets are scaled already
    }
    with temporary_settings(config, **settings):
        check_model(chunks)
    if len(chunks) > 1 and config.pipeline_model_parallel_size == 2:
        raise ConfigError(
            "virtual_pipeline_model_parallel_size with variable lengths needs pipeline_model_parallel_size > 2 in "
            "Megatron: got 2"
        )
    with together(ConfigError):
        mine = _take(data_iterator, num_microbatches)
    samples = _share(mine, _reads_everywhere(forward_step_func), device)
    groups = group_samples(samples)
    losses = _HostLosses(num_microbatches, config.calculate_per_token_loss, device)
    finalize = config.finalize_model_grads_func
    with temporary_settings(config, finalize_model_grads_func=None, **settings):
        reports = forward_backward(
            forward_step_func=_forward_step(forward_step_func, losses, samples[0]),
            data_iterator=iter(groups),
            model=model,
            num_microbatches=len(groups),
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
            p2p_communicator=p2p_communicator,
            pg_collection=pg_collection,
            options=options,
            observer=observer,
        )
    if finalize is not None and not forward_only:
        tokens = losses.num_tokens if config.calculate_per_token_loss else None
        finalize(chunks, tokens, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
    places = [place for group in groups for place in group.payload.places]
    return [report for _, report in sorted(zip(places, reports, strict=True), key=lambda x: x[0])] if reports else []


def _take(data_iterator: Any, count: int) -> list[Sample] | None:
    """The next samples of the host; None on a rank without an iterator."""
    if count < 1:
        raise ConfigError(f"num_microbatches={count}: needs an integer >= 1")
    samples = None
    # each model chunk of an interleaved schedule has an iterator over the same batches
    for iterator in data_iterator if isinstance(data_iterator, list | tuple) else [data_iterator]:
        if iterator is None:
            continue
        if not hasattr(iterator, "__next__"):
            raise ConfigError(
                f"data_iterator is {'a list of ' if iterator is not data_iterator else ''}{type(iterator).__name__}: "
                "needs an iterator, or a list with one for each model chunk"
            )
        batches: list[Any] = []
        for _ in range(count):
            try:
                batches.append(next(iterator))
            except StopIteration:
                raise ConfigError(
                    f"data_iterator ended after {len(batches)} batches: num_microbatches={count} needs {count}"
                ) from None
        if samples is None:
            samples = [read_sample(batch, f"batch {i} of the data iterator") for i, batch in enumerate(batches)]
    return samples


def _share(mine: list[Sample] | None, reads_everywhere: bool, device: torch.device) -> list[Sample]:
    """This rank's samples; a rank without any gets those of a rank of its model-parallel group, on its own device.

    Args:
        mine: what the rank took from its iterator; None where it has none.
        reads_everywhere: whether the forward step says that it takes the batch from its iterator on every rank.
        device: the rank's.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_model_parallel_group()
    stages: list[Any] = [None] * dist.get_world_size(group)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    dist.all_gather_object(stages, (stage, mine is not None), group=group)
    present = [has for _, has in stages]
    with together(ConfigError):
        if not any(present):
            raise ConfigError("data_iterator is None on every rank of a model-parallel group: one needs to have it")
        if not reads_everywhere and {(stage, True), (stage, False)} <= set(stages):
            raise ConfigError(
                "data_iterator is None on some tensor-parallel ranks only, as for a forward step that broadcasts its "
                "batch over them, and batches are cut to lengths that such a broadcast doesn't know. Needs a forward "
                "step that takes its batch from its iterator on every rank (None or not, each rank gets its batch) "
                f"and says so: forward_step.{_READS_EVERYWHERE} = True"
            )
    if not all(present):
        source = present.index(True)
        # a tensor would be unpickled on the device that it had
        message: list[Any] = [[_on_cpu(s) for s in mine] if mine and dist.get_rank(group) == source else None]
        dist.broadcast_object_list(message, group=group, group_src=source)
        mine = [_on_device(sample, names, device) for sample, names in message[0]] if mine is None else mine
    assert mine is not None
    return mine


def _on_cpu(sample: Sample) -> tuple[Sample, set[str]]:
    """The sample on the CPU, without what its tensors are views of, and the names of those that were on a device."""
    tensors = {name: value for name, value in sample.fields.items() if isinstance(value, Tensor)}
    copies = {name: value.to("cpu", copy=True) for name, value in tensors.items()}
    moved = {name for name, value in tensors.items() if not value.is_cpu}
    return dataclasses.replace(sample, fields={**sample.fields, **copies}), moved


def _on_device(sample: Sample, names: set[str], device: torch.device) -> Sample:
    fields = {name: value.to(device) if name in names else value for name, value in sample.fields.items()}
    return dataclasses.replace(sample, fields=fields)


def _reads_everywhere(forward_step_func: Callable[..., Any]) -> bool:
    while isinstance(forward_step_func, functools.partial) and not hasattr(forward_step_func, _READS_EVERYWHERE):
        forward_step_func = forward_step_func.func
    return bool(getattr(forward_step_func, _READS_EVERYWHERE, False))


class _HostLosses:
    """Scales a host's losses as Megatron's schedules do, and counts its tokens.

    Args:
        num_microbatches: of the host.
        per_token: whether gradients are divided by all tokens at the end, by ``finalize_model_grads_func``.
        device: where tokens are counted.
    """

    def __init__(self, num_microbatches: int, per_token: bool, device: torch.device) -> None:
        self.num_microbatches, self.per_token = num_microbatches, per_token
        self.num_tokens = torch.zeros([], dtype=torch.int, device=device)

    def scaled(self, loss_func: Callable[[Tensor], Any]) -> LossFunction:
        """The loss function as the schedule wants it: (loss, reports), with losses to be summed."""

        def call(output: Tensor) -> tuple[Tensor, list[Any]]:
            outputs = loss_func(output)
            if not isinstance(outputs, tuple | list) or len(outputs) not in (2, 3):
                got = f"{len(outputs)} values" if isinstance(outputs, tuple | list) else f"a {type(outputs).__name__}"
                raise ConfigError(f"the loss function returned {got}: needs (loss, report) or (loss, tokens, report)")
            loss, report = outputs[0], outputs[-1]
            # in place, as Megatron does: a report that shares the loss's memory is scaled with it
            if len(outputs) == 3:
                self.num_tokens += outputs[1]
                if not self.per_token:
                    loss /= torch.clamp(outputs[1], min=1)
            if len(outputs) == 2 or not self.per_token:
                loss /= self.num_microbatches
            return loss, [report]

        return call


def _forward_step(forward_step_func: Callable[..., Any], losses: _HostLosses, idle: Sample) -> ForwardStep:
    """The host's forward step, on work items."""
    from megatron.core.utils import get_attr_wrapped_model

    def step(items: Iterator[WorkItem], model: Any) -> tuple[Tensor, LossFunction]:
        batches = iter([micro_batch(next(items), idle)])
        output, loss_func = forward_step_func(batches, model)
        # a stage between the first and the last needs nothing of a batch
        needs_batch = any(get_attr_wrapped_model(model, name) for name in ("pre_process", "post_process"))
        if needs_batch and next(batches, None) is not None:
            raise ConfigError(
                "the forward step did not take its batch from its iterator, and so ran another one: needs a forward "
                "step that takes it on every rank, and doesn't broadcast it over tensor-parallel ranks"
            )
        return output, losses.scaled(loss_func)

    return step
