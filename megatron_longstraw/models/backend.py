"""Which modules a layer is built from: Transformer Engine's, or Megatron's local ones made fit for use.

Megatron's local norms refuse sequence parallelism and zero-centred weights; `LocalBackend` has one that takes
both, a column-parallel linear layer behind such a norm, as Transformer Engine has, and a linear layer that every
tensor-parallel rank has whole. Transformer Engine is used through Megatron's own provider; it needs a GPU and has
not been run here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor
from torch.nn import functional as F

from megatron_longstraw.config import ConfigError


def resolve_backend(name: str) -> tuple[BackendSpecProvider, str]:
    """The provider of layer modules for model.backend, and which one it is ("local", "transformer_engine").

    Raises:
        ConfigError: Transformer Engine is asked for and can't be used here.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE

    usable = HAVE_TE and torch.cuda.is_available()
    if name == "local" or (name == "auto" and not usable):
        return LocalBackend(), "local"
    if not usable:
        reason = "it does not import (pip install 'megatron_longstraw[gpu]')" if not HAVE_TE else "there is no GPU"
        raise ConfigError(f"model.backend=transformer_engine can't be used: {reason}; needs model.backend=local")
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider(), "transformer_engine"


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm whose weight takes part in sequence parallelism.

    Args:
        config: Megatron's TransformerConfig; `normalization`, `layernorm_zero_centered_gamma` and
            `sequence_parallel` are read.
        hidden_size: length of the last dimension.
        eps: added to the variance.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.shape, self.eps = (hidden_size,), eps
        self.rms = config.normalization == "RMSNorm"
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = self._parameter(1.0 - self.offset, config)
        self.bias = None if self.rms else self._parameter(0.0, config)

    def _parameter(self, value: float, config: Any) -> torch.nn.Parameter:
        data = torch.full(self.shape, value, dtype=config.params_dtype, device=torch.cuda.current_device())
        parameter: Any = torch.nn.Parameter(data)
        parameter.sequence_parallel = config.sequence_parallel
        return parameter

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        if self.rms:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return F.layer_norm(x, self.shape, weight, self.bias, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """Norm, then Megatron's column-parallel linear layer; the norm's parameters are named as Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        norm = Norm(config, input_size, config.layernorm_epsilon)
        self.layer_norm_weight, self.layer_norm_bias = norm.weight, norm.bias
        self._norm = (norm,)  # a tuple, so that its parameters have one name

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self._norm[0](input_), *args, **kwargs)


class DuplicatedLinear(torch.nn.Module):
    """A linear layer without bias that every tensor-parallel rank has whole, as Transformer Engine's
    ``parallel_mode="duplicated"``: under sequence parallelism each rank runs it on its own tokens, and its
    gradient is summed over the ranks.

    Args:
        input_size, output_size: the weight is [output_size, input_size].
        config: Megatron's TransformerConfig; `params_dtype` and `sequence_parallel` are read.
        bias: must be False.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, bias: bool = False, **_: Any) -> None:
        super().__init__()
        assert not bias
        data = torch.empty(output_size, input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        weight: Any = torch.nn.Parameter(data)
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class LocalBackend(LocalSpecProvider):
    """Megatron's local modules, with norms that honour sequence parallelism."""

    def column_parallel_layer_norm_linear(self) -> Any:
        return NormColumnParallelLinear

    def linear(self) -> Any:
        return DuplicatedLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return Norm


@contextlib.contextmanager
def latent_attention_takes(backend: BackendSpecProvider) -> Iterator[None]:
    """While entered, Megatron's absorbed latent attention can be built from the backend's duplicated linear layer.

    It tells down-projections apart by class, and knows as duplicated only Transformer Engine's. Its other choice,
    ColumnParallelLinear, must not be used at tensor-parallel sizes above 1: the gradient of the rotary key is then
    not summed over the ranks, silently.
    """
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    before = absorbed_mla.TELinear
    absorbed_mla.TELinear = backend.linear()
    try:
        yield
    finally:
        absorbed_mla.TELinear = before
