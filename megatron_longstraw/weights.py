"""HuggingFace safetensors folders in and out: each rank reads only what it needs, and writes only what it has.

An architecture's *weight map* says how each of its parameters is put together from HuggingFace tensors
(`models.weight_map`). Where it gives several sources, reading takes the first whose tensors are all in the folder,
and writing always writes the first.

Which part of the whole a rank has is known to the parameter's `Shard`; reading cuts pieces by it *in the file*,
so a rank reads as many bytes as it keeps (see `SafetensorsFolder.bytes_read`).

Shapes: a parameter is [rows, ...]; pieces share all dimensions but the first.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_longstraw.config import ConfigError
from megatron_longstraw.models.parameters import NamedTensor, named_tensors
from megatron_longstraw.models.weight_map import Piece, Source, WeightMap

_INDEX = "model.safetensors.index.json"


class WeightError(ConfigError):
    """A checkpoint that doesn't fit the model: names the folder, the tensor, what is there and what is needed."""


class SafetensorsFolder:
    """The tensors of a HuggingFace checkpoint, read by parts.

    Args:
        path: a folder with ``model.safetensors.index.json``, or with any ``*.safetensors`` files.

    Attributes:
        bytes_read: bytes of all parts that were read so far.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        self._open: dict[str, Any] = {}
        self._files = self._find_files()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> list[int]:
        return list(self._slice(name).get_shape())

    def read(self, piece: Piece, rows: slice, columns: slice | None = None) -> Tensor:
        """Part of a piece.

        Args:
            rows: within the piece.
            columns: of dimension 1, or None for all.
        """
        part: list[slice] = [slice(piece.start + rows.start, piece.start + rows.stop)]
        if piece.entry is not None:
            part.insert(0, slice(piece.entry, piece.entry + 1))
        if columns is not None:
            part.append(columns)
        tensor = self._slice(piece.name)[tuple(part)]
        if tensor.dtype.itemsize == 1:
            raise WeightError(f"{self.path}: {piece.name} is {tensor.dtype}: needs a checkpoint that isn't quantized")
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor if piece.entry is None else tensor[0]

    def rows(self, piece: Piece) -> int:
        """How many rows a piece has."""
        shape = self.shape(piece.name)
        return (shape[0 if piece.entry is None else 1] if piece.stop is None else piece.stop) - piece.start

    def _slice(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = _open_file(self.path / file)
        return self._open[file].get_slice(name)

    def _find_files(self) -> dict[str, str]:
        if (self.path / _INDEX).exists():
            return dict(json.loads((self.path / _INDEX).read_text(encoding="utf-8"))["weight_map"])
        found = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with _open_file(file) as tensors:
                found.update(dict.fromkeys(tensors.keys(), file.name))
        if not found:
            raise WeightError(f"{self.path}: no safetensors files here; needs a HuggingFace checkpoint's folder")
        return found


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:  # cut short, or another format
        raise WeightError(f"{path}: can't be read: {error}; needs a safetensors file") from error


def load_weights(model_chunks: Sequence[Any], path: str | Path, weight_map: WeightMap) -> SafetensorsFolder:
    """Fills this rank's parameters and expert biases from a HuggingFace folder.

    Args:
        model_chunks: the rank's GPT models, without DDP around them.
        path: the folder; every rank reads it by itself.
        weight_map: the architecture's.

    Returns:
        The folder, which knows how many bytes were read.

    Raises:
        WeightError: a tensor is missing, has another shape, or is quantized.
    """
    folder = SafetensorsFolder(path)
    with torch.no_grad():
        for item in named_tensors(model_chunks):
            _fill(item, folder, weight_map(item.name))
    return folder


def save_weights(
    model_chunks: Sequence[Any],
    path: str | Path,
    weight_map: WeightMap,
    *,
    like: str | Path | None = None,
    file_bytes: int = 4 * 2**30,
) -> None:
    """Writes the model as a HuggingFace folder; every rank calls it.

    Each parameter is joined over its tensor-parallel ranks, one at a time, and written by the first of the ranks
    that have it; experts by the rank that has them. Rank 0 then writes the index.

    Args:
        model_chunks: the rank's GPT models, without DDP around them.
        path: the folder, made where it isn't there.
        weight_map: the architecture's.
        like: a folder whose other files (config.json, tokenizer) are copied.
        file_bytes: a rank starts a new file when one has as many bytes.
    """
    folder = Path(path)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for file in Path(like).iterdir() if like is not None else ():
            if file.is_file() and file.suffix != ".safetensors" and file.name != _INDEX:
                shutil.copy(file, folder / file.name)
    dist.barrier()
    writer = _Writer(folder, file_bytes)
    for item in named_tensors(model_chunks):
        whole = _joined(item)
        if whole is not None:
            for name, tensor in _checkpoint_tensors(item.name, whole, weight_map(item.name)[0]):
                writer.add(name, tensor)
    writer.close()
    _write_index(folder, writer.files)


def _fill(item: NamedTensor, folder: SafetensorsFolder, sources: Sequence[Source]) -> None:
    source = _present(item.name, folder, sources)
    shard, tensor = item.shard, item.tensor
    heights = [folder.rows(piece) for piece in source.pieces]
    whole = [sum(heights), *folder.shape(source.pieces[0].name)[1 if source.pieces[0].entry is None else 2 :]]
    needed = shard.full_shape(tensor.shape)
    if whole != needed:
        names = ", ".join(piece.name for piece in source.pieces)
        raise WeightError(f"{folder.path}: {names} make {item.name} of shape {whole}: the model needs {needed}")
    by_row = shard.ranges(whole[0]) if shard.dim == 0 else [slice(0, whole[0])]
    by_column = shard.ranges(whole[1]) if shard.dim == 1 else [None]
    columns = [torch.cat(list(_rows(folder, source.pieces, heights, by_row, column))) for column in by_column]
    part = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
    tensor.copy_(part.to(tensor.dtype) + source.offset if source.offset else part)


def _rows(
    folder: SafetensorsFolder,
    pieces: Sequence[Piece],
    heights: Sequence[int],
    ranges: Sequence[slice],
    columns: slice | None,
) -> Iterator[Tensor]:
    """The rows in `ranges` of the stacked pieces, in order."""
    for wanted in ranges:
        first = 0
        for piece, height in zip(pieces, heights, strict=True):
            start, stop = max(wanted.start, first), min(wanted.stop, first + height)
            if start < stop:
                yield folder.read(piece, slice(start - first, stop - first), columns)
            first += height


def _present(name: str, folder: SafetensorsFolder, sources: Sequence[Source]) -> Source:
    for source in sources:
        if all(piece.name in folder for piece in source.pieces):
            return source
    missing = [piece.name for piece in sources[0].pieces if piece.name not in folder]
    raise WeightError(f"{folder.path}: {name} needs {', '.join(missing)}, which the checkpoint doesn't have")


def _joined(item: NamedTensor) -> Tensor | None:
    """The whole tensor, on the CPU of the rank that writes it; None on the others. A collective of the TP group."""
    tensor = item.tensor.detach()
    if item.is_expert:
        writes = parallel_state.get_expert_data_parallel_rank() == 0
        return tensor.cpu() if writes else None
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [tensor]
    if item.shard.dim is not None:
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
    first = group.rank() == 0 and parallel_state.get_data_parallel_rank() == 0
    return item.shard.join([part.cpu() for part in parts]) if first else None


def _checkpoint_tensors(name: str, whole: Tensor, source: Source) -> Iterator[tuple[str, Tensor]]:
    """A whole parameter as the HuggingFace tensors that it is made of; each must be made of this one alone."""
    if source.offset:
        whole = whole - source.offset
    if len(source.pieces) == 1 and source.pieces[0] == Piece(source.pieces[0].name):
        yield source.pieces[0].name, whole
        return
    rows: dict[str, list[tuple[int, Tensor]]] = {}
    first = 0
    open_ended = [p for p in source.pieces if p.stop is None]
    # pieces without an end share what the others leave, evenly
    rest = len(whole) - sum(p.stop - p.start for p in source.pieces if p.stop is not None)
    for piece in source.pieces:
        if piece.entry is not None:
            raise WeightError(f"{name}: the source that is written can't be an entry of {piece.name}")
        height = rest // len(open_ended) if piece.stop is None else piece.stop - piece.start
        rows.setdefault(piece.name, []).append((piece.start, whole[first : first + height]))
        first += height
    for checkpoint_name, parts in rows.items():
        yield checkpoint_name, torch.cat([part for _, part in sorted(parts, key=lambda p: p[0])])


class _Writer:
    """Collects a rank's tensors into files of bounded size."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self.folder, self.file_bytes = folder, file_bytes
        self.files: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        self._bytes, self._count = 0, 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._bytes >= self.file_bytes:
            self.close()
        self._tensors[name] = tensor.contiguous().clone()
        self._bytes += tensor.numel() * tensor.element_size()

    def close(self) -> None:
        if self._tensors:
            file = f"model-rank{dist.get_rank():05d}-{self._count:05d}.safetensors"
            save_file(self._tensors, self.folder / file, metadata={"format": "pt"})
            self.files.update(dict.fromkeys(self._tensors, file))
            self._tensors, self._bytes, self._count = {}, 0, self._count + 1


def _write_index(folder: Path, files: dict[str, str]) -> None:
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, files)
    if dist.get_rank() == 0:
        names: dict[str, str] = {}
        for theirs in everyone:
            names.update(theirs)
        index = {"metadata": {}, "weight_map": dict(sorted(names.items()))}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    dist.barrier()
