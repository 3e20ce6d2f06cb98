"""Runs the kernels for Hopper on a CPU: Gluon's language on torch's tensors, a Python thread for each role of a CTA.

The kernels' source is imported a second time, as `emulated`, with stand-ins for Triton's modules. Tiles, addresses,
masks, barriers, their phases and what a role waits for are as on a GPU; if all roles wait, the launch fails. Not
emulated: layouts, 32-bit overflow, and when asynchronous operations finish, which here is where they are issued.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import math
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

KERNELS = Path(__file__).parents[3] / "kernels"

WAIT_SECONDS = 300
SMS = 3


class Dtype:
    """Triton's name of a dtype of torch."""

    def __init__(self, of: torch.dtype) -> None:
        self.of = of

    def is_floating(self):
        return self.of.is_floating_point


DTYPES = {
    name: Dtype(of)
    for name, of in {
        "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
        "int1": torch.bool, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    }.items()
}  # fmt: skip
BY_TORCH = {dtype.of: dtype for dtype in DTYPES.values()}


def plain(value: Any) -> Any:
    """A torch tensor for a `Value`, anything else as it is."""
    return value.x if isinstance(value, Value) else value


def value_of(x: Any) -> Any:
    """A kernel's argument: numbers are tensors, as they are in a kernel; bools, which are constants there, are not."""
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    if isinstance(x, tuple):
        return tuple(map(value_of, x))
    return Value(torch.tensor(x)) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


class Value:
    """A tensor in registers, or a scalar."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    dtype = property(lambda self: BY_TORCH[self.x.dtype])
    shape = property(lambda self: [*self.x.shape])
    numel = property(lambda self: self.x.numel())
    type = property(lambda self: SimpleNamespace(layout=None))

    def to(self, dtype, bitcast=False):
        return Value(self.x.view(dtype.of) if bitcast else self.x.to(dtype.of))

    def __getitem__(self, index):
        return Value(self.x[index])

    def __neg__(self):
        return Value(-self.x)

    def __bool__(self):
        return bool(self.x)

    def __index__(self):
        return int(self.x)

    __hash__ = None  # type: ignore[assignment]


def _truncated(one, other):
    return torch.div(one, other, rounding_mode="trunc")


def _binary(apply: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def method(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        one, two = plain(self), plain(other)
        return Value(apply(two, one) if swapped else apply(one, two))

    return method


_OPERATORS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv}
_OPERATORS |= {"floordiv": _truncated, "mod": torch.fmod, "and": operator.and_, "or": operator.or_}
_OPERATORS |= {"xor": operator.xor, "lshift": operator.lshift, "rshift": operator.rshift}
for _name, _apply in _OPERATORS.items():
    setattr(Value, f"__{_name}__", _binary(_apply, False))
    setattr(Value, f"__r{_name}__", _binary(_apply, True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Value, f"__{_name}__", _binary(getattr(operator, _name), False))


class Pointer:
    """Addresses of elements of the storage of a tensor."""

    def __init__(self, x: torch.Tensor, offset: Any = None) -> None:
        size = x.untyped_storage().nbytes() // x.element_size()
        self.flat = torch.as_strided(x, (size,), (1,), 0)
        self.offset = torch.tensor(x.storage_offset()) if offset is None else offset

    dtype = property(lambda self: SimpleNamespace(element_ty=BY_TORCH[self.flat.dtype]))

    def __add__(self, steps):
        return Pointer(self.flat, self.offset + plain(steps))

    __radd__ = __add__


class TensorDescriptor:
    """What TMA copies tiles by; beyond ``shape`` it reads zeros and writes nothing."""

    def __init__(self, base, shape, strides, block_shape, layout) -> None:
        self.base, self.shape, self.strides = base, shape, strides
        self.block_shape, self.layout, self.dtype = block_shape, layout, BY_TORCH[base.dtype]

    def addresses(self, coords):
        """Of a block's elements in the base's storage, and which of them are within the shape."""
        assert len(coords) == len(self.shape) == len(self.block_shape)
        pointer = Pointer(self.base)
        address, within = pointer.offset, torch.tensor(True)
        for axis, (first, size) in enumerate(zip(coords, self.block_shape, strict=True)):
            place = (torch.arange(size) + int(first)).view([-1 if n == axis else 1 for n in range(len(coords))])
            within = within & (place >= 0) & (place < self.shape[axis])
            # Addresses wrap around, as those of 64 bits do.
            stride = (self.strides[axis] + 2**63) % 2**64 - 2**63
            address = address + place * stride
        return pointer.flat, torch.where(within, address, 0), within.expand(address.shape)

    def read(self, coords):
        flat, address, within = self.addresses(coords)
        return torch.where(within, flat[address], 0)

    def write(self, coords, x, accumulate=False):
        flat, address, within = self.addresses(coords)
        flat.index_put_((address[within],), x.reshape(address.shape)[within], accumulate=accumulate)


class Shared:
    """Shared memory, a view of it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    dtype = property(lambda self: BY_TORCH[self.x.dtype])
    shape = property(lambda self: [*self.x.shape])
    numel = property(lambda self: self.x.numel())

    def index(self, place):
        return Shared(self.x[int(place)])

    def slice(self, start, length, dim=0):
        return Shared(self.x.narrow(dim, int(start), length))

    def permute(self, order):
        return Shared(self.x.permute(*order))

    def load(self, layout=None):
        return Value(self.x.clone())

    def store(self, value):
        self.x.copy_(value.x)

    def reinterpret(self, dtype, shape, layout):
        assert self.x.is_contiguous()
        return Shared(self.x.view(-1).view(dtype.of)[: math.prod(shape)].view(shape))


