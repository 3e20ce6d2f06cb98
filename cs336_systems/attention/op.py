"""The operators that torch.compile, torch.export, torch.func, fake tensors and dispatch modes see.

``cs336_systems::flash_forward``, ``flash_backward``, ``tiled_forward`` and ``tiled_backward``: opaque, with a fake
implementation, a gradient and a vmap rule. Eager calls go around them, which spares the cost of the dispatcher.
"""

from __future__ import annotations

import itertools
from ast import literal_eval
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.call import Aux, AuxLayout, Call, Gradients, Options, Wanted
from ..kernels.layouts import one_a_row, rows_like
from ..kernels.rules import bits_of, numbers_of, structure_of, with_numbers
from ..kernels.torch_names import constant_when_traced, transform_level
from .derivatives import TWICE

NAMESPACE = "cs336_systems"

AUX = (
    "Tensor? sinks, Tensor? seed, Tensor? block_rows, Tensor? block_columns, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cache_lengths, Tensor[] mask_aux, Tensor[] score_aux"
)
OPTIONS = (
    "float scale, SymInt? window_left, SymInt? window_right, bool bottom_right, float? softcap, float dropout_p, "
    "str rules, Scalar[] rule_numbers, SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool deterministic"
)
FORWARD = f"(Tensor q, Tensor k, Tensor v, {AUX}, {OPTIONS}) -> (Tensor, Tensor)"
BACKWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, "
    f"{AUX}, {OPTIONS}, bool want_sinks, bool[] want_score_aux) -> (Tensor, Tensor, Tensor, Tensor[])"
)
"""The backward also returns the gradients wanted, that of the sinks first."""

NUM_AUX = len(Aux._fields)
NUM_OPTIONS = len(Options._fields)

library = torch.library.Library(NAMESPACE, "DEF")


def transforming() -> bool:
    """Whether a transform of `torch.func` such as vmap is active, and torch.compile, which traces it, is not."""
    return not torch.compiler.is_compiling() and transform_level() is not None


def forward(implementation: str, call: Call) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp by the operator of an implementation, "flash" or "tiled"."""
    operator = getattr(torch.ops.cs336_systems, f"{implementation}_forward")
    return operator(call.q, call.k, call.v, *aux_arguments(call.aux), *option_arguments(call.options))


def backward(
    implementation: str, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    """The gradients by the operator of an implementation."""
    operator = getattr(torch.ops.cs336_systems, f"{implementation}_backward")
    arguments = (*aux_arguments(call.aux), *option_arguments(call.options), wanted.sinks, list(wanted.score_aux))
    dq, dk, dv, others = operator(call.q, call.k, call.v, out, lse, dout, dlse, *arguments)
    return Gradients(dq, dk, dv, *unflatten(others, wanted))


def aux_arguments(aux: Aux) -> tuple[Any, ...]:
    """The arguments `AUX` of an operator."""
    tensors = _distinct(aux) if torch.compiler.is_compiling() else aux
    return (*tensors[:-2], list(tensors.mask_aux), list(tensors.score_aux))


def _distinct(aux: Aux) -> Aux:
    """The same tensors, with views in place of repeated ones: torch.compile takes none twice."""
    seen: list[Tensor] = []

    def once(tensor: Tensor) -> Tensor:
        tensor = tensor.view_as(tensor) if any(tensor is other for other in seen) else tensor
        seen.append(tensor)
        return tensor

    return aux.map(once)


def option_arguments(options: Options) -> tuple[Any, ...]:
    """The arguments `OPTIONS` of an operator."""
    expressions = options.mask, options.scores
    numbers = numbers_of(expressions)
    # torch.export.save takes no empty list of Scalars, and no floats among integers. A surplus number does no harm.
    numbers = [bits_of(number) if isinstance(number, float) else number for number in numbers] or [0]
    return (*options[:6], _text_of(*structure_of(expressions)), numbers, *options[8:])


@constant_when_traced
def _text_of(*structure: Any) -> str:
    return repr(structure)


def call_of(q: Tensor, k: Tensor, v: Tensor, arguments: Sequence[Any]) -> Call:
    """The call from q, k, v and the arguments `AUX` and `OPTIONS` of an operator."""
    options = arguments[NUM_AUX : NUM_AUX + NUM_OPTIONS]
    mask, scores = with_numbers(literal_eval(options[6]), iter(options[7]))
    return Call(q, k, v, Options._make([*options[:6], mask, scores, *options[8:]]), aux_of(arguments[:NUM_AUX]))


def aux_of(arguments: Sequence[Any]) -> Aux:
    """The tensors from the arguments `AUX` of an operator."""
    *named, mask_aux, score_aux = arguments
    return Aux._make([*named, tuple(mask_aux), tuple(score_aux)])


def unflatten(gradients: Sequence[Tensor], wanted: Wanted) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """The gradients of the sinks and of score_aux from a list of those wanted; None for the others."""
    rest = iter(gradients)
    sinks = next(rest) if wanted.sinks else None
    return sinks, tuple([next(rest) if want else None for want in wanted.score_aux])


def register(implementation: str, plan_of: Callable[[str, Call], Any], keys: Sequence[str]) -> None:
    """Define the two operators of an implementation, for these dispatch keys; ``plan_of`` makes the plan of a call."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        call = call_of(q, k, v, arguments)
        return plan_of(implementation, call).forward(q, k, v, call.aux)

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        *others, want_sinks, want_score_aux = arguments
        # vmap may expand them with a stride of 0 along the batch.
        out, lse = out if out.stride(-1) == 1 else out.contiguous(), lse.contiguous()
        wanted = Wanted(want_sinks, tuple(want_score_aux))
        call = call_of(q, k, v, others)
        gradients = plan_of(implementation, call).backward(q, k, v, out, lse, dout, dlse, call.aux, wanted)
        rest = [x for x in (gradients.sinks, *gradients.score_aux) if x is not None]
        return gradients.q, gradients.k, gradients.v, [*map(laid_out_like, rest, wanted_tensors(call.aux, wanted))]

    for name, schema, function, fake in (
        (f"{implementation}_forward", FORWARD, forward, _fake_forward),
        (f"{implementation}_backward", BACKWARD, backward, _fake_backward),
    ):
        library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        for key in keys:
            library.impl(name, function, key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    _register_gradient(implementation)
    _register_vmap(implementation)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return rows_like(q, v.shape[-1]).empty(q.dtype, q.device), one_a_row(q).empty(wide, q.device)


def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dq, dk, dv = (rows_like(x, x.shape[-1]).empty(x.dtype, x.device) for x in (q, k, v))
    aux, wanted = aux_of(arguments[:NUM_AUX]), Wanted(arguments[-2], tuple(arguments[-1]))
    return dq, dk, dv, [*map(torch.empty_like, wanted_tensors(aux, wanted))]


def wanted_tensors(aux: Aux, wanted: Wanted) -> list[Tensor]:
    """The sinks and what score changes captured: those that get gradients, in the order of `unflatten`."""
    tensors = itertools.compress((aux.sinks, *aux.score_aux), (wanted.sinks, *wanted.score_aux))
    return [x for x in tensors if x is not None]


def laid_out_like(x: Tensor, tensor: Tensor) -> Tensor:
    """x with the strides of ``torch.empty_like(tensor)``, which compiled code takes it to have."""
    expected = torch.empty_like(tensor, device="meta").stride()
    is_alike = all(size == 1 or one == other for size, one, other in zip(x.shape, x.stride(), expected, strict=True))
    return x if is_alike else torch.empty_like(tensor).copy_(x)


def _register_gradient(implementation: str) -> None:
    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v = inputs[:3]
        aux, ctx.options = aux_of(inputs[3 : 3 + NUM_AUX]), inputs[3 + NUM_AUX :]
        ctx.layout = AuxLayout.of(aux)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *output, *aux.tensors)

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        aux = ctx.layout.restore(tensors)
        wanted = Wanted(bool(ctx.needs_input_grad[3]), tuple(ctx.needs_input_grad[3 + NUM_AUX - 1]))
        dout = torch.zeros_like(out) if dout is None else dout
        operator = getattr(torch.ops.cs336_systems, f"{implementation}_backward")
        arguments = *aux_arguments(aux), *ctx.options, wanted.sinks, list(wanted.score_aux)
        *gradients, flat = operator(q, k, v, out, lse, dout, dlse, *arguments)
        sinks, of_score_aux = unflatten(flat, wanted)
        none = [None] * (NUM_AUX - 3)
        return *gradients, sinks, *none, [None] * len(aux.mask_aux), [*of_score_aux], *[None] * NUM_OPTIONS

    def refuse(ctx: Any, *gradients: Any) -> None:
        raise RuntimeError(TWICE)

    name = f"{NAMESPACE}::{implementation}"
    torch.library.register_autograd(f"{name}_forward", backward, setup_context=keep, lib=library)
    torch.library.register_autograd(f"{name}_backward", refuse, lib=library)


