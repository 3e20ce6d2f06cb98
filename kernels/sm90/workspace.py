"""The kernels' int32 workspace: the tile counter, and the links of the forward's retry list (`lib.scheduler`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ..torch_names import raw_stream

MIN_ELEMENTS = 1 << 14

_workspaces: dict[tuple[int, int], Tensor] = {}


def workspace_for(device: torch.device, num_tiles: int) -> Tensor:
    """A workspace for kernels on the device's current stream: at least 1 + num_tiles elements.

    The counter, element 0, is 0 whenever a kernel on that stream begins. Links need no initial values.
    """
    if torch.cuda.is_current_stream_capturing():
        # A graph may be replayed on any stream, and at the same time as others.
        return _new(1 + num_tiles, device)
    # torch.cuda.current_stream makes an object, at a microsecond.
    key = device.index, raw_stream(device.index)
    workspace = _workspaces.get(key)
    if workspace is None or workspace.numel() <= num_tiles:
        workspace = _workspaces[key] = _new_kept(max(MIN_ELEMENTS, 2 * num_tiles), device)
    return workspace


def _new(elements: int, device: torch.device) -> Tensor:
    workspace = torch.empty(elements, dtype=torch.int32, device=device)
    workspace[:1].zero_()
    return workspace


def _new_kept(elements: int, device: torch.device) -> Tensor:
    """A workspace that is kept. Another thread allocates it: CUDA graphs of torch.compile own what this one does."""

    def make() -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.device(device):
            workspace, is_zero = _new(elements, device), torch.cuda.Event()
            is_zero.record()
        return workspace, is_zero

    with ThreadPoolExecutor(1) as other_thread:
        workspace, is_zero = other_thread.submit(make).result()
    stream = torch.cuda.current_stream(device)
    stream.wait_event(is_zero)
    # A larger one may replace it while kernels that use it are still in the stream.
    workspace.record_stream(stream)
    return workspace