class Launch:
    """The roles of all CTAs of a launch, each a thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.running = 0
        self.failure: BaseException | None = None

    def start(self, jobs: list[tuple[Callable[[], None], Cta, int]]) -> None:
        """Run jobs of a CTA, each as so many warps, and return when they have ended."""
        threads = [threading.Thread(target=self._run, args=job) for job in jobs]
        self.running += len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self, job: Callable[[], None], cta: Cta, warps: int) -> None:
        here.cta, here.warps = cta, warps
        try:
            with torch.no_grad():
                job()
        except BaseException as failure:
            self.failure = self.failure or failure
        with self.changed:
            self.running -= 1
            self._look()

    def wait(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            self.waiting[threading.get_ident()] = ready
            self._look()
            while not ready():
                if self.failure is not None or not self.changed.wait(WAIT_SECONDS):
                    raise RuntimeError("a role stopped waiting: another failed")
            del self.waiting[threading.get_ident()]

    def _look(self) -> None:
        if len(self.waiting) == self.running > 0 and not any(ready() for ready in self.waiting.values()):
            self.failure = self.failure or RuntimeError("all roles wait")
        self.changed.notify_all()


class Cta:
    """A program of a launch: its number, and its hardware barriers by number."""

    def __init__(self, launch: Launch, number: int, grid: int) -> None:
        self.launch, self.number, self.grid = launch, number, grid
        self.arrived: dict[int, int] = {}
        self.phase: dict[int, int] = {}


here = threading.local()


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were announced have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count):
        self.count = self.pending = count

    def arrive(self, count=1, expected=0, came=0):
        with here.cta.launch.changed:
            self.bytes += expected - came
            self.pending -= count
            assert self.pending >= 0
            if self.pending == 0 and self.bytes == 0:
                self.phase += 1
                self.pending = self.count
            here.cta.launch.changed.notify_all()

    def wait(self, parity):
        here.cta.launch.wait(lambda: self.phase % 2 != int(parity))


def arrive_at(number: int, threads: int, waits: bool) -> None:
    """PTX's bar.arrive and bar.sync."""
    cta = here.cta
    with cta.launch.changed:
        cta.arrived[number] = cta.arrived.get(number, 0) + 32 * here.warps
        assert cta.arrived[number] <= threads
        phase = cta.phase.setdefault(number, 0)
        if cta.arrived[number] == threads:
            cta.arrived[number], cta.phase[number] = 0, phase + 1
        cta.launch.changed.notify_all()
    if waits:
        cta.launch.wait(lambda: cta.phase[number] > phase)


def assembly(text, constraints, args, dtype, is_pure=True, pack=1):
    """The inline PTX of the kernels."""
    if text.startswith("rcp.approx"):
        return Value(1.0 / args[0].x)
    if text.startswith("bar."):
        operation, threads = text.removeprefix("bar.").split(";")[0].split(" $1, ")
        arrive_at(int(args[0]), int(threads), operation == "sync")
        return None
    assert text.startswith(("mov.u32 $0, 0;", "cp.async.bulk.wait_group 0"))
    return Value(torch.tensor(0))


def add_fragments(target, x):
    """`backward_wide.add_fragments`, whose PTX adds what each thread holds."""
    row, column = torch.arange(64)[:, None], torch.arange(x.shape[1])
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    places = column // 8 * 512 + thread * 4 + row % 16 // 8 * 2 + column % 2
    with here.cta.launch.changed:
        target.flat.index_put_(((target.offset + places).view(-1),), x.x.reshape(-1), accumulate=True)


