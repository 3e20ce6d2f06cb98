"""Mask and score rules of a call bound to the tensors they captured, and its other optional tensors.

Functions with an argument ``read`` return operands of a launch. For a repeated launch, which passes addresses, it is
`torch.Tensor.data_ptr`; for the first one, which passes tensors, it is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from . import rules
from .call import DROPOUT_BITS, Aux, Call, Options, Wanted
from .mods import DISTANCE, NEAR, registry
from .rules import Leaf, Mask, Scores, mask_code, score_code, structure_of

Read = Callable[[Tensor], Any]


class View(NamedTuple):
    """A captured tensor: its position in the aux tuple, and its strides, each in a tuple; `NO_STRIDE` for size 1."""

    position: int
    strides: tuple[tuple[Any, ...], ...]


NO_STRIDE = (0.0, ())
"""Stands for the stride of an axis of size 1.

`at` tells it from a stride by its length, Triton 3.6 by its float: that compiles a function once for all arguments of
the same types, and sees no empty tuples among them. (Nor can it pass on None in a tuple.)
"""


class Term(NamedTuple):
    """A captured tensor of a score rule whose gradient is wanted.

    position: in ``aux.score_aux``. axes: those that its elements differ along, among "batch", "head", "row" and
    "column", or "distance" instead of the last two. origin: the index of distance 0.
    """

    position: int
    axes: frozenset[str]
    origin: int

    @property
    def computed_by(self) -> str:
        """The portable pass that computes it: "row", that of dQ; "column", that of dK and dV; the others are alone."""
        if DISTANCE in self.axes:
            return "distance"
        if {"row", "column"} <= self.axes:
            return "pair"
        return "column" if "column" in self.axes else "row"


@dataclass(frozen=True)
class BoundMods:
    """The rules of a call. mask_args, score_args: what their rules captured, numbers or `View`, in order.

    terms: the captured tensors whose gradients are wanted; positions: the same by rule, as `rules.score_code` takes it.
    is_far: whether the call is longer than `mods.NEAR`.
    """

    mask: Mask | None
    scores: Scores
    mask_args: tuple[Any, ...]
    score_args: tuple[Any, ...]
    terms: tuple[Term, ...]
    positions: tuple[rules.Wanted, ...]
    is_far: bool

    @classmethod
    def of(cls, call: Call, wanted: Wanted) -> BoundMods:
        """The rules of a call; ``wanted.score_aux`` says which captured tensors need gradients."""
        options = call.options
        scores = options.score_rules
        mask_args, _ = _bind([*rules.leaves(options.mask)], call.aux.mask_aux)
        score_args, slots = _bind(scores, call.aux.score_aux)
        terms, positions = [], []
        for index, is_wanted in enumerate(wanted.score_aux):
            if is_wanted:
                rule, slot = slots[index]
                terms.append(_term(index, scores[rule], slot, call.aux.score_aux[index]))
                positions.append(rules.Wanted(rule, slot))
        is_far = max(call.q_len, call.k_len) > NEAR
        return cls(options.mask, scores, mask_args, score_args, tuple(terms), tuple(positions), is_far)

    def code(self, *, backward: bool, into: Callable[[Any], Any] = lambda function: function) -> dict[str, Any]:
        """The kernels' compile-time functions MASK and SCORE, as ``into`` makes them of Triton's."""
        code: dict[str, Any] = {"MASK": None, "SCORE": None}
        if self.mask is not None:
            code["MASK"] = into(mask_code(structure_of(self.mask), self.is_far))
        if self.scores:
            both = score_code(structure_of(self.scores), self.positions, self.is_far)
            code["SCORE"] = into(both.differentiate if backward else both.apply)
        return code

    def captured(self, aux: Aux, read: Read) -> tuple[Any, ...] | None:
        """What mask rules and what score rules captured; None without rules."""
        if self.mask is None and not self.scores:
            return None
        return _fill(self.mask_args, aux.mask_aux, read), _fill(self.score_args, aux.score_aux, read)

    def operands(self, aux: Aux, lists: Tensor | None, read: Read) -> tuple[Any, Any]:
        """What the rules captured, and a list of visible blocks, as a launch takes them."""
        return self.captured(aux, read), block_operand(lists, read)

    def computed_by(self, *passes: str) -> tuple[int, ...]:
        """The numbers of the terms that these passes compute, in the order of the passes."""
        return tuple(n for name in passes for n, term in enumerate(self.terms) if term.computed_by == name)

    def max_slope(self, keep_scale: float) -> float:
        """The largest factor by which rules and dropout multiply score gradients."""
        return max(1.0, rules.steepest(self.scores) * max(1.0, keep_scale))


def tensors_read(call: Call) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The axes that each tensor which a call's rules captured is read along, and the tensor: `rules.axes_read`."""
    leaves = (*rules.leaves(call.options.mask), *call.options.scores)
    return rules.axes_read(leaves, (*call.aux.mask_aux, *call.aux.score_aux))


