"""Forward and backward by the kernels for Hopper where they cover a call, and by the portable ones where they do not.

Arguments are taken as validated, as `triton.launch` takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launching import Launcher, Plans, address_of, is_elsewhere
from ..layout import Layout, one_a_row, rows_like
from ..triton import launch as portable
from ..triton.launch import PLAIN, metadata_of
from ..settings import Settings, Window
from ..torch_names import raw_stream
from ..tuning import processors_of
from .backward import backward_kernel
from .backward_wide import backward_wide_kernel
from .config import WIDTHS, columns_of, width_of
from .coverage import is_aligned, is_copied, softcap_of, why_not_backward, why_not_forward
from .describe import (
    ALONE,
    ROWS_FILLED_UP,
    Packed,
    Rows,
    describe_backward,
    describe_finish,
    describe_forward,
    describe_prepare,
    tiles_of,
)
from .forward import forward_kernel
from .forward_more import forward_more_kernel
from .launcher import TiledLauncher
from .rows import finish_kernel, prepare_kernel

EXTRAS = (0, 2)
"""How many a call may have, that is, none, or where packed sequences of q and of k begin. The settings say which."""

KERNELS = {64: backward_kernel, 128: backward_kernel, 256: backward_wide_kernel}
"""The backward of each width."""


class ForwardPlan(NamedTuple):
    """What follows from the metadata of a forward call.

    covered: whether these kernels compute it. has_more: whether heads have columns beyond a tile's.
    """

    covered: bool
    out: Layout
    lse: Layout
    band: Window
    softcap: float | None
    has_more: bool
    to_the_end: bool
    launcher: TiledLauncher


class BackwardPlan(NamedTuple):
    """What follows from the metadata of a backward call.

    is_copied: whether the copying unit can copy dout as it lies. matrices, padded, width: of what there is for each
    row of q, as `Rows` has it.
    """

    covered: bool
    is_copied: bool
    dq: Layout
    dk: Layout
    dv: Layout
    matrices: int
    padded: int
    width: int
    band: Window
    softcap: float | None
    to_the_end: bool
    deterministic: bool
    prepare: Launcher
    launcher: TiledLauncher
    finish: Launcher

    def added(self, address: int) -> tuple[int, ...]:
        """What the width's kernel is told of where it is counted who has added, if it counts."""
        return () if KERNELS[self.width] is backward_wide_kernel else (address,)


_forward_plans: Plans[ForwardPlan] = Plans()
_backward_plans: Plans[BackwardPlan] = Plans()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    settings: str = PLAIN,
    numbers: Sequence[float] = (),
    extras: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """out, laid out as q is, and the natural log-sum-exp in float32."""
    device = q.device
    if is_elsewhere(device):
        with torch.cuda.device(device):
            return forward(q, k, v, scale, settings, numbers, extras)
    if len(extras) not in EXTRAS:
        return portable.forward(q, k, v, scale, settings, numbers, extras)
    dtype = q.dtype
    shapes: tuple[object, ...] = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride())
    if extras:
        shapes += metadata_of(extras)
    plan = _forward_plans.get(
        (shapes, dtype, device, scale, settings, *numbers),
        lambda: _plan_forward(q, k, v, scale, Settings.of(settings, numbers)),
    )
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if not plan.covered or not is_aligned(*addresses):
        return portable.forward(q, k, v, scale, settings, numbers, extras)
    out = plan.out.empty(dtype, device)
    lse = plan.lse.empty(torch.float32, device)
    counter = _counter(device)
    described = (*addresses, out.data_ptr())
    plan.launcher(
        (*described, *(described if plan.has_more else ()), lse.data_ptr(), counter.data_ptr(), *_starts_of(extras)),
        lambda: describe_forward(
            *(q, k, v, out, lse, counter, plan.band, scale, plan.softcap, processors_of(device)),
            _packed(extras, plan.to_the_end),
        ),
    )
    return out, lse


def _starts_of(extras: Sequence[Tensor]) -> tuple[Any, ...]:
    """As kernels take them."""
    return tuple([starts.data_ptr() for starts in extras]) if extras else (None, None)


def _packed(extras: Sequence[Tensor], to_the_end: bool) -> Packed:
    return Packed(extras[0], extras[1], to_the_end) if extras else ALONE


