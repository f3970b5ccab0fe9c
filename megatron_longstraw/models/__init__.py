"""Builds the models that the schedule can run, from Megatron's modules."""

import dataclasses
import logging
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.nn import functional as F

from megatron_longstraw.config import ConfigError, RunConfig
from megatron_longstraw.models.backend import resolve_backend
from megatron_longstraw.models.gated_delta_net import resolve_delta_rule
from megatron_longstraw.models.gqa import gqa_layer_spec
from megatron_longstraw.models.layers import PromptGPTModel
from megatron_longstraw.models.parameters import initialize_weights
from megatron_longstraw.models.qwen36 import QWEN36_SETTINGS, qwen36_layer_specs, qwen36_weight_map
from megatron_longstraw.models.weight_map import WeightMap
from megatron_longstraw.prompt_state import Runtime

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_log = logging.getLogger(__name__)
_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


def build_model(run: RunConfig, *, plain_attention: str = "longstraw") -> list[PromptGPTModel]:
    """This rank's model chunks (one, or one per virtual pipeline stage), initialised from the run's seed.

    Args:
        run: the run configuration; Megatron's parallel state must be laid out as it says.
        plain_attention: what runs stock sequences, "longstraw" or "megatron"; see `PromptCoreAttention`.

    Raises:
        ConfigError: a setting under model.transformer is unknown to Megatron or refused by it.
    """
    config = transformer_config(run)
    backend, backend_name = resolve_backend(run.model.backend)
    delta_rule = "torch" if config.deterministic_mode else "flash-linear-attention"
    _log.info("layer modules: %s%s", backend_name, f", delta rule: {delta_rule}" if _is_recurrent(run) else "")
    runtime = Runtime()
    specs = _layer_specs(run.model.architecture, config, backend, runtime, plain_attention)
    chunks = []
    for vp_stage in range(run.parallel.vpp) if run.parallel.vpp else [None]:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        layers = get_num_layers_to_build(config, vp_stage=vp_stage)
        chunks.append(
            PromptGPTModel(
                runtime=runtime,
                config=config,
                transformer_layer_spec=TransformerBlockSubmodules(
                    layer_specs=specs[first : first + layers],
                    layer_norm=backend.layer_norm(rms_norm=config.normalization == "RMSNorm"),
                ),
                vocab_size=run.model.vocab_size,
                max_sequence_length=2**24,  # RoPE has no table; positions are exact in float32 below this
                position_embedding_type="rope",
                rotary_base=run.model.rotary_base,
                rotary_percent=run.model.rotary_percent,
                share_embeddings_and_output_weights=run.model.tie_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                vp_stage=vp_stage,
            ).to(torch.cuda.current_device())
        )
    initialize_weights(chunks, run.seed)
    return chunks


def weight_map(run: RunConfig) -> WeightMap:
    """How the architecture's parameters are made of HuggingFace tensors.

    Raises:
        ConfigError: the architecture has no HuggingFace form here.
    """
    if run.model.architecture == "qwen36":
        return qwen36_weight_map(transformer_config(run))
    raise ConfigError(f"model.architecture={run.model.architecture}: its HuggingFace weights are not mapped")


def _is_recurrent(run: RunConfig) -> bool:
    return run.model.architecture == "qwen36"


def _layer_specs(
    architecture: str, config: TransformerConfig, backend: BackendSpecProvider, runtime: Runtime, plain_attention: str
) -> list[ModuleSpec]:
    """Specs of all layers of the whole model, in order."""
    if architecture == "qwen36":
        return qwen36_layer_specs(config, backend, runtime, plain_attention)
    return [gqa_layer_spec(config, backend, runtime, plain_attention)] * config.num_layers


def _architecture_settings(run: RunConfig) -> dict[str, Any]:
    """What an architecture sets of Megatron's config, unless model.transformer says otherwise."""
    if _is_recurrent(run):
        delta_rule = resolve_delta_rule(run.model.transformer.get("deterministic_mode"))
        return QWEN36_SETTINGS | {"deterministic_mode": delta_rule == "torch"}
    return {}


def transformer_config(run: RunConfig) -> TransformerConfig:
    """Megatron's config of a run: its defaults here, what model.transformer says, and what the layout says.

    Raises:
        ConfigError: names the setting that Megatron does not know, or what it says of the whole.
    """
    known = {f.name for f in dataclasses.fields(TransformerConfig)}
    for name in run.model.transformer:
        if name not in known:
            raise ConfigError(f"model.transformer.{name} is not a field of Megatron's TransformerConfig")
    settings: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "moe_token_dispatcher_type": "alltoall",  # Megatron wants it for variable lengths, also without experts
        **_architecture_settings(run),
        **run.model.transformer,
    }
    activation = settings["activation_func"]
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"model.transformer.activation_func={activation!r}: it can be {', '.join(_ACTIVATIONS)}")
    dtype = DTYPES[run.dtype]
    settings |= {
        "activation_func": _ACTIVATIONS[activation],
        "tensor_model_parallel_size": run.parallel.tp,
        "pipeline_model_parallel_size": run.parallel.pp,
        "virtual_pipeline_model_parallel_size": run.parallel.vpp,
        "expert_model_parallel_size": run.parallel.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": run.parallel.uses_sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": run.dtype == "bfloat16",
        "variable_seq_lengths": True,
        "calculate_per_token_loss": True,  # the objective is normalised before the forward
        "perform_initialization": False,  # initialize_weights does it, the same for every layout
        "deallocate_pipeline_outputs": True,
        "batch_p2p_comm": torch.cuda.is_available(),
    }
    try:
        return TransformerConfig(**settings)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"model.transformer: Megatron refuses it: {error}") from error
