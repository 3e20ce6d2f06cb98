"""Every private or moving name of torch that calls and modules use, and nothing else.

Those of Triton and Gluon are in `versions`; this module imports neither, and not torch's compiler, which takes seconds.
A name is private where torch begins it with an underscore, and moving where it is experimental. Each stands here once,
with the reason for it and the public name that it gives way to.

Importing this module never fails. Where the installed torch lacks a name that calls need, what stands in for it is
right, if slower; `why_unknown` says so, and the kernels for Hopper refuse every call. What only measurements need is in
`cs336_systems.profiling.torch_names`.
"""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

KNOWN = ("2.11.", "2.12.", "2.13.", "2.14.", "2.15.")
"""Versions of torch with which everything is run."""

LIST = ", ".join(f"{version}x" for version in KNOWN)
"""They, as text."""

needed: list[str] = []
"""Names that calls need."""
missing: list[str] = []
"""Those of them that the installed torch lacks."""

Function = TypeVar("Function", bound=Callable[..., Any])


def find(*names: str) -> Any:
    """What the first of these names, ``module:attribute.attribute``, stands for; None if none exists."""
    for name in names:
        module, _, path = name.partition(":")
        try:
            return functools.reduce(getattr, path.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            continue
    return None


def is_known() -> bool:
    """Whether the installed torch is one of `KNOWN`."""
    return torch.__version__.startswith(KNOWN)


def why_unknown() -> str | None:
    """Why the kernels for Hopper cannot be relied on with the installed torch; None if they can."""
    if not is_known():
        return f"they are run with torch {LIST}; got {torch.__version__}"
    return f"torch {torch.__version__} lacks {', '.join(missing)}" if missing else None


def _has(name: str) -> bool:
    """Whether the installed torch has what calls need."""
    needed.append(name)
    if find(name) is None:
        missing.append(name)
    return name not in missing


# --- What calls need. It is bound here once, because calls take a few microseconds.

# How many dispatch modes, such as fake tensors', see operators. There is no public name. Without it every call goes
# through the dispatcher, and values are not checked, as where they are on a GPU.
_has_modes = _has("torch:_C._len_torch_dispatch_stack")
modes_at_work: Callable[[], int] = torch._C._len_torch_dispatch_stack if _has_modes else lambda: 1


class _NoDispatchMode:
    """Says what is lacking where a mod is recorded."""

    def __init__(self) -> None:
        name = "torch.utils._python_dispatch.TorchDispatchMode"
        raise RuntimeError(f"functions of a pair are recorded by {name}, which torch {torch.__version__} lacks")


# Sees every operation below autograd, as a mod's. There is no public name. Without it there are no masks of rules, and
# no score changes.
TorchDispatchMode: Any = find("torch.utils._python_dispatch:TorchDispatchMode") or _NoDispatchMode


class RecordingMode(TorchDispatchMode):
    """A mode for which torch does not import its compiler, for a second, to keep it from what the mode does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Untransformable(torch.autograd.Function):
    """A Function without ``setup_context``, which transforms refuse."""

    @staticmethod
    def forward(ctx: Any) -> None:
        """Compute nothing."""


def _refusing_level() -> int | None:
    try:
        _Untransformable.apply()
    except RuntimeError:
        return 1
    return None


# The innermost active transform of `torch.func`, or None. There is no public name.
_has_transforms = _has("torch:_C._functorch.maybe_current_level")
transform_level: Callable[[], int | None] = (
    torch._C._functorch.maybe_current_level if _has_transforms else _refusing_level
)


# Within it no transform of `torch.func` is active. There is no public name. Without it a mod cannot be recorded within
# one, and says so.
untransformed: Callable[[], AbstractContextManager[object]] = (
    find("torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack") or nullcontext
)


# Whether a gradient is a batch, as `torch.autograd.grad` makes it with ``is_grads_batched``. There is no public name.
# Without it a backward raises what torch does: that it has no storage, or that an operator knows no batches.
_has_batches = _has("torch:_C._functorch.is_legacy_batchedtensor")
is_batch_of_autograd: Callable[[torch.Tensor], bool] = (
    torch._C._functorch.is_legacy_batchedtensor if _has_batches else lambda tensor: False
)


def _exporting_flag() -> bool:
    return torch.compiler._is_exporting_flag


# Whether torch.export is at work. Public is ``torch.compiler.is_exporting``, but in torch 2.11 Dynamo takes that for
# true in torch.compile as well; what it returns is this flag.
_has_flag = _has("torch.compiler:_is_exporting_flag")
exporting: Callable[[], bool] = _exporting_flag if _has_flag else torch.compiler.is_exporting


def _forward_level() -> bool:
    return forward_ad._current_level >= 0


# Whether forward-mode differentiation may be at work. There is no public name. Without it, it always may: then calls
# are Functions that refuse it, also where they need no gradient.
_has_level = _has("torch.autograd.forward_ad:_current_level")
in_forward_mode: Callable[[], bool] = _forward_level if _has_level else lambda: True


def apply_of(function: Any) -> Callable[..., Any]:
    """An autograd Function's ``apply`` without the Python around it, which looks for transforms of torch.func.

    For callers that know that none is active. It is what ``Function.apply`` itself calls.
    """
    applied: Callable[..., Any] = getattr(super(torch.autograd.Function, function), "apply", function.apply)
    return applied


def _raw_stream(index: int) -> int:
    stream: int = torch.cuda.current_stream(index).cuda_stream
    return stream


# The address of the current stream of a GPU. Public is ``torch.cuda.current_stream``, which makes an object, at a
# microsecond. A torch without CUDA has none.
raw_stream: Callable[[int], int] = find("torch:_C._cuda_getCurrentRawStream") or _raw_stream


# The index of the current GPU, and whether autocast is on for any type of device. Public are
# ``torch.cuda.current_device`` and ``torch.is_autocast_enabled(device_type)``, which take longer.
current_device: Callable[[], int] = find("torch:_C._cuda_getDevice") or torch.cuda.current_device
any_autocast: Callable[[], bool] = find("torch:_C._is_any_autocast_enabled") or (lambda: True)


_PLAIN = {Tensor, nn.Parameter}


def must_dispatch(*tensors: Tensor) -> bool:
    """Whether something else has to see the call: tracing, a transform, a dispatch mode, a tensor subclass."""
    if torch.compiler.is_compiling() or modes_at_work() or transform_level() is not None:
        return True
    return not _PLAIN.issuperset(map(type, tensors))


def constant_when_traced(function: Function) -> Function:
    """Have torch.compile take what a function returns for a constant, as its arguments are.

    Public is ``torch.compiler.assume_constant_result``, which does this in every known version, and imports the
    compiler first.
    """
    if not is_known():
        return torch.compiler.assume_constant_result(function)
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced
def traced_functions() -> tuple[str, ...]:
    """The autograd Functions whose forwards torch.compile is tracing, by name, the innermost first."""
    # Dynamo inlines a forward as if no Function called it, so its own frames are asked. There is no public name.
    applying = [frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_name == "call_apply"]
    tracers: list[Any] = [frame.f_locals.get("self") for frame in applying]
    return tuple(x.fn_cls.__name__ for x in tracers if type(x).__name__ == "AutogradFunctionVariable")


def recompiled(most: int) -> AbstractContextManager[object] | None:
    """What torch.compile runs in to compile a function ``most`` times, where it would give up after 8.

    ``torch.compiler.config`` has the limit, but does not document how to set it for a while; in 2.11 `torch.compile`
    does not take it. None without it: then do not compile with ``fullgraph``; beyond the limit torch runs eagerly.
    """
    if find("torch.compiler:config.recompile_limit") is None:
        return None
    patched: AbstractContextManager[object] = find("torch.compiler:config.patch")(recompile_limit=most)
    return patched


def holds_for_all_sizes(condition: bool | torch.SymBool) -> bool:
    """Whether a condition is known to hold for all sizes that what torch traces is for.

    ``torch.fx.experimental`` has it, where names move. Without it a condition on sizes is never known to hold.
    """
    try:
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes long
    except ImportError:
        return condition is True
    return statically_known_true(condition)


def constant_of(number: float | torch.SymInt | torch.SymFloat) -> Any:
    """The number, if it is the same in all calls of the program that Dynamo traces; else None.

    ``torch.fx.experimental`` has it, where names move. Without it no number is known to be.
    """
    try:
        from torch.fx.experimental.symbolic_shapes import guard_scalar, has_static_value  # takes long
    except ImportError:
        return None
    # What a program computes of lengths may be a constant, which Dynamo does not take for one by itself.
    return guard_scalar(number) if isinstance(number, bool) or has_static_value(number) else None


def surely(condition: bool | torch.SymBool) -> bool:
    """Whether a condition holds; while torch traces, whether it holds for all sizes of the traced program."""
    return holds_for_all_sizes(condition) if torch.compiler.is_compiling() else bool(condition)


# --- What modules need. There are no public names for it.

COMPILED = "_orig_mod"
"""What torch.compile puts into the names of a module's parameters. Weights with another one are refused."""


def _has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _has_hooks(module: nn.Module) -> bool:
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_have_hooks = all(hasattr(nn.Module(), name) for name in HOOKS)
# Whether calling a module also calls hooks. Where torch does not say, assume so: such modules are not fused.
has_forward_hooks: Callable[[nn.Module], bool] = _has_forward_hooks if _have_hooks else lambda module: True
has_hooks: Callable[[nn.Module], bool] = _has_hooks if _have_hooks else lambda module: True


class CastAware(nn.Module):
    """A module whose `after_cast` is called when ``to``, ``half``, ``to_empty`` and the like may have replaced tensors.

    They call ``_apply`` of every module. Where torch has none, `after_cast` is called before each ``forward``.
    """

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(nn.Module, "_apply"):
            self.register_forward_pre_hook(_call_after_cast)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CastAware:
        super()._apply(fn, recurse)
        self.after_cast()
        return self

    def after_cast(self) -> None:
        """Update what depends on tensors that may have been replaced."""
        raise NotImplementedError


def _call_after_cast(module: CastAware, arguments: Any) -> None:
    module.after_cast()
