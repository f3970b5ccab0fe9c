"""Qwen3.6: three Gated DeltaNet layers, then one of gated full attention, from Megatron's modules.

Source: HuggingFace transformers 5.24, models/qwen3_5 (text), whose logits and gradients these settings equal.
Full attention is Megatron's `SelfAttention` with output gate, norms of queries and keys, and partial rotary
embedding, over the prompt's owned rows as in `megatron_longstraw.models.gqa`.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_longstraw.models.gated_delta_net import RULE_CHUNK, PromptGatedDeltaNet
from megatron_longstraw.models.gqa import gqa_layer_spec
from megatron_longstraw.models.weight_map import Piece, Source, WeightMap
from megatron_longstraw.prompt_state import Runtime

QWEN36_SETTINGS: dict[str, Any] = {
    "layernorm_epsilon": 1e-6,
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_conv_kernel_dim": 4,
}
"""What the architecture sets of Megatron's TransformerConfig, unless model.transformer says otherwise."""


def qwen36_layer_specs(
    config: Any, backend: BackendSpecProvider, runtime: Runtime, plain_attention: str = "longstraw"
) -> list[ModuleSpec]:
    """Specs of all layers of the model, in order; linear_attention_freq says which are recurrent."""
    full = gqa_layer_spec(config, backend, runtime, plain_attention)
    delta_net = ModuleSpec(
        module=PromptGatedDeltaNet,
        params={"runtime": runtime},
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_layer_norm_linear(),
            out_norm=backend.layer_norm(rms_norm=config.normalization == "RMSNorm"),
            out_proj=backend.row_parallel_linear(),
        ),
    )
    submodules = dataclasses.replace(full.submodules, input_layernorm=IdentityOp, self_attention=delta_net)
    recurrent = dataclasses.replace(full, submodules=submodules)
    pattern = get_linear_attention_pattern(config)
    if any(pattern):  # of the whole model, so that all pipeline stages run the same work
        runtime.recurrent, runtime.sequence_multiple = True, RULE_CHUNK
    return [recurrent if is_recurrent else full for is_recurrent in pattern]


def qwen36_weight_map(config: Any) -> WeightMap:
    """The weight map of HuggingFace's ``qwen3_5`` text model; see `megatron_longstraw.weights`.

    Written checkpoints are of Qwen3_5ForCausalLM; those of the whole model with images are read too, where the
    text model's tensors lie under ``model.language_model``.

    Args:
        config: Megatron's, for head counts and dimensions.
    """

    def weight_map(name: str) -> list[Source]:
        if name in _HUGGINGFACE_NAMES:
            pieces, offset = [Piece(_HUGGINGFACE_NAMES[name])], 0.0
        else:
            match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
            if match is None:
                raise KeyError(f"{name}: no parameter of Qwen3.6")
            pieces, offset = _layer_pieces(f"model.layers.{match[1]}.", match[2], config)
        sources = [Source(pieces, offset)]
        whole = [dataclasses.replace(p, name=p.name.replace("model.", "model.language_model.", 1)) for p in pieces]
        sources.append(Source(whole, offset))
        if name == "output_layer.weight":  # tied to the embedding
            sources += weight_map("embedding.word_embeddings.weight")
        return sources

    return weight_map


_HUGGINGFACE_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
# names with layer_norm_weight are of layers with the norm in them
_LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.conv1d.weight": "linear_attn.conv1d.weight",
    "self_attention.A_log": "linear_attn.A_log",
    "self_attention.dt_bias": "linear_attn.dt_bias",
    "self_attention.out_norm.weight": "linear_attn.norm.weight",
    "self_attention.out_proj.weight": "linear_attn.out_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def _layer_pieces(layer: str, name: str, config: Any) -> tuple[list[Piece], float]:
    """Pieces of a layer's parameter, and Megatron's value minus HuggingFace's."""
    if name == "self_attention.in_proj.weight":
        return list(_in_proj_pieces(f"{layer}linear_attn.", config)), 0.0
    if name == "self_attention.linear_qkv.weight":
        return list(_linear_qkv_pieces(f"{layer}self_attn.", config)), 0.0
    if name == "mlp.linear_fc1.weight":
        return [Piece(f"{layer}mlp.{projection}_proj.weight") for projection in ("gate", "up")], 0.0
    if name not in _LAYER_NAMES:
        raise KeyError(f"{layer}{name}: no parameter of Qwen3.6")
    # HuggingFace keeps this one norm's weight as it is, and all others zero-centred
    offset = -1.0 if name == "self_attention.out_norm.weight" else 0.0
    return [Piece(layer + _LAYER_NAMES[name])], offset


def _in_proj_pieces(prefix: str, config: Any) -> Iterator[Piece]:
    """Megatron: rows of queries, keys, values, output gate, beta, alpha in one matrix; HuggingFace: four."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    heads = config.linear_num_value_heads
    for projection, rows in (("qkv", 2 * keys + values), ("z", values), ("b", heads), ("a", heads)):
        yield Piece(f"{prefix}in_proj_{projection}.weight", 0, rows)


def _linear_qkv_pieces(prefix: str, config: Any) -> Iterator[Piece]:
    """Megatron: per KV head its query heads, their gates, key, value. HuggingFace's q_proj: per head query, gate."""
    groups, dim = config.num_query_groups, config.kv_channels
    per_group = config.num_attention_heads // groups
    for group in range(groups):
        for part in (0, 1):  # query, gate
            for head in range(group * per_group, (group + 1) * per_group):
                first = (2 * head + part) * dim
                yield Piece(f"{prefix}q_proj.weight", first, first + dim)
        for projection in ("k", "v"):
            yield Piece(f"{prefix}{projection}_proj.weight", group * dim, (group + 1) * dim)