class Jit:
    """A function of a kernel, or a kernel, which a grid launches."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args, **kwargs):
            named = {name: value for name, value in kwargs.items() if name in inspect.signature(self.fn).parameters}
            launch = Launch()
            job = functools.partial(self.fn, *map(value_of, args), **named)
            launch.start([(job, Cta(launch, number, grid[0]), 4) for number in range(grid[0])])

        return run


def jit(function=None, **options):
    return Jit(function) if function is not None else Jit


def constexpr(value: Any) -> Any:
    """A constant, which has itself as its ``value``."""
    if type(value) in _CONSTANTS:
        return _CONSTANTS[type(value)](value)
    return value


_CONSTANTS: dict[type, type] = {
    kind: type("Constant", (kind,), {"value": property(lambda self, kind=kind: kind(self))})
    for kind in (int, float, tuple)
}


def warp_specialize(roles, warps, registers):
    cta = here.cta
    jobs = [functools.partial(function, *args) for function, args in roles]
    # The thread that comes here waits for its roles, and is none itself.
    with cta.launch.changed:
        cta.launch.running -= 1
    cta.launch.start(list(zip(jobs, itertools.repeat(cta), [4, *warps], strict=False)))
    with cta.launch.changed:
        cta.launch.running += 1


def mma(a, b, total, use_acc=True, is_async=False):
    made = a.x.float() @ b.x.float()
    return Value(made + total.x if use_acc else made)


def async_load(desc, coords, barrier, buffer):
    x = desc.read(coords)
    buffer.x.copy_(x.reshape(buffer.x.shape))
    barrier.arrive(0, came=x.numel() * x.element_size())


def async_atomic_add(desc, coords, buffer):
    with here.cta.launch.changed:
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
    garbage = math.nan if dtype.is_floating() else 0x5A5A5A
    return Shared(torch.full(shape, garbage, dtype=dtype.of))


class Barriers:
    """Shared memory of mbarriers."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, place):
        return self.all[int(place)]


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
    with here.cta.launch.changed:
        before = pointer.flat[pointer.offset].clone()
        pointer.flat[pointer.offset] += plain(value)
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
        "where": where, "load": load, "store": store, "atomic_add": atomic_add, "static_assert": lambda *unused: None,
        "inline_asm_elementwise": assembly, "allocate_shared_memory": allocate, "warp_specialize": warp_specialize,
    }  # fmt: skip
    for name in ("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil", "sigmoid"):
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


def _modules() -> dict[str, types.ModuleType]:
    """Stand-ins by the names of what the kernels import."""
    language = _language()
    barriers = SimpleNamespace(
        MBarrierLayout=lambda: "mbarriers", init=Barrier.init, wait=wait, expect=expect,
        arrive=lambda barrier, count=1: barrier.arrive(count),
    )  # fmt: skip
    made: dict[str, dict[str, Any]] = {
        "triton": {
            "jit": jit, "language": language, "constexpr_function": lambda f: f, "__version__": "0",
            "cdiv": lambda x, y: -(-x // y), "knobs": SimpleNamespace(runtime=SimpleNamespace(interpret=True)),
        },
        "triton.experimental": {},
        "triton.experimental.gluon": {"jit": jit, "constexpr_function": lambda f: f, "language": language},
        "triton.experimental.gluon.language.nvidia": {},
        "triton.experimental.gluon.language.nvidia.hopper": {
            "mbarrier": barriers, "fence_async_shared": lambda: None, "warpgroup_mma": mma,
            "tma": SimpleNamespace(tensor_descriptor=TensorDescriptor, store_wait=lambda pending: None),
            "warpgroup_mma_wait": lambda pending, values: values[0] if len(values) == 1 else tuple(values),
        },
        "triton.experimental.gluon.nvidia": {},
        "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": TensorDescriptor},
        "emulated.versions": {
            "aggregate": lambda cls: cls, "barrier": lambda: None, "async_load": async_load,
            "async_store": lambda desc, coords, buffer: desc.write(coords, buffer.x),
            "async_atomic_add": async_atomic_add, "reinterpret": Shared.reinterpret, "runner_of": None,
            "compile_options": dict, "default_ptx_options": dict, "names_of": None, "why_not_gluon": lambda: None,
        },
    }  # fmt: skip
    modules = {name: types.ModuleType(name) for name in made}
    for name, values in made.items():
        vars(modules[name]).update(values)
    modules["triton.language"] = modules["triton.experimental.gluon.language"] = language
    return modules


@functools.cache
def emulated() -> SimpleNamespace:
    """The package of the kernels whose Triton is this module: its ``backend``, plans of which run on CPU tensors."""
    package = types.ModuleType("emulated")
    package.__path__ = [str(KERNELS)]
    stand_ins = {"emulated": package, **_modules()}
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "triton"}
    for name in before:
        del sys.modules[name]
    sys.modules.update(stand_ins)
    try:
        names = [f"emulated.{path}" for path in ("launching", "rules", *_paths())]
        modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
            del sys.modules[name]
        sys.modules.update(before)
    backend = modules["backend"]
    modules["backward_wide"].add_fragments = add_fragments
    # Neighbours stay where they are: what the instructions do with them is no arithmetic.
    for module in map(vars, modules.values()):
        if "pack_pairs" in module:
            module["pack_pairs"] = lambda x, dtype, pinned=False: x.to(dtype)
            module["unpack_operand"] = lambda x, dtype, layout, columns: x
    backend.workspace_for = lambda device, tiles: torch.zeros(1 + tiles, dtype=torch.int32)
    # Several CTAs, which run side by side and claim tiles.
    modules["launching"].num_sms = lambda device: SMS
    return SimpleNamespace(**modules)


def _paths() -> Iterator[str]:
    for path in sorted((KERNELS / "sm90").rglob("*.py")):
        if path.stem != "__init__":
            yield ".".join(path.relative_to(KERNELS).with_suffix("").parts)
