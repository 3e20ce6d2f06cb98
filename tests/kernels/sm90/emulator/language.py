"""Gluon's and Triton's languages on torch's tensors, and stand-ins for the modules that kernels import."""

from __future__ import annotations

import math
import struct
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from . import accesses
from .roles import Barrier, Barriers, arrive_at, here, jit, warp_specialize
from .values import DTYPES, Pointer, Shared, TensorDescriptor, Value, plain


def constexpr(value: Any) -> Any:
    """A constant, which has itself as its ``value``."""
    if type(value) in _CONSTANTS:
        return _CONSTANTS[type(value)](value)
    return value


_CONSTANTS: dict[type, type] = {
    kind: type("Constant", (kind,), {"value": property(lambda self, kind=kind: kind(self))})
    for kind in (int, float, tuple)
}


def assembly(text, constraints, args, dtype, is_pure=True, pack=1):
    """The inline PTX of the kernels."""
    if "mul.wide.u32" in text:
        factor = int(text.split("$2, ")[1].split(";")[0])
        return wide_product(args[0].x.long() & WORD, factor)
    if text.startswith("shfl.sync.bfly.b32 $0, $1, "):
        [x] = args
        return Value(x.x[torch.arange(len(x.x)) ^ int(text.split(", ")[2])])
    if text.startswith("shf.l.wrap.b32 $0, $1, $1, 1;"):
        x = args[0].x.long() & WORD
        return Value((x << 1 | x >> 31).int())
    if text.startswith("prmt.b32"):
        x, *y, choice = (x.x.long() & WORD for x in args)
        return chosen_bytes(x, y[0] if y else 0 * x, choice)
    if text.startswith("{.reg .b32 both;"):
        x = args[0].x.int()
        x[:, 1::2] <<= 8
        return Value(x)
    if text.startswith("mov.b32 $0, $1;"):
        return args[0]
    if text.startswith("{.reg .pred seen;"):
        hidden = struct.unpack(">f", bytes.fromhex(text.split("0f")[1][:8]))[0]
        return Value(torch.where(args[1].x != 0, args[0].x, hidden))
    if text.startswith("rcp.approx"):
        return Value(1.0 / args[0].x)
    if text.startswith("bar."):
        operation, threads = text.removeprefix("bar.").split(";")[0].split(" $1, ")
        arrive_at(int(args[0]), int(threads), operation == "sync")
        return None
    if text.startswith("cp.async.bulk.wait_group 0"):
        accesses.wait(here.stores, 0)
        return None
    assert text.startswith(("mov.u32 $0, 0;", "fence.proxy.async.global;"))
    return Value(torch.tensor(0))


WORD = 0xFFFFFFFF


def wide_product(x, factor):
    """The two int32 halves of products of unsigned numbers of 32 bits."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    middle = (low >> 16) + high
    return Value((middle >> 16).int()), Value((middle << 16 | low & 0xFFFF).int())


def chosen_bytes(x, y, choice):
    """PTX's prmt."""
    sources = [number >> 8 * place & 0xFF for number in (x, y) for place in range(4)]
    sources += [(byte >> 7) * 0xFF for byte in sources]
    digits = torch.broadcast_tensors(*[choice >> 4 * place & 0xF for place in range(4)], x)[:4]
    found = [torch.stack(sources).gather(0, digit[None])[0] for digit in digits]
    return Value(torch.stack([byte << 8 * place for place, byte in enumerate(found)]).sum(0).int())


def add_fragments(target, x):
    """`backward_wide.add_fragments`, whose PTX adds what each thread holds."""
    row, column = torch.arange(64)[:, None], torch.arange(x.shape[1])
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    places = column // 8 * 512 + thread * 4 + row % 16 // 8 * 2 + column % 2
    with here.cta.launch.changing:
        target.flat.index_put_(((target.offset + places).view(-1),), x.x.reshape(-1), accumulate=True)


def mma(a, b, total, use_acc=True, is_async=False):
    accesses.read(here.products, *[operand.x for operand in (a, b) if isinstance(operand, Shared)])
    if not is_async:
        accesses.wait(here.products, 0)
    made = a.x.float() @ b.x.float()
    return Value(made + total.x if use_acc else made)