def _register_vmap(implementation: str) -> None:
    def rule(way: str, num_tensors: int) -> Callable[..., Any]:
        def of_batch(info: Any, in_dims: Any, *arguments: Any) -> Any:
            operator = getattr(torch.ops.cs336_systems, f"{implementation}_{way}")
            if aux_of(arguments[num_tensors : num_tensors + NUM_AUX]).tensors:
                # What rules captured is numbered by the batch entries and heads of one call.
                results = _one_by_one(info, in_dims, operator, *arguments)
            else:
                leading = _leading(info, in_dims[:num_tensors], *arguments[:num_tensors])
                results = operator(*leading, *arguments[num_tensors:])
            return results, tuple([[0] * len(x) if isinstance(x, list) else 0 for x in results])

        return of_batch

    torch.library.register_vmap(f"{NAMESPACE}::{implementation}_forward", rule("forward", 3), lib=library)
    torch.library.register_vmap(f"{NAMESPACE}::{implementation}_backward", rule("backward", 7), lib=library)


def _leading(info: Any, in_dims: Sequence[Any], *tensors: Tensor | None) -> list[Tensor | None]:
    """Tensors of a call under vmap with its axis first, expanded where a tensor has none."""
    moved: list[Tensor | None] = []
    for tensor, axis in zip(tensors, in_dims, strict=True):
        if tensor is None:
            moved.append(None)
        else:
            moved.append(tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0))
    return moved


def _one_by_one(info: Any, in_dims: Any, operator: Any, *arguments: Any) -> tuple[Any, ...]:
    """An operator for each entry along vmap's axis, and the results stacked."""

    def entry(argument: Any, axis: Any, number: int) -> Any:
        if isinstance(argument, (list, tuple)) and isinstance(axis, (list, tuple)):
            return [entry(item, own, number) for item, own in zip(argument, axis, strict=True)]
        return argument if axis is None else argument.select(axis, number)

    results = [
        operator(*[entry(argument, axis, number) for argument, axis in zip(arguments, in_dims, strict=True)])
        for number in range(info.batch_size)
    ]
    return tuple(
        [torch.stack(parts) for parts in zip(*column, strict=True)]
        if isinstance(column[0], list)
        else torch.stack(column)
        for column in zip(*results, strict=True)
    )
