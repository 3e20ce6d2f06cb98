"""Lists of blocks that were found before, by the content of what masks captured."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Found = TypeVar("Found")


class ContentCache(Generic[Found]):
    """The results for the last ``size`` keys that were asked for. Threads may share it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._found: OrderedDict[Hashable, Found] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """The result for this key; ``find`` makes it if it is not there, perhaps in several threads at once."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        found = find()
        with self._lock:
            found = self._found.setdefault(key, found)
            self._found.move_to_end(key)
            while len(self._found) > self.size:
                self._found.popitem(last=False)
        return found

    def clear(self) -> None:
        """Forget all results, and free their memory."""
        with self._lock:
            self._found.clear()


def content_of(tensors: Iterable[Tensor]) -> Hashable:
    """What is equal of tensors whose shapes, dtypes, devices and bytes are equal; copies them to the CPU.

    The bytes are represented by their SHA-256.
    """
    return tuple([(x.shape, x.dtype, x.device, hashlib.sha256(_bytes_of(x)).digest()) for x in tensors])


def usable_in(device: torch.device) -> Hashable:
    """What is equal where a tensor that is made now may be used: the stream, and whether autograd may save it."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    return device, stream, torch.is_inference_mode_enabled()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
