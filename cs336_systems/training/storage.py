"""Tensors of a checkpoint as plain bytes, and a JSON index of them: nothing that is read back can run code.

`torch.distributed.checkpoint` plans which process writes and reads which part of a tensor. Its own writer and reader
store that plan, and each value that is no tensor, as pickles. These store tensors alone: `tensors-N.bin` has the bytes
of what process N wrote, one chunk after the other, contiguous, in the byte order of the machine, and `tensors.json`
says where each chunk lies::

    {"model.lm_head.weight": {"dtype": "float32", "shape": [320, 128], "chunks": [
        {"offsets": [0, 0], "sizes": [320, 128], "file": "tensors-0.bin", "start": 0}]}, ...}
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

INDEX = "tensors.json"

_Checkpoint = str | os.PathLike[str] | None


def tensor_file(rank: int) -> str:
    """The name of the file that a process writes its tensors to."""
    return f"tensors-{rank}.bin"


@dataclasses.dataclass(frozen=True)
class Extent:
    """The chunk of a tensor whose bytes begin at ``start`` of a file."""

    file: str
    start: int
    dtype: torch.dtype
    sizes: torch.Size

    @property
    def end(self) -> int:
        """One after the last byte."""
        return self.start + math.prod(self.sizes) * self.dtype.itemsize


class TensorWriter(StorageWriter):
    """Writes the tensors of a state into a folder that exists, a file for each process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self, checkpoint_id: _Checkpoint = None) -> None:
        """Nothing is kept from one use to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing differs between processes."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Each process's plan with the name of its file."""
        return [dataclasses.replace(plan, storage_data=tensor_file(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's chunks. Raises TypeError for a value that is no tensor."""
        results = []
        with (self.folder / plan.storage_data).open("wb") as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"states must be tensors; got another value as {item.index.fqn}")
                extent = Extent(plan.storage_data, file.tell(), tensor.dtype, tensor.shape)
                file.write(_bytes_of(tensor.detach().cpu().contiguous()))
                results.append(WriteResult(item.index, extent.end - extent.start, extent))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of what all processes wrote."""
        extents = {result.index: result.storage_data for of_a_process in results for result in of_a_process}
        index = {
            name: _described(name, tensor, extents)
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        (self.folder / INDEX).write_text(json.dumps(index), encoding="utf-8")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Checkpoint) -> bool:
        """Folders alone are written to."""
        return isinstance(checkpoint_id, Path)


class TensorReader(StorageReader):
    """Reads what `TensorWriter` wrote.

    Args:
        folder: where it is.
        files: the names that may be opened there.

    Raises:
        ValueError: the index does not describe tensors, or they are not in these files.
    """

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        self.folder = folder
        self._files = files
        self._tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._extents: dict[MetadataIndex, Extent] = {}
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            for name, tensor in index.items():
                self._add(name, _dtype(tensor["dtype"]), tensor)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{folder / INDEX} must describe the tensors of a checkpoint: {error!r}") from error

    def _add(self, name: str, dtype: torch.dtype, tensor: dict[str, Any]) -> None:
        chunks = []
        for chunk in tensor["chunks"]:
            offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
            (start,) = _sizes([chunk["start"]])
            extent = Extent(chunk["file"], start, dtype, sizes)
            if extent.file not in self._files or extent.end > (self.folder / extent.file).stat().st_size:
                raise ValueError(f"{extent} is in no file of the checkpoint")
            self._extents[MetadataIndex(name, offsets)] = extent
            chunks.append(ChunkStorageMetadata(offsets, sizes))
        self._tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), _sizes(tensor["shape"]), chunks)

    def reset(self, checkpoint_id: _Checkpoint = None) -> None:
        """Nothing changes from one use to the next."""

    def read_metadata(self) -> Metadata:
        """The index."""
        return Metadata(self._tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing differs between processes."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this process needs of each chunk into its tensors."""
        for item in plan.items:
            chunk = self._read(self._extents[item.storage_index])
            needed = zip(item.storage_offsets, item.lengths, strict=True)
            target = planner.resolve_tensor(item).detach()
            target.copy_(chunk[tuple(slice(offset, offset + length) for offset, length in needed)])
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, extent: Extent) -> Tensor:
        tensor = torch.empty(extent.sizes, dtype=extent.dtype, device="cpu")
        with (self.folder / extent.file).open("rb") as file:
            file.seek(extent.start)
            if file.readinto(_bytes_of(tensor)) != extent.end - extent.start:
                raise ValueError(f"{extent} ends before it should")
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Checkpoint) -> bool:
        """Folders alone are read from."""
        return isinstance(checkpoint_id, Path)


def _described(name: str, tensor: TensorStorageMetadata, extents: dict[MetadataIndex, Extent]) -> dict[str, Any]:
    chunks = []
    for chunk in tensor.chunks:
        extent = extents[MetadataIndex(name, chunk.offsets)]
        place = {"offsets": [*chunk.offsets], "sizes": [*chunk.sizes]}
        chunks.append(place | {"file": extent.file, "start": extent.start})
    dtype = str(tensor.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": [*tensor.size], "chunks": chunks}


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _dtype(name: object) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def _sizes(numbers: list[int]) -> torch.Size:
    if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"{numbers!r} are no sizes")
    return torch.Size(numbers)
