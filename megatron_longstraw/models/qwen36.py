"""Qwen3.6: three Gated DeltaNet layers, then one of gated full attention, from Megatron's modules.

Source: HuggingFace transformers 5.24, models/qwen3_5 (text), whose logits and gradients these settings equal.
Full attention is Megatron's `SelfAttention` with output gate, norms of queries and keys, and partial rotary
embedding, over the prompt's owned rows as in `megatron_longstraw.models.gqa`.
"""

import dataclasses
from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_longstraw.models.gated_delta_net import PromptGatedDeltaNet
from megatron_longstraw.models.gqa import gqa_layer_spec
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
    runtime.recurrent = any(pattern)  # of the whole model, so that all pipeline stages run the same work
    return [recurrent if is_recurrent else full for is_recurrent in pattern]
