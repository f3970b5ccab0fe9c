"""Counts the floating-point operations of what runs, by the formulas of torch's FlopCounterMode.

A multiplication and an addition are two. What counts is what runs, recomputation included: matrix products and
convolutions (torch's own formulas; ours for a product that is added in place) and flash attention, for which
torch's formula knows neither fewer KV heads than query heads, nor causality, nor the CPU's operator; ours is below.
Attention over n pairs of a query and a key that it may see costs 2n(D + E) forward and 2n(3D + 2E) backward per head,
for keys of D and values of E numbers: causal attention of a segment over itself has T(T + 1)/2 pairs, about half of
T x T. Pointwise work is not counted.

What torch's dispatcher does not see is not counted either: the products of Transformer Engine, the delta rule of
flash-linear-attention, grouped products of experts, and Megatron's fused accumulation of weight gradients.
`uncounted` says which of them a model has.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

_aten = torch.ops.aten
_Shape = Sequence[int]


class FlopCounter(TorchDispatchMode):
    """Counts this rank's operations while it is entered, in `total`.

    FlopCounterMode itself, which tells them module by module, hooks every output of a module and so keeps graphs
    alive that would be gone: peak bytes double under it, and what fits without it may not fit with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._formulas = FlopCounterMode(display=False, custom_mapping=_FORMULAS).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        return out


def uncounted(config: Any, backend: str) -> str | None:
    """What of a model's products is invisible to the counter; None where nothing is.

    Args:
        config: Megatron's TransformerConfig.
        backend: of `megatron_longstraw.models.backend.resolve_backend`: "local" or "transformer_engine".
    """
    if backend == "transformer_engine":
        return "Transformer Engine's products"
    if config.experimental_attention_variant == "gated_delta_net" and not config.deterministic_mode:
        return "flash-linear-attention's delta rule"
    if config.num_moe_experts and config.moe_grouped_gemm:
        return "grouped products of experts"
    if config.gradient_accumulation_fusion:
        return "Megatron's fused accumulation of weight gradients"
    return None


def _pairs(query: _Shape, key: _Shape, causal: bool) -> int:
    """Pairs of a query and a key that it sees, over the heads of [batch, heads, tokens, dim]."""
    batch, heads, tokens, _ = query
    return batch * heads * (tokens * (tokens + 1) // 2 if causal else tokens * key[2])


def _forward(
    query: _Shape, key: _Shape, value: _Shape, dropout: float = 0.0, causal: bool = False, *_: Any, **__: Any
) -> int:
    return 2 * _pairs(query, key, causal) * (key[3] + value[3])


def _backward(query: _Shape, key: _Shape, value: _Shape, causal: bool) -> int:
    # scores again, then the gradients of values, scores, queries and keys
    return 2 * _pairs(query, key, causal) * (3 * key[3] + 2 * value[3])


def _cpu_backward(
    dout: _Shape, query: _Shape, key: _Shape, value: _Shape, out: Any, lse: Any, dropout: float, causal: bool, **_: Any
) -> int:
    return _backward(query, key, value, causal)


def _cuda_backward(dout: _Shape, query: _Shape, key: _Shape, value: _Shape, *others: Any, **_: Any) -> int:
    causal = others[7]  # after out, lse, two starts of sequences, two lengths, dropout
    return _backward(query, key, value, causal)


def _in_place_product(total: _Shape, left: _Shape, right: _Shape, **_: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


_FORMULAS = {
    _aten.addmm_: _in_place_product,
    _aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_backward,
    _aten._scaled_dot_product_flash_attention: _forward,
    _aten._scaled_dot_product_flash_attention_backward: _cuda_backward,
}