def wait_for_products(pending, values):
    accesses.wait(here.products, pending)
    return values[0] if len(values) == 1 else tuple(values)


def async_load(desc, coords, barrier, buffer):
    x = desc.read(coords)
    accesses.write(buffer.x, by_tma=True)
    buffer.x.copy_(x.reshape(buffer.x.shape))
    barrier.arrive(0, came=x.numel() * x.element_size())


def async_store(desc, coords, buffer):
    accesses.read(here.stores, buffer.x)
    desc.write(coords, buffer.x)


def async_atomic_add(desc, coords, buffer):
    accesses.read(here.stores, buffer.x)
    with here.cta.launch.changing:
        desc.write(coords, buffer.x, accumulate=True)


def expect(barrier, nbytes, pred=True):
    if pred:
        barrier.arrive(1, expected=int(nbytes))


def wait(barrier, parity, pred=True):
    if pred:
        barrier.wait(parity)


def allocate(dtype, shape, layout):
    if layout == "mbarriers":
        return Barriers(shape[0])
    # What is read before it is written is noticed.
    garbage = math.nan if dtype.is_floating() else 0x5A5A5A & torch.iinfo(dtype.of).max
    return Shared(torch.full(shape, garbage, dtype=dtype.of))


def load(pointer, mask=None, other=0):
    if mask is None:
        return Value(pointer.flat[pointer.offset])
    here_ = torch.broadcast_to(plain(mask), torch.broadcast_shapes(plain(mask).shape, pointer.offset.shape))
    return Value(torch.where(here_, pointer.flat[torch.where(here_, pointer.offset, 0)], other))


def store(pointer, value, mask=None):
    x = torch.as_tensor(plain(value), dtype=pointer.flat.dtype)
    shape = torch.broadcast_shapes(pointer.offset.shape, x.shape)
    chosen = torch.ones(shape, dtype=torch.bool) if mask is None else plain(mask).expand(shape)
    pointer.flat[pointer.offset.expand(shape)[chosen]] = x.expand(shape)[chosen]


def atomic_add(pointer, value, sem=None):
    """An addition of 0 polls: when it is repeated it waits until something was added elsewhere."""
    launch = here.cta.launch
    if int(value) == 0 and getattr(here, "polled", None) == (int(pointer.offset), launch.additions):
        _, seen = here.polled
        launch.wait(lambda: launch.additions > seen)
    with launch.changing:
        before = pointer.flat[pointer.offset].clone()
        pointer.flat[pointer.offset] += plain(value)
        if int(value) == 0:
            here.polled = int(pointer.offset), launch.additions
        else:
            launch.additions += 1
            launch.wake()
    return Value(before)


def atomic_cas(pointer, expected, value, sem=None):
    launch = here.cta.launch
    with launch.changing:
        before = pointer.flat[pointer.offset].clone()
        if before == plain(expected):
            pointer.flat[pointer.offset] = plain(value)
            launch.additions += 1
            launch.wake()
    return Value(before)