def axes_with_elements(call: Call) -> list[set[str]]:
    """The axes along which each tensor that a call's rules captured has several elements that they read."""
    steps = [zip(axes, x.shape, x.stride(), strict=False) for axes, x in tensors_read(call)]
    return [{axis for axis, size, stride in each if size > 1 and stride != 0} for each in steps]


def itself(tensor: Tensor) -> Tensor:
    """The tensor: what a first launch reads of it."""
    return tensor


def block_operand(lists: Tensor | None, read: Read) -> tuple[Any, ...] | None:
    """A list of visible blocks with the strides of its first three axes, 0 for axes of size 1; or None."""
    if lists is None:
        return None
    batch, heads = (0 if lists.shape[axis] == 1 else lists.stride(axis) for axis in (0, 1))
    return read(lists), batch, heads, lists.stride(2)


def dropout_operand(options: Options, aux: Aux, read: Read) -> tuple[Any, int, float] | None:
    """(seed, addend, factor of the probabilities that are kept), or None where dropout drops none.

    addend: for both halves of a word, as an int32: the sum of it and two random numbers has the highest bit of a half
    where the probability with the half's number is kept.
    """
    if aux.seed is None or options.dropout_threshold == 0:
        return None
    addend = (2**DROPOUT_BITS - options.dropout_threshold) * 0x10001
    return read(aux.seed), addend - (addend >> 31 << 32), options.keep_scale


def packed_operand(aux: Aux, read: Read) -> tuple[Any, Any] | None:
    """(cu_seqlens_q, cu_seqlens_k), or None without packed sequences."""
    if aux.cu_seqlens_q is None or aux.cu_seqlens_k is None:
        return None
    return read(aux.cu_seqlens_q), read(aux.cu_seqlens_k)


def _bind(leaves: Sequence[Leaf], tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], list[tuple[int, int]]]:
    """What rules captured, with a `View` for each tensor; and the rule and the slot of each tensor."""
    arguments: list[Any] = []
    slots: list[tuple[int, int]] = []
    for rule, (_, captured) in enumerate(leaves):
        for slot, item in enumerate(captured):
            if item is None:
                tensor = tensors[len(slots)]
                axes = zip(tensor.shape, tensor.stride(), strict=True)
                arguments.append(View(len(slots), tuple([NO_STRIDE if size == 1 else (step,) for size, step in axes])))
                slots.append((rule, slot))
            else:
                arguments.append(item)
    return tuple(arguments), slots


def _term(index: int, leaf: Leaf, slot: int, tensor: Tensor) -> Term:
    code = registry[leaf[0]]
    axes = zip(code.gradients[slot].axes, tensor.shape, strict=True)
    return Term(index, frozenset(axis for axis, size in axes if size != 1), code.origin(slot, leaf[1]))


def _fill(arguments: tuple[Any, ...], tensors: Sequence[Tensor], read: Read) -> tuple[Any, ...]:
    return tuple([(read(tensors[x.position]), x.strides) if isinstance(x, View) else x for x in arguments])