def _plan_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, settings: Settings) -> ForwardPlan:
    covered = why_not_forward(q, k, v, scale, settings) is None
    band = settings.band(q.shape[-2], k.shape[-2])
    columns = columns_of(q.shape[-1], v.shape[-1]) if covered else None
    has_more = columns is not None and columns.key_more > 0
    return ForwardPlan(
        covered,
        rows_like(q, v.shape[-1]),
        one_a_row(q),
        band,
        softcap_of(settings),
        has_more,
        settings.to_the_end,
        TiledLauncher(forward_more_kernel if has_more else forward_kernel),
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    scale: float,
    settings: str = PLAIN,
    numbers: Sequence[float] = (),
    extras: Sequence[Tensor] = (),
    wanted: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of q, k and v, laid out as they are, and those of the extras at the positions ``wanted``."""
    device = q.device
    if is_elsewhere(device):
        with torch.cuda.device(device):
            return backward(q, k, v, out, lse, dout, dlse, scale, settings, numbers, extras, wanted)
    arguments = scale, settings, numbers, extras, wanted
    if len(extras) not in EXTRAS:
        return portable.backward(q, k, v, out, lse, dout, dlse, *arguments)
    shapes = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), out.stride(), dout.stride())
    plan = _backward_plans.get(
        (shapes, metadata_of(extras), q.dtype, device, scale, dlse is None, settings, *numbers),
        lambda: _plan_backward(q, k, v, dout, scale, Settings.of(settings, numbers), _packed(extras, False)),
    )
    addresses = q.data_ptr(), dout.data_ptr(), k.data_ptr(), v.data_ptr()
    if not plan.covered or not is_aligned(addresses[0], *addresses[2:]):
        return portable.backward(q, k, v, out, lse, dout, dlse, *arguments)
    if not plan.is_copied or not is_aligned(addresses[1]):
        # Such a gradient is usually an expanded scalar. Its copy has a plan of its own.
        return backward(q, k, v, out, lse, dout.clone(memory_format=torch.contiguous_format), dlse, *arguments)
    dlse = None if dlse is None else dlse.contiguous()
    dtype = q.dtype
    dq, dk, dv = plan.dq.empty(dtype, device), plan.dk.empty(dtype, device), plan.dv.empty(dtype, device)
    sizes = plan.matrices, plan.padded, plan.width
    memory = Rows.memory(*sizes, device)
    packed = _packed(extras, plan.to_the_end)
    starts = _starts_of(extras)
    counter = _counter(device)
    *numbers_of_rows, sums, added = Rows.addresses(memory.data_ptr(), *sizes)
    plan.prepare(
        (out.data_ptr(), dout.data_ptr(), lse.data_ptr(), address_of(dlse), *numbers_of_rows, sums, added, starts[0]),
        lambda: describe_prepare(out, dout, lse, dlse, Rows.of(memory, *sizes), packed),
    )
    plan.launcher(
        (
            *addresses,
            *numbers_of_rows,
            dk.data_ptr(),
            dv.data_ptr(),
            sums,
            *plan.added(added),
            counter.data_ptr(),
            *starts,
        ),
        lambda: describe_backward(
            *(q, k, v, dout, Rows.of(memory, *sizes), (dk, dv), counter, plan.band, scale, plan.softcap),
            *(processors_of(device), packed, plan.deterministic),
        ),
    )
    plan.finish((sums, dq.data_ptr(), starts[0]), lambda: describe_finish(Rows.of(memory, *sizes), dq, scale, packed))
    return dq, dk, dv, []


def _plan_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float, settings: Settings, packed: Packed
) -> BackwardPlan:
    covered = why_not_backward(q, k, v, scale, settings) is None
    padded = tiles_of(q.shape[-2], ROWS_FILLED_UP, packed.sequences) * ROWS_FILLED_UP
    width = width_of(q.shape[-1]) if covered else WIDTHS[0]
    return BackwardPlan(
        covered,
        is_copied(dout),
        rows_like(q, q.shape[-1]),
        rows_like(k, k.shape[-1]),
        rows_like(v, v.shape[-1]),
        q.shape[:-2].numel(),
        padded,
        width,
        settings.band(q.shape[-2], k.shape[-2]),
        softcap_of(settings),
        settings.to_the_end,
        settings.deterministic,
        Launcher(prepare_kernel),
        TiledLauncher(KERNELS[width]),
        Launcher(finish_kernel),
    )


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """A number that is 0 whenever a kernel on the current stream begins."""
    if torch.cuda.is_current_stream_capturing():
        # A graph may be replayed on any stream, beside others.
        return torch.zeros(1, dtype=torch.int32, device=device)
    # torch.cuda.current_stream makes an object, at a microsecond.
    key = device, raw_stream(device.index)
    counter = _counters.get(key)
    if counter is None:
        # The first of several threads keeps its own, which launches of others may be counting on already.
        counter = _counters.setdefault(key, _kept_counter(device))
    return counter


def _kept_counter(device: torch.device) -> Tensor:
    """One to keep. Another thread makes it: graphs that torch.compile records own what the calling one allocates."""

    def make() -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.device(device):
            counter, is_zero = torch.zeros(1, dtype=torch.int32, device=device), torch.cuda.Event()
            is_zero.record()
        return counter, is_zero

    with ThreadPoolExecutor(1) as another:
        counter, is_zero = another.submit(make).result()
    torch.cuda.current_stream(device).wait_event(is_zero)
    return counter
