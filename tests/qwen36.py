"""The tiny Qwen3.6 of the tests, and bodies for rank processes that run it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from megatron_longstraw.config import ModelConfig, ParallelConfig, RunConfig, ScheduleConfig
from megatron_longstraw.float64 import keep_float64
from megatron_longstraw.rollouts import RolloutGroup
from tests.exactness import two_steps
from tests.ranks import Layout

TINY = ModelConfig(
    architecture="qwen36",
    vocab_size=256,
    rotary_base=10_000_000,
    rotary_percent=0.25,
    transformer={
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
)
# sizes that divide nothing, neither the delta rule's 64 nor each other
UNEVEN = ScheduleConfig(prompt_chunk_tokens=27, page_tokens=7, attention_block_tokens=19, log_prob_block_tokens=5)


def qwen_run(layout: Layout, dtype: str = "float64", **changes: Any) -> RunConfig:
    """A run of the tiny model; `changes` are fields of `ScheduleConfig`, or of TransformerConfig in "transformer"."""
    transformer = {**TINY.transformer, **changes.pop("transformer", {})}
    return RunConfig(
        model=dataclasses.replace(TINY, transformer=transformer),
        parallel=ParallelConfig(tp=layout.tp, pp=layout.pp, vpp=layout.vpp),
        schedule=dataclasses.replace(UNEVEN, **changes),
        dtype=dtype,  # type: ignore[arg-type]
    )


def build_remembering_model(run: RunConfig, **kwargs: Any) -> list[Any]:
    """`build_ddp_model` with recurrent states that last.

    With Megatron's initial A_log and dt_bias a state falls to a few percent within a token, so whatever is carried
    over a chunk boundary would hardly matter. exp(-4) of that decay remembers for tens of tokens.
    """
    from megatron_longstraw import trainer
    from megatron_longstraw.models.parameters import named_parameters

    model = trainer.build_ddp_model(run, **kwargs)
    for item in named_parameters(trainer.unwrapped(model)):
        if item.name.endswith("A_log"):
            item.parameter.data.sub_(4.0)
    return model


@contextlib.contextmanager
def precision(run: RunConfig) -> Iterator[None]:
    """Float64 runs without the float32 casts inside Megatron."""
    with keep_float64() if run.dtype == "float64" else contextlib.nullcontext():
        yield


def qwen_two_steps(run: RunConfig, groups: list[RolloutGroup], plain_attention: str = "longstraw") -> dict[str, Any]:
    """`two_steps` of a model that remembers."""
    from megatron_longstraw import trainer

    original = trainer.build_ddp_model

    def build(*args: Any, **kwargs: Any) -> list[Any]:
        with mock.patch.object(trainer, "build_ddp_model", original):
            return build_remembering_model(*args, **kwargs)

    with mock.patch.object(trainer, "build_ddp_model", build):
        return two_steps(run, groups, plain_attention)


def flat_gradient(model: list[Any]) -> torch.Tensor:
    """This rank's gradients in one vector."""
    return torch.cat([p.main_grad.flatten() for chunk in model for p in chunk.parameters()]).clone()
