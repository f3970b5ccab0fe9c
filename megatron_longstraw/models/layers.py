"""What every architecture shares: a layer that knows its phase, RoPE with an offset, and the log-prob head.

Layers are Megatron's own; what is added:
- `PromptLayer` recomputes its forward in backward, as part of the micro-batch it was first run for, and stops
  where only the prompt's state is wanted.
- `OffsetRotaryEmbedding` starts at the segment's first position.
- `PromptGPTModel` computes no head for prompt chunks; `log_prob_head` is its head for responses, given to
  `GPTModel.forward` through Megatron's own ``output_processor``.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_moe_layer_pattern
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_longstraw.logprobs import vocab_parallel_log_probs
from megatron_longstraw.prompt_state import Phase, Runtime


class PromptLayer(TransformerLayer):
    """Megatron's layer, run in the phase that the runtime says.

    Args:
        runtime: the model's runtime.
        kwargs: TransformerLayer's own.
    """

    def __init__(self, *args: Any, runtime: Runtime, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = runtime
        self.is_last = self.layer_number == self.config.num_layers

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        runtime = self.runtime
        if runtime.segment.phase is Phase.RECAPTURE:
            return _WithoutGraph.apply(hidden_states, lambda x: self._forward(x, *args, **kwargs)[0]), None
        # a stock sequence is recomputed by Megatron itself, if at all
        if not runtime.recomputes:
            return self._forward(hidden_states, *args, **kwargs)
        resumption = runtime.resumption()

        def run(hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
            return self._forward(hidden_states, *args, **kwargs)

        return checkpoint(
            run,
            hidden_states,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing random is left: dropout is refused
            context_fn=lambda: (contextlib.nullcontext(), resumption),
        )

    def _forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        segment = self.runtime.segment
        if self.is_last and segment.is_prompt:
            hidden_states, context = self._forward_attention(hidden_states, *args, **kwargs)
            if segment.phase is Phase.CAPTURE and last_layer_counts(self.config):
                self.mlp.router(self.pre_mlp_layernorm(hidden_states))  # for its counts
            return hidden_states, context
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            # Megatron leaves it on the layer, where it keeps the hidden states and, after a recomputation, the
            # whole graph of the attention alive until the layer's next forward
            self.mlp_norm_manager = None


class _WithoutGraph(torch.autograd.Function):
    """A layer's output without its graph; backward hands on zeros, which pipeline stages wait for."""

    @staticmethod
    def forward(ctx, hidden_states, run):  # type: ignore[no-untyped-def]
        return run(hidden_states)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        return torch.zeros_like(dout), None


def last_layer_counts(config: Any) -> bool:
    """Whether the last layer's router counts prompt tokens, and so needs the attention output of prompt chunks."""
    if not (config.num_moe_experts and config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate):
        return False
    return bool(get_moe_layer_pattern(config)[-1])


class OffsetRotaryEmbedding(torch.nn.Module):
    """RoPE angles of the running segment's positions, from Megatron's own embedding.

    Megatron caches the angles of the last 32 lengths; with an offset nothing repeats, so nothing is cached.
    """

    def __init__(self, inner: Any, runtime: Runtime) -> None:
        super().__init__()
        self.inner, self.runtime = inner, runtime

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return self.inner.get_rotary_seq_len(*args, **kwargs)

    def get_cos_sin(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.get_cos_sin(*args, **kwargs)

    def forward(self, max_seq_len: int, **_: Any) -> Tensor:
        segment = self.runtime.segment
        lengths = [s.stop - s.start for s in segment.sequences(max_seq_len)]
        angles = self.inner.get_emb(max(lengths), segment.start)
        return torch.cat([angles[:length] for length in lengths])


def give_offset_rotary(model: torch.nn.Module, runtime: Runtime) -> None:
    """Puts `OffsetRotaryEmbedding` in the place of a model's embeddings of positions."""
    # GPTModel has one; with latent attention each layer, and each index, has its own
    for module in list(model.modules()):
        inner = getattr(module, "rotary_pos_emb", None)
        if isinstance(inner, RotaryEmbedding):
            module.rotary_pos_emb = OffsetRotaryEmbedding(inner, runtime)


class _NoLoss(torch.autograd.Function):
    """Losses [1, T] of zero in place of a head; backward hands on zeros, whatever comes in."""

    @staticmethod
    def forward(ctx, hidden_states, shape):  # type: ignore[no-untyped-def]
        ctx.like = hidden_states.shape, hidden_states.dtype, hidden_states.device
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        return torch.zeros(shape, dtype=dtype, device=hidden_states.device)

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device), None


class PromptGPTModel(GPTModel):
    """GPTModel without a head for prompt chunks: given labels [1, T] it returns losses [1, T] of zero, as a host's
    forward step expects a tensor of that shape; else the last hidden states.

    Args:
        runtime: the model's runtime, shared by all model chunks of a rank.
        kwargs: GPTModel's own.
    """

    def __init__(self, *args: Any, runtime: Runtime, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = runtime
        give_offset_rotary(self, runtime)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        segment = self.runtime.segment
        if segment.is_prompt or segment.phase is Phase.IDLE:
            labels = kwargs.get("labels")
            return (
                _NoLoss.apply(hidden_states, labels.shape)
                if self.post_process and labels is not None
                else hidden_states
            )
        return super()._postprocess(hidden_states, *args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class HeadInput:
    """What `log_prob_head` needs of a micro-batch.

    Args:
        targets: [n] ids whose log-probs are wanted.
        first_row: the row (token of the micro-batch) that predicts the first of them.
        temperature: logits are divided by it.
        block_tokens: tokens whose logits exist at once.
        with_entropy: whether the entropy of each prediction is wanted too.
    """

    targets: Tensor
    first_row: int
    temperature: float
    block_tokens: int
    with_entropy: bool = False


def log_prob_head(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, config: Any, context: HeadInput, **_: Any
) -> Tensor:
    """Log-probs of the targets, as an ``output_processor`` of `GPTModel.forward`.

    Returns:
        [1, n] log-probs, or [2, n] log-probs and entropies; float32, or float64 for float64 models.
    """
    group = output_layer.tp_group
    if config.sequence_parallel:
        hidden_states = tensor_parallel.gather_from_sequence_parallel_region(hidden_states, group=group)
    else:
        hidden_states = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states, group=group)
    rows = hidden_states[context.first_row : context.first_row + len(context.targets), 0]
    log_probs, entropy = vocab_parallel_log_probs(
        rows,
        output_layer.weight if output_weight is None else output_weight,
        context.targets,
        temperature=context.temperature,
        block_tokens=context.block_tokens,
        group=group,
        with_entropy=context.with_entropy,
    )
    return log_probs[None] if entropy is None else torch.stack([log_probs, entropy])
