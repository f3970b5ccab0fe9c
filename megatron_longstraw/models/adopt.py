"""Makes a GPTModel that Megatron built run the schedule, in place: same parameters, names and checkpoints."""

from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_longstraw.config import ConfigError, check_transformer_settings
from megatron_longstraw.distributed import check_process_groups, consecutive_group
from megatron_longstraw.models.gqa import PromptCoreAttention
from megatron_longstraw.models.layers import PromptGPTModel, PromptLayer, give_offset_rotary
from megatron_longstraw.prompt_state import Runtime


def adopt(model: Any) -> Any:
    """Gives a host's dense GPTModel what the schedule needs; outside the schedule it computes what it did.

    Layers, linear layers and norms stay the host's (Megatron's local ones or Transformer Engine's), and so do
    parameters and their names. Each layer's core attention is replaced by one that knows the prompt, and runs the
    host's where the schedule isn't.

    Args:
        model: model, or list of this rank's model chunks, as Megatron's model provider made it, wrapped in
            Float16Module and DistributedDataParallel or not. All ranks adopt together.

    Returns:
        The same object.

    Raises:
        ConfigError: a part that the schedule can't run; names it. The model is then as it was.
    """
    chunks = [_unwrapped(chunk) for chunk in (model if isinstance(model, list | tuple) else [model])]
    if all(isinstance(chunk, PromptGPTModel) for chunk in chunks):
        return model
    for chunk in chunks:
        _check(chunk)
    runtime = Runtime()
    config = chunks[0].config
    owners = max(config.tensor_model_parallel_size // config.num_query_groups, 1)
    if owners > 1:
        consecutive_group(owners)  # all ranks make groups together, also one whose stage has no layer
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            attention = layer.self_attention
            attention.core_attention = PromptCoreAttention(
                layer.config,
                layer.layer_number,
                attention.attn_mask_type,
                attention.attention_type,
                layer.config.softmax_scale,
                runtime=runtime,
                plain_attention=attention.core_attention,
            )
            if owners > 1:
                attention.core_attention.share_rows(owners)
            layer.__class__ = PromptLayer
            layer.runtime = runtime
            layer.is_last = layer.layer_number == layer.config.num_layers
        give_offset_rotary(chunk, runtime)
        chunk.__class__ = PromptGPTModel
        chunk.runtime = runtime
    return model


def _unwrapped(chunk: Any) -> Any:
    while not isinstance(chunk, GPTModel) and hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _check(chunk: Any) -> None:
    """Refuses what `adopt` can't make run exactly."""
    if type(chunk) is not GPTModel:
        raise ConfigError(f"{type(chunk).__name__} can't be adopted: needs megatron.core.models.gpt.GPTModel itself")
    check_transformer_settings(vars(chunk.config))
    check_process_groups(chunk.pg_collection, "the model's pg_collection")
    if chunk.position_embedding_type != "rope" or type(chunk.rotary_pos_emb) is not RotaryEmbedding:
        raise ConfigError(f"position_embedding_type={chunk.position_embedding_type} can't be adopted: needs rope")
    for layer in chunk.decoder.layers:
        parts = {
            "the layer": (layer, TransformerLayer),
            "self_attention": (getattr(layer, "self_attention", None), SelfAttention),
            "cross_attention": (getattr(layer, "cross_attention", None), IdentityOp),
            "mlp": (getattr(layer, "mlp", None), MLP),
        }
        for name, (part, needed) in parts.items():
            if type(part) is not needed:
                raise ConfigError(
                    f"decoder layer {layer.layer_number}: {name} is a {type(part).__name__} and can't be adopted: "
                    f"needs {needed.__name__}; megatron_longstraw.models builds other architectures"
                )
        mask = layer.self_attention.attn_mask_type
        if mask is not AttnMaskType.causal:
            raise ConfigError(f"decoder layer {layer.layer_number}: attn_mask_type={mask.name}: needs causal")
