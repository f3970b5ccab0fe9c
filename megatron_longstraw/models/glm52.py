"""GLM-5.2: latent attention with a sparse index shared over layers, and mixture of experts, from Megatron's modules.

Source: HuggingFace transformers 5.24, models/glm_moe_dsa, whose logits and gradients these settings equal. The first
layers are dense, the others have routed experts and a shared one.
"""

import re
from collections.abc import Sequence
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_moe_layer_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_longstraw.config import ScheduleConfig
from megatron_longstraw.models.layers import PromptLayer
from megatron_longstraw.models.mla import latent_attention
from megatron_longstraw.models.moe import moe_layer
from megatron_longstraw.models.weight_map import Piece, Source
from megatron_longstraw.prompt_state import Runtime

GLM52_SETTINGS: dict[str, Any] = {
    "multi_latent_attention": True,
    "experimental_attention_variant": "dsa",
    "layernorm_epsilon": 1e-5,
    "qk_layernorm": True,
    "rope_type": "rope",  # Megatron's default for latent attention is YaRN with factor 40
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "apply_rope_fusion": False,
    "dsa_indexer_rope_interleaved": True,
    "dsa_indexer_rotate_activation": False,
    "dsa_indexer_scoring_relu": True,
    "dsa_indexer_k_norm_epsilon": 1e-6,
    "dsa_indexer_topk_freq": 4,
    "dsa_indexer_skip_topk_offset": 3,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}
"""What the architecture sets of Megatron's MLATransformerConfig, unless model.transformer says otherwise."""

_LATENT_NORM_EPSILON = 1e-6


def glm52_layer_specs(
    config: Any, backend: BackendSpecProvider, runtime: Runtime, plain_attention: str, schedule: ScheduleConfig
) -> list[ModuleSpec]:
    """Specs of all layers of the model, in order; moe_layer_freq says which have experts."""
    attention = latent_attention(
        config,
        backend,
        runtime=runtime,
        plain_attention=plain_attention,
        query_block=schedule.query_block_tokens,
        key_block=schedule.attention_block_tokens,
    )
    norm = backend.layer_norm(rms_norm=config.normalization == "RMSNorm")
    fused = backend.fuse_layernorm_and_linear()

    def layer(mlp: Any, pre_mlp_layernorm: Any) -> ModuleSpec:
        return ModuleSpec(
            module=PromptLayer,
            params={"runtime": runtime},
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=attention,
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=pre_mlp_layernorm,
                mlp=mlp,
                mlp_bda=get_bias_dropout_add,
            ),
        )

    dense = layer(get_mlp_module_spec_for_backend(backend=backend), IdentityOp if fused else norm)
    sparse = layer(moe_layer(config, backend, runtime), norm) if config.num_moe_experts else dense
    pattern = get_moe_layer_pattern(config) if config.num_moe_experts else [0] * config.num_layers
    return [sparse if has_experts else dense for has_experts in pattern]


def set_latent_norm_epsilon(model: Any) -> None:
    """Megatron builds the norms of latents with the layers' epsilon; GLM-5.2's is its own."""
    for name, module in model.named_modules():
        if name.endswith((".q_layernorm", ".kv_layernorm")):
            module.eps = _LATENT_NORM_EPSILON


def glm52_weight_map(name: str) -> Sequence[Source]:
    """The weight map of HuggingFace's ``glm_moe_dsa``; see `megatron_longstraw.models.weight_map`."""
    if name in _OUTER:
        return [Source([Piece(_OUTER[name])])]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if match is None:
        raise KeyError(f"GLM-5.2 has no parameter {name}")
    prefix, inner = f"model.layers.{match[1]}.", match[2]
    if inner in _INNER:
        return [Source([Piece(prefix + _INNER[inner])])]
    return _mlp_sources(prefix, inner)


def _mlp_sources(prefix: str, inner: str) -> Sequence[Source]:
    match = re.fullmatch(r"mlp\.(?:(shared_experts)\.|experts\.local_experts\.(\d+)\.)?linear_fc([12])\.weight", inner)
    if match is None:
        raise KeyError(f"GLM-5.2 has no parameter {inner} in a layer")
    shared, expert, fc = match.groups()
    folder = prefix + "mlp." + (f"{shared}." if shared else f"experts.{expert}." if expert else "")
    projections = ("gate_proj", "up_proj") if fc == "1" else ("down_proj",)
    sources = [Source([Piece(f"{folder}{p}.weight") for p in projections])]
    if expert:  # transformers keeps experts in one tensor, and writes them one by one
        stacked = "gate_up_proj" if fc == "1" else "down_proj"
        sources.append(Source([Piece(f"{prefix}mlp.experts.{stacked}", entry=int(expert))]))
    return sources


_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}

_INNER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.core_attention.indexer.linear_wq_b.weight": "self_attn.indexer.wq_b.weight",
    "self_attention.core_attention.indexer.linear_wk.weight": "self_attn.indexer.wk.weight",
    "self_attention.core_attention.indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "self_attention.core_attention.indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "self_attention.core_attention.indexer.linear_weights_proj.weight": "self_attn.indexer.weights_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
