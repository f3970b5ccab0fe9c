"""Dense decoder with grouped-query attention (Llama, Qwen, Mistral and their kin), from Megatron's modules.

A KV head's rows are owned by the TP rank that has the head. Where TP > KV heads, Megatron gives several ranks
the same head; each then owns 1/W of its rows, in pages.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megatron_longstraw.attention import PromptRows, prompt_attention
from megatron_longstraw.config import ConfigError
from megatron_longstraw.distributed import consecutive_group
from megatron_longstraw.models.layers import PromptLayer
from megatron_longstraw.prompt_state import OwnedRows, Phase, Runtime
from megatron_longstraw.row_gradients import inject_row_gradients, root_at_rows


class PromptCoreAttention(MegatronModule):
    """Core attention of Megatron's `SelfAttention` over the prompt's owned rows.

    Args:
        runtime: the model's runtime.
        plain_attention: what runs a stock sequence: "longstraw" is this module without prompt rows,
            "megatron" is Megatron's own DotProductAttention (its scores are [heads, tokens, tokens]); or the module
            that does.
        others: as Megatron's core attention modules.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        runtime: Runtime,
        plain_attention: str | torch.nn.Module = "longstraw",
    ) -> None:
        super().__init__(config=config)
        half = config.params_dtype in (torch.bfloat16, torch.float16)
        if half and torch.cuda.is_available() and (config.kv_channels % 8 or config.kv_channels > 256):
            raise ConfigError(
                f"model.transformer.kv_channels={config.kv_channels}: flash attention on a GPU needs a multiple of 8, "
                "256 at most"
            )
        self.runtime = runtime
        self.layer_number = layer_number
        self.is_last = layer_number == config.num_layers
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        # SelfAttention sets num_query_groups to the TP size where ranks share a KV head
        self.owners = 1
        self.group: dist.ProcessGroup | None = None
        if plain_attention == "megatron":
            plain_attention = DotProductAttention(
                config, layer_number, attn_mask_type, attention_type, None, softmax_scale, None, pg_collection
            )
        # in a tuple: it has no parameters, and is no part of a checkpoint
        self._plain = () if isinstance(plain_attention, str) else (plain_attention,)

    def share_rows(self, ranks: int) -> None:
        """Splits a KV head's rows over the `ranks` consecutive TP ranks that Megatron gives the same head."""
        self.owners, self.group = ranks, consecutive_group(ranks)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attention of [T, 1, H, D] queries over [T, 1, K, D] keys and the prompt; returns [T, 1, H * D]."""
        phase = self.runtime.segment.phase
        stateless = phase in (Phase.PLAIN, Phase.IDLE)
        if stateless and self._plain:
            return self._plain[0](
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
            )
        if attention_bias is not None or packed_seq_params is not None or query.shape[1] != 1:
            raise ValueError(
                "prompt attention takes micro-batches [T, 1, hidden], without bias or Megatron's packing: "
                f"got micro-batch size {query.shape[1]}, attention_bias "
                f"{'set' if attention_bias is not None else 'unset'}, "
                f"packing {'on' if packed_seq_params is not None else 'off'}"
            )
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        if stateless:
            out = prompt_attention(q, k, v, None, self.softmax_scale)
        else:
            out = self._attend(q, k, v)
        return out.reshape(out.shape[0], 1, -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        segment, attend = self.runtime.segment, self.runtime.attend_of(self.layer_number)
        sequences = segment.sequences(len(q))
        rows = self._rows(k, v) if self.runtime.current_state().length else None
        if rows is None:
            return prompt_attention(q, k, v, None, self.softmax_scale, sequences, attend)
        if segment.phase is Phase.CAPTURE:
            rows.write(segment, key=k, value=v)
        if self.is_last and segment.is_prompt:
            if segment.phase is Phase.PROMPT:
                return root_at_rows(q, v.shape[-1], rows, segment, key=k, value=v)
            return torch.zeros_like(q)
        if segment.phase is Phase.PROMPT:
            k, v = inject_row_gradients(rows, segment, key=k, value=v)
        block_tokens = self.runtime.current_state().options.attention_block_tokens
        prompt = PromptRows(rows, segment.start, block_tokens, self.group)
        return prompt_attention(q, k, v, prompt, self.softmax_scale, sequences, attend)

    def _rows(self, k: Tensor, v: Tensor) -> OwnedRows:
        return self.runtime.current_state().rows(
            self.layer_number,
            shapes={"key": tuple(k.shape[1:]), "value": tuple(v.shape[1:])},
            owner_rank=dist.get_rank(self.group) if self.group is not None else 0,
            owners=self.owners,
            dtype=k.dtype,
            device=k.device,
        )


class PromptSelfAttention(SelfAttention):
    """Megatron's SelfAttention, which tells its core attention how many TP ranks share a KV head."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.num_query_groups < self.world_size:
            self.core_attention.share_rows(self.world_size // self.config.num_query_groups)


def gqa_layer_spec(
    config: Any, backend: BackendSpecProvider, runtime: Runtime, plain_attention: str = "longstraw"
) -> ModuleSpec:
    """Spec of one dense layer: Megatron's modules with `PromptCoreAttention` in them."""
    if config.num_query_groups < config.tensor_model_parallel_size:
        # all ranks make groups together, also one whose stage has no such layer
        consecutive_group(config.tensor_model_parallel_size // config.num_query_groups)
    fused = backend.fuse_layernorm_and_linear()
    rms = config.normalization == "RMSNorm"
    norm = IdentityOp if fused else backend.layer_norm(rms_norm=rms)
    qk_norm = backend.layer_norm(rms_norm=rms, for_qk=True) if config.qk_layernorm else None
    linear_qkv: Any = backend.column_parallel_layer_norm_linear() if fused else backend.column_parallel_linear()

    def core_attention(*args: Any, **kwargs: Any) -> PromptCoreAttention:
        return PromptCoreAttention(*args, runtime=runtime, plain_attention=plain_attention, **kwargs)

    return ModuleSpec(
        module=PromptLayer,
        params={"runtime": runtime},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=PromptSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=linear_qkv,
                    core_attention=core_attention,
                    linear_proj=backend.row_parallel_linear(),
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=get_mlp_module_spec_for_backend(backend=backend),
            mlp_bda=get_bias_dropout_add,
        ),
    )
