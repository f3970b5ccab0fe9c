"""What the patches in patches/ call: ``--longstraw`` of Megatron's own training loop.

The arguments are declared by the patch, so that a patched Megatron runs without this package where ``--longstraw`` is
not given.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_longstraw.config import ConfigError, ScheduleConfig, check_transformer_settings

_NEEDED: dict[str, tuple[tuple[Any, ...], str]] = {
    "micro_batch_size": ((1,), "a host's mean over the samples of a micro-batch can't be split"),
    "eval_micro_batch_size": ((1,), "a host's mean over the samples of a micro-batch can't be split"),
    "overlap_grad_reduce": ((False,), "gradients are reduced once, after the last group"),
    "overlap_param_gather": ((False,), "parameters are gathered by the optimizer, before the step"),
    "use_megatron_fsdp": ((False,), "parameters must be whole while a group runs"),
    "use_torch_fsdp2": ((False,), "parameters must be whole while a group runs"),
    "position_embedding_type": (("rope",), "a segment's first position reaches the model through RoPE"),
    "num_experts": ((None,), "a host's experts can't be adopted"),
    "multi_latent_attention": ((False,), "a host's latent attention can't be adopted"),
    "experimental_attention_variant": ((None,), "a host's attention variants can't be adopted"),
    "moe_expert_rank_capacity_factor": ((None,), "it wraps the schedule"),
    "rl_use_sequence_packing": ((False,), "needs one sequence a micro-batch"),
    "sft": ((False,), "its batches are packed, and one sequence a micro-batch is needed"),
    "dataloader_inter_document_masking": ((False,), "needs one document a micro-batch"),
}
"""Argument -> (the values that are fine, why others are not)."""


def schedule_options(args: Namespace) -> ScheduleConfig:
    """The schedule's options from Megatron's arguments.

    Raises:
        ConfigError: a value of --longstraw-...; names it.
    """
    try:
        return ScheduleConfig(
            prompt_chunk_tokens=args.longstraw_prompt_chunk,
            prompt_gradient=args.longstraw_prompt_gradient,
            page_tokens=args.longstraw_page,
            recompute=not args.longstraw_no_recompute,
            keep_attention=not args.longstraw_no_keep_attention,
            state_gradient_dtype=args.longstraw_state_gradient_dtype,
        )
    except ConfigError as error:
        raise ConfigError(f"--longstraw-...: {error}") from None


def validate_arguments(args: Namespace) -> None:
    """Refuses Megatron's arguments with which --longstraw would not be exact; called at the end of `validate_args`.

    Raises:
        ConfigError: names the argument, its value, and what is needed.
    """
    from megatron_longstraw.integrations.megatron import check_version

    check_version()
    schedule_options(args)
    for name, (fine, reason) in _NEEDED.items():
        value = getattr(args, name)
        if value not in fine:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"--longstraw needs {name}={fine[0]} ({flag}), got {value!r}: {reason}")
    check_transformer_settings(vars(args), "--longstraw: ")
    if args.virtual_pipeline_model_parallel_size is not None and args.pipeline_model_parallel_size == 2:
        raise ConfigError(
            "--longstraw: an interleaved schedule with variable lengths needs --pipeline-model-parallel-size > 2 in "
            "Megatron: got 2"
        )


def schedule(args: Namespace) -> Callable[..., Any]:
    """What `get_forward_backward_func` means with --longstraw."""
    import functools

    from megatron_longstraw.drop_in import get_forward_backward_func

    return functools.partial(get_forward_backward_func, options=schedule_options(args))


def adopt(model: Any) -> Any:
    """As `megatron_longstraw.models.adopt.adopt`."""
    from megatron_longstraw.models.adopt import adopt as adopt_model

    return adopt_model(model)
