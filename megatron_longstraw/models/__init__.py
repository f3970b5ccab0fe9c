"""Builds the models that the schedule can run, from Megatron's modules."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.nn import functional as F

from megatron_longstraw import hooks
from megatron_longstraw.config import ConfigError, RunConfig
from megatron_longstraw.models.backend import latent_attention_takes, resolve_backend
from megatron_longstraw.models.gated_delta_net import resolve_delta_rule
from megatron_longstraw.models.glm52 import (
    GLM52_SETTINGS,
    glm52_layer_specs,
    glm52_weight_map,
    set_latent_norm_epsilon,
)
from megatron_longstraw.models.gqa import gqa_layer_spec
from megatron_longstraw.models.layers import PromptGPTModel
from megatron_longstraw.models.parameters import initialize_weights
from megatron_longstraw.models.qwen36 import QWEN36_SETTINGS, qwen36_layer_specs, qwen36_weight_map
from megatron_longstraw.models.weight_map import WeightMap
from megatron_longstraw.prompt_state import Runtime

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_EXTENSIONS = {
    "gradient_accumulation_fusion": (
        *("tensor_parallel.layers", "_grad_accum_fusion_available"),
        "Apex's fused_weight_gradient_mlp_cuda",
    ),
    "moe_router_fusion": (
        *("transformer.moe.moe_utils", "fused_topk_with_score_function"),
        "Transformer Engine 2.6 or newer",
    ),
    "dsa_indexer_rotate_activation": (
        *("transformer.experimental_attention_variant.dsa", "hadamard_transform"),
        "fast_hadamard_transform",
    ),
}
"""Switch of Megatron's -> where Megatron keeps what it found of the package that the switch needs."""
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
    backend, _ = resolve_backend(run.model.backend)
    runtime = Runtime()
    specs = _layer_specs(run, config, backend, runtime, plain_attention)
    chunks = []
    for vp_stage in range(run.parallel.vpp) if run.parallel.vpp else [None]:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        layers = get_num_layers_to_build(config, vp_stage=vp_stage)
        with latent_attention_takes(backend):
            chunk = PromptGPTModel(
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
        if run.model.architecture == "glm52":
            set_latent_norm_epsilon(chunk)
        chunks.append(chunk)
    initialize_weights(chunks, run.seed)
    return chunks


def weight_map(run: RunConfig) -> WeightMap:
    """How the architecture's parameters are made of HuggingFace tensors.

    Raises:
        ConfigError: no map of it is written.
    """
    if run.model.architecture == "qwen36":
        return qwen36_weight_map(transformer_config(run))
    if run.model.architecture == "glm52":
        return glm52_weight_map
    raise ConfigError(
        f"model.weights: HuggingFace weights of architecture {run.model.architecture} can't be read; "
        "only those of glm52 and qwen36"
    )


def chosen_kernels(run: RunConfig) -> dict[str, str]:
    """What the model of a run is built from on this machine: "layers", and "delta rule" of recurrent layers.

    It needs no process group, so a run can be checked before ranks start.

    Raises:
        ConfigError: Megatron refuses the settings, or what they ask for can't be used here.
    """
    config = transformer_config(run)
    kernels = {"layers": resolve_backend(run.model.backend)[1]}
    given = run.model.transformer  # as another architecture's defaults say True too
    for setting, (module, name, package) in _EXTENSIONS.items():
        if given.get(setting) and not hooks.value(module, name):
            raise ConfigError(
                f"model.transformer.{setting}=True can't be used: it needs {package}, which does not import; "
                "leave it unset"
            )
    if given.get("dsa_indexer_rotate_activation") and run.dtype != "bfloat16":
        raise ConfigError(f"model.transformer.dsa_indexer_rotate_activation=True needs dtype=bfloat16: got {run.dtype}")
    if run.model.architecture == "qwen36":
        kernels["delta rule"] = "torch" if config.deterministic_mode else "flash-linear-attention"
    return kernels


def _layer_specs(
    run: RunConfig, config: TransformerConfig, backend: BackendSpecProvider, runtime: Runtime, plain_attention: str
) -> list[ModuleSpec]:
    """Specs of all layers of the whole model, in order."""
    if run.model.architecture == "qwen36":
        return qwen36_layer_specs(config, backend, runtime, plain_attention)
    if run.model.architecture == "glm52":
        return glm52_layer_specs(config, backend, runtime, plain_attention, run.schedule)
    return [gqa_layer_spec(config, backend, runtime, plain_attention)] * config.num_layers


def _architecture_settings(run: RunConfig) -> dict[str, Any]:
    """What an architecture sets of Megatron's config, unless model.transformer says otherwise."""
    if run.model.architecture == "qwen36":
        delta_rule = resolve_delta_rule(run.model.transformer.get("deterministic_mode"))
        return QWEN36_SETTINGS | {"deterministic_mode": delta_rule == "torch"}
    if run.model.architecture == "glm52":
        router_dtype = "fp64" if run.dtype == "float64" else "fp32"
        return GLM52_SETTINGS | {
            "rotary_base": run.model.rotary_base,
            "rotary_percent": run.model.rotary_percent,
            "moe_router_dtype": router_dtype,
        }
    return {}


def transformer_config(run: RunConfig) -> TransformerConfig:
    """Megatron's config of a run: its defaults here, what model.transformer says, and what the layout says.

    Raises:
        ConfigError: what Megatron says of the whole; single settings were checked before.
    """
    config_class = MLATransformerConfig if run.model.architecture == "glm52" else TransformerConfig
    settings: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "batch_p2p_comm": torch.cuda.is_available(),
        "moe_token_dispatcher_type": "alltoall",  # Megatron wants it for variable lengths, also without experts
        **_architecture_settings(run),
        **{name: value for name, value in run.model.transformer.items() if value is not None},
    }
    dtype = DTYPES[run.dtype]
    settings |= {
        "activation_func": _ACTIVATIONS[settings["activation_func"]],
        "tensor_model_parallel_size": run.parallel.tp,
        "pipeline_model_parallel_size": run.parallel.pp,
        "virtual_pipeline_model_parallel_size": run.parallel.vpp,
        "expert_model_parallel_size": run.parallel.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": run.parallel.uses_sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": run.dtype == "bfloat16",
        "pipeline_model_parallel_layout": _pipeline_layout(run),
        "calculate_per_token_loss": True,  # the objective is normalised before the forward
        "perform_initialization": False,  # initialize_weights does it, the same for every layout
        "deallocate_pipeline_outputs": True,
    }
    try:
        config = config_class(**settings)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"model.transformer: Megatron refuses it: {error}") from error
    # set late: Megatron refuses it for the allgather dispatcher, which needs equal lengths in an expert-parallel
    # group only, and there a group within one tensor-parallel group has them (the run configuration sees to it)
    config.variable_seq_lengths = True
    return config


def _pipeline_layout(run: RunConfig) -> list[list[str]] | None:
    """parallel.pipeline_layers as Megatron has it: the layers of each stage, by their types."""
    if run.parallel.pipeline_layers is None:
        return None
    stages = [["decoder"] * layers for layers in run.parallel.pipeline_layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages
