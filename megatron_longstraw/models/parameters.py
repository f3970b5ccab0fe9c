"""Parameters by the names and shapes they have on one rank, whatever the layout.

A rank holds a shard of some of the model's parameters. `named_parameters` gives each the name it has in the
whole model (layers numbered over all stages, experts over all ranks), and `Shard` cuts it from, and joins it to,
the whole tensor. Initial weights are drawn per whole parameter from its name, so they are the same under every
layout.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

_PERSISTENT_BUFFERS = ("expert_bias",)


@dataclass(frozen=True)
class Shard:
    """How a parameter is cut over the tensor-parallel ranks.

    Args:
        dim: the dimension that is cut, or None where every rank has it all.
        stride: equal blocks along `dim` that are cut one by one (2 for gate and up of a gated MLP).
        rank: this TP rank.
        size: TP size.
        sections: a rank's rows of each block, where blocks are not equal; `stride` is then not read.
    """

    dim: int | None
    stride: int
    rank: int
    size: int
    sections: tuple[int, ...] | None = None

    def full_shape(self, local: torch.Size) -> list[int]:
        return [n * self.size if d == self.dim else n for d, n in enumerate(local)]

    def ranges(self, length: int) -> list[slice]:
        """This rank's parts of the whole dimension of `length`, in the order in which the rank has them."""
        parts = self._parts(length // self.size)
        starts = itertools.accumulate((part * self.size for part in parts), initial=0)
        first = [start + self.rank * part for start, part in zip(starts, parts, strict=False)]
        return [slice(start, start + part) for start, part in zip(first, parts, strict=True)]

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of the whole tensor."""
        if self.dim is None:
            return full
        ranges = self.ranges(full.shape[self.dim])
        return torch.cat([full.narrow(self.dim, r.start, r.stop - r.start) for r in ranges], self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the parts of all TP ranks, in order of rank."""
        if self.dim is None:
            return parts[0]
        lengths = self._parts(parts[0].shape[self.dim])
        blocks = [part.split(lengths, self.dim) for part in parts]
        return torch.cat([b[i] for i in range(len(lengths)) for b in blocks], self.dim)

    def _parts(self, local_length: int) -> list[int]:
        """Lengths of a rank's blocks."""
        return list(self.sections) if self.sections else [local_length // self.stride] * self.stride


@dataclass(frozen=True)
class NamedTensor:
    """A parameter or a persistent buffer on this rank: its name in the whole model, and its cut."""

    name: str
    tensor: Tensor
    shard: Shard
    is_expert: bool = False


@dataclass(frozen=True)
class NamedParameter(NamedTensor):
    """A parameter on this rank."""

    @property
    def parameter(self) -> torch.nn.Parameter:
        assert isinstance(self.tensor, torch.nn.Parameter)
        return self.tensor


def named_parameters(model_chunks: Sequence[Any]) -> Iterator[NamedParameter]:
    """This rank's parameters; layers and experts are numbered from 0 over all ranks.

    Args:
        model_chunks: the rank's GPT models, without DDP around them.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for chunk in model_chunks:
        rename = _Rename(chunk)
        for name, parameter in chunk.named_parameters():
            is_expert = ".experts." in name
            cut = size > 1 and getattr(parameter, "tensor_model_parallel", False)
            shard = Shard(
                dim=parameter.partition_dim if cut else None,
                stride=getattr(parameter, "partition_stride", 1),
                rank=rank,
                size=size,
                sections=getattr(parameter, "partition_sections", None),
            )
            if is_expert:  # whole on each rank that has it: expert tensor parallelism is 1
                shard = Shard(None, 1, 0, 1)
            yield NamedParameter(rename(name), parameter, shard, is_expert)


def named_buffers(model_chunks: Sequence[Any]) -> Iterator[NamedTensor]:
    """This rank's buffers that are part of the model: the routers' expert biases. Every TP rank has them whole."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for chunk in model_chunks:
        rename = _Rename(chunk)
        for name, buffer in chunk.named_buffers():
            if name.endswith(_PERSISTENT_BUFFERS):
                yield NamedTensor(rename(name), buffer, Shard(None, 1, rank, size))


def named_tensors(model_chunks: Sequence[Any]) -> Iterator[NamedTensor]:
    """This rank's parameters and buffers: all that a checkpoint holds."""
    yield from named_parameters(model_chunks)
    yield from named_buffers(model_chunks)


def initialize_weights(model_chunks: Sequence[Any], seed: int) -> None:
    """Draws all weights, each from its own name and the seed.

    The distributions are Megatron's. Matrices are normal with init_method_std, and that / sqrt(2 * num_layers)
    for projections back into the residual stream. Biases are zero; norms keep what they were built with. Of Gated
    DeltaNet, exp(A_log) is uniform in [1, 16], dt_bias is 1, and the convolution is torch's Conv1d default.
    """
    for item in named_parameters(model_chunks):
        digest = hashlib.sha256(f"{seed}:{item.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        shape = item.shard.full_shape(item.parameter.shape)
        full = _initial_weight(item.name, shape, model_chunks[0].config, generator)
        if full is not None:
            with torch.no_grad():
                item.parameter.copy_(item.shard.cut(full))


def _initial_weight(name: str, shape: Sequence[int], config: Any, generator: torch.Generator) -> Tensor | None:
    """The whole parameter, or None where it keeps what it was built with."""
    if name.endswith("A_log"):
        return (1 + 15 * torch.rand(shape, generator=generator)).log()
    if name.endswith("dt_bias"):
        return torch.ones(shape)
    if name.endswith("conv1d.weight"):
        return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[-1])
    if len(shape) < 2:
        return torch.zeros(shape) if name.endswith(".bias") else None
    std = config.init_method_std
    if name.endswith(("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")):
        std /= math.sqrt(2.0 * config.num_layers)
    return torch.randn(shape, generator=generator) * std


class _Rename:
    """From a model chunk's own names to those of the whole model."""

    def __init__(self, chunk: Any) -> None:
        self._layers = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
        experts = chunk.config.num_moe_experts or 0
        ranks = parallel_state.get_expert_model_parallel_world_size()
        self._experts = parallel_state.get_expert_model_parallel_rank() * experts // ranks
        self._tied = chunk.share_embeddings_and_output_weights

    def __call__(self, name: str) -> str:
        if self._tied and name == "output_layer.weight":
            return "embedding.word_embeddings.weight"  # the last pipeline stage's copy
        name = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda m: str(int(m[0]) + self._layers), name)
        # Transformer Engine's grouped experts hold weight0, weight1, ... of one module
        name = re.sub(r"\.experts\.(linear_fc[12])\.weight(\d+)$", r".experts.local_experts.\2.\1.weight", name)
        return re.sub(r"(?<=\.local_experts\.)\d+", lambda m: str(int(m[0]) + self._experts), name)