def _elementwise(apply: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    return lambda *values, **unused: Value(apply(*[torch.as_tensor(plain(value)) for value in values]))


def _extreme(of_numbers: Any, of_floats: Any) -> Callable[..., Any]:
    def apply(one, other, propagate_nan=None):
        if not isinstance(one, Value) and not isinstance(other, Value):
            return (min if of_numbers is torch.minimum else max)(one, other)
        one, other = (torch.as_tensor(plain(x)) for x in (one, other))
        return Value((of_numbers if propagate_nan else of_floats)(one, other))

    return apply


def where(condition, one, other):
    return Value(torch.where(torch.as_tensor(plain(condition)), plain(one), plain(other)))


def _language() -> types.ModuleType:
    language = types.ModuleType("language")
    names: dict[str, Any] = {
        **DTYPES, "tensor": Value, "tuple": tuple, "pointer_type": Pointer, "constexpr": constexpr,
        "shared_memory_descriptor": Shared, "static_range": range, "range": range,
        "PropagateNan": SimpleNamespace(ALL=1),
        "to_tensor": lambda x: x if isinstance(x, Value) else Value(torch.tensor(x)),
        "cast": lambda x, dtype: Value(torch.as_tensor(plain(x)).to(dtype.of)),
        "program_id": lambda axis: Value(torch.tensor(here.cta.number)),
        "num_programs": lambda axis: Value(torch.tensor(here.cta.grid)),
        "arange": lambda start, stop, layout=None: Value(torch.arange(start, stop)),
        "zeros": lambda shape, dtype, layout=None: Value(torch.zeros(shape, dtype=dtype.of)),
        "full": lambda shape, x, dtype, layout=None: Value(torch.full(tuple(shape), plain(x), dtype=dtype.of)),
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "reshape": lambda x, shape: Value(x.x.reshape(*shape)), "permute": lambda x, order: Value(x.x.permute(*order)),
        "split": lambda x: (Value(x.x[..., 0]), Value(x.x[..., 1])),
        "join": lambda one, other: Value(torch.stack([one.x, other.x], -1)),
        "max": lambda x, axis: Value(x.x.amax(axis)), "min": lambda x, axis: Value(x.x.amin(axis)),
        "sum": lambda x, axis: Value(x.x.sum(axis)), "cdiv": lambda x, y: (x + y - 1) // y,
        "minimum": _extreme(torch.minimum, torch.fmin), "maximum": _extreme(torch.maximum, torch.fmax),
        "where": where, "load": load, "store": store, "atomic_add": atomic_add, "atomic_cas": atomic_cas,
        "static_assert": lambda *unused: None,
        "inline_asm_elementwise": assembly, "allocate_shared_memory": allocate, "warp_specialize": warp_specialize,
    }  # fmt: skip
    for name in ("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil"):
        names[name] = _elementwise(getattr(torch, name))
    for name in ("SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "BlockedLayout", "SwizzledSharedLayout"):
        names[name] = lambda *unused: None
    names["NVMMASharedLayout"] = _SharedLayout
    vars(language).update(names)
    return language


class _SharedLayout:
    def __init__(self, *unused: Any) -> None:
        pass

    get_default_for = classmethod(lambda cls, *unused: cls())


def stand_ins() -> dict[str, types.ModuleType]:
    """Stand-ins by the names of what the kernels import."""
    language = _language()
    barriers = SimpleNamespace(
        MBarrierLayout=lambda: "mbarriers", init=Barrier.init, wait=wait, expect=expect,
        arrive=lambda barrier, count=1: barrier.arrive(count),
    )  # fmt: skip
    made: dict[str, dict[str, Any]] = {
        "triton": {
            "jit": jit, "language": language, "constexpr_function": lambda f: f, "__version__": "0",
            "cdiv": lambda x, y: -(-x // y), "next_power_of_2": lambda x: 1 << (x - 1).bit_length(),
            "knobs": SimpleNamespace(runtime=SimpleNamespace(interpret=True)),
        },
        "triton.experimental": {},
        "triton.experimental.gluon": {"jit": jit, "constexpr_function": lambda f: f, "language": language},
        "triton.experimental.gluon.language.nvidia": {},
        "triton.experimental.gluon.language.nvidia.hopper": {
            "mbarrier": barriers, "fence_async_shared": accesses.fence, "warpgroup_mma": mma,
            "tma": SimpleNamespace(
                tensor_descriptor=TensorDescriptor, store_wait=lambda left: accesses.wait(here.stores, left)
            ),
            "warpgroup_mma_wait": wait_for_products,
        },
        "triton.experimental.gluon.nvidia": {},
        "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": TensorDescriptor},
        "emulated.versions": {
            "aggregate": lambda cls: cls, "barrier": lambda: None, "async_load": async_load,
            "async_store": async_store, "async_atomic_add": async_atomic_add, "reinterpret": Shared.reinterpret,
            "runner_of": None,
            "compile_options": dict, "default_ptx_options": dict, "names_of": None, "why_not_gluon": lambda: None,
            "build_launcher": None, "driver": lambda: None, "hash_of_triton": lambda: None,
            "find_key": lambda kernel: None,
        },
    }  # fmt: skip
    modules = {name: types.ModuleType(name) for name in made}
    for name, values in made.items():
        vars(modules[name]).update(values)
    modules["triton.language"] = modules["triton.experimental.gluon.language"] = language
    return modules
