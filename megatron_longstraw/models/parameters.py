"""Parameters by the names and shapes they have on one rank, whatever the layout.

A rank holds a shard of some of the model's parameters. `named_parameters` gives each the name it has in the
whole model, and `Shard` cuts it from, and joins it to, the whole tensor. Initial weights are drawn per whole
parameter from its name, so they are the same under every layout.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """How a parameter is cut over the tensor-parallel ranks.

    Args:
        dim: the dimension that is cut, or None where every rank has it all.
        stride: blocks along `dim` that are cut one by one (2 for gate and up of a gated MLP).
        rank: this TP rank.
        size: TP size.
    """

    dim: int | None
    stride: int
    rank: int
    size: int

    def full_shape(self, local: torch.Size) -> list[int]:
        return [n * self.size if d == self.dim else n for d, n in enumerate(local)]

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of the whole tensor."""
        if self.dim is None:
            return full
        blocks = full.chunk(self.stride, self.dim)
        return torch.cat([b.chunk(self.size, self.dim)[self.rank] for b in blocks], self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the parts of all TP ranks, in order of rank."""
        if self.dim is None:
            return parts[0]
        blocks = [part.chunk(self.stride, self.dim) for part in parts]
        return torch.cat([b[i] for i in range(self.stride) for b in blocks], self.dim)


@dataclass(frozen=True)
class NamedParameter:
    """A parameter on this rank: its name in the whole model, and its cut."""

    name: str
    parameter: torch.nn.Parameter
    shard: Shard


def named_parameters(model_chunks: Sequence[Any]) -> Iterator[NamedParameter]:
    """This rank's parameters; layers are numbered from 0 over all pipeline stages.

    Args:
        model_chunks: the rank's GPT models, without DDP around them.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for chunk in model_chunks:
        offset = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
        for name, parameter in chunk.named_parameters():
            full_name = _whole_model_name(name, offset)
            if chunk.share_embeddings_and_output_weights and full_name == "output_layer.weight":
                full_name = "embedding.word_embeddings.weight"  # the last pipeline stage's copy
            cut = size > 1 and getattr(parameter, "tensor_model_parallel", False)
            shard = Shard(
                parameter.partition_dim if cut else None, getattr(parameter, "partition_stride", 1), rank, size
            )
            yield NamedParameter(full_name, parameter, shard)


def _whole_model_name(name: str, layer_offset: int) -> str:
    return re.sub(r"(?<=^decoder\.layers\.)\d+", lambda m: str(int(m[0]) + layer_offset), name)


def initialize_weights(model_chunks: Sequence[Any], seed: int) -> None:
    """Draws all matrices from normal distributions, each from its own name and the seed.

    The spread is Megatron's: init_method_std, and that / sqrt(2 * num_layers) for projections back into the
    residual stream. Biases are zero; norms keep what they were built with.
    """
    for item in named_parameters(model_chunks):
        if item.parameter.dim() < 2:
            if item.name.endswith(".bias"):
                torch.nn.init.zeros_(item.parameter)
            continue
        config = model_chunks[0].config
        std = config.init_method_std
        if item.name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            std /= math.sqrt(2.0 * config.num_layers)
        digest = hashlib.sha256(f"{seed}:{item.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        full = torch.randn(item.shard.full_shape(item.parameter.shape), generator=generator) * std
        with torch.no_grad():
            item.parameter.copy_(item.shard.cut(full))
