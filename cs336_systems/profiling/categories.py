"""What allocations are for: categories by the module, the statement and the operation that they come from.

The rules are a table, read from the top: the first that matches decides. They know this library's Transformer, and
modules and operations by their usual names; for another model give rules of its own, before these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .allocations import Allocation, History
from .origins import Origin
from .recording import GRADIENT, OF_A_PARAMETER, OPTIMIZER_STATE

SCORES = "attention scores"
SOFTMAX = "softmax"
ATTENTION_OUTPUT = "attention output"
PROJECTIONS = "attention projections"
FFN = "FFN"
NORM = "norm"
EMBEDDING = "embedding"
RESIDUAL = "residual stream"
LOSS = "logits and loss"
PARAMETER_COPIES = "narrow parameters"
UPDATE = "optimizer's temporaries"
OTHER = "other"
STANDING = "there before"

CATEGORIES = (
    *(STANDING, OPTIMIZER_STATE, GRADIENT, PARAMETER_COPIES, RESIDUAL, EMBEDDING, NORM, PROJECTIONS, SCORES, SOFTMAX),
    *(ATTENTION_OUTPUT, FFN, LOSS, UPDATE, OTHER),
)
"""In the order in which pictures stack them."""


@dataclass(frozen=True)
class Rule:
    """A category, and what an allocation has to be to belong to it: all that is given.

    Attributes:
        category: the name.
        owner: equal to the allocation's.
        phase: equal to the allocation's.
        module: a pattern found in the path of the module.
        source: a pattern found in ``file.py:function: statement``; see `Origin.source`.
        operation: a pattern found in the operation.
    """

    category: str
    owner: str = ""
    phase: str = ""
    module: str = ""
    source: str = ""
    operation: str = ""

    def matches(self, allocation: Allocation) -> bool:
        """Whether the allocation is all that the rule asks for."""
        if (self.owner and self.owner != allocation.owner) or (self.phase and self.phase != allocation.phase):
            return False
        asked = {name: getattr(self, name) for name in ("module", "source", "operation") if getattr(self, name)}
        if allocation.origin is None:
            return not asked
        return all(re.search(pattern, getattr(allocation.origin, name)) for name, pattern in asked.items())


_FUSED = r"scaled_dot_product|flash_attention|efficient_attention|^cs336_systems\."

RULES = (
    Rule(GRADIENT, owner=GRADIENT),
    Rule(OPTIMIZER_STATE, owner=OPTIMIZER_STATE),
    Rule(UPDATE, phase="optimizer"),
    Rule(PARAMETER_COPIES, operation=OF_A_PARAMETER + "$"),
    Rule(LOSS, operation=r"log_softmax|nll_loss|cross_entropy"),
    Rule(LOSS, source=r"^loss\.py:"),
    Rule(LOSS, module=r"(^|\.)lm_head$"),
    Rule(NORM, module=r"(^|\.)(ln\w*|\w*norm\w*)$"),
    Rule(FFN, module=r"(^|\.)(ffn|mlp|feed_forward)(\.|$)"),
    Rule(ATTENTION_OUTPUT, operation=_FUSED),
    Rule(SOFTMAX, operation=r"^aten\._softmax"),
    Rule(SOFTMAX, source=r"^(naive|tiled)\.py:\w+: weights = "),
    Rule(ATTENTION_OUTPUT, source=r"^naive\.py:\w+: out = "),
    Rule(SCORES, source=r"^(naive|pairs|spec)\.py:|^tiled\.py:(hidden:|\w+: scores = )"),
    Rule(ATTENTION_OUTPUT, module=r"(^|\.)attend$"),
    Rule(PROJECTIONS, module=r"(^|\.)(attn|attention|self_attn)(\.|$)"),
    Rule(EMBEDDING, module=r"(^|\.)\w*emb\w*$"),
    Rule(RESIDUAL, module=r"(^|\.)(layers|blocks|h)\.\d+$"),
)
"""For this library's Transformer with any of its implementations of attention."""


def category_of(allocation: Allocation, rules: Sequence[Rule] = RULES) -> str:
    """The category of the first rule that matches, or `OTHER`."""
    return next((rule.category for rule in rules if rule.matches(allocation)), OTHER)


def classifier(rules: Sequence[Rule] = RULES) -> Callable[[Allocation], str]:
    """`category_of` for many allocations, most of which come from where others do."""
    known: dict[tuple[Origin | None, str, str], str] = {}

    def category(allocation: Allocation) -> str:
        key = (allocation.origin, allocation.phase, allocation.owner)
        if key not in known:
            known[key] = category_of(allocation, rules)
        return known[key]

    return category


def largest_by_category(history: History, rules: Sequence[Rule] = RULES) -> dict[tuple[str, str], Allocation]:
    """The largest single allocation of each (category, phase), the first of equals, in the order of their size.

    In the backward pass an operation allocates the gradients of what it was given: of the product of probabilities and
    values, say, one as large as the probabilities. So phases are kept apart.
    """
    largest: dict[tuple[str, str], Allocation] = {}
    category = classifier(rules)
    for allocation in largest_first(history.allocations):
        largest.setdefault((category(allocation), allocation.phase), allocation)
    return largest


def largest_first(allocations: Iterable[Allocation]) -> list[Allocation]:
    """Those that were made in the recording, by size; equals in the order in which they were made."""
    return sorted((each for each in allocations if each.begin >= 0), key=lambda each: -each.bytes)


@dataclass(frozen=True)
class Kind:
    """Allocations that differ in the number of their layer, or of their pass, alone: the first of them, and how many.

    ``module`` has a star in place of such a number.
    """

    first: Allocation
    module: str
    times: int


def kinds(allocations: Iterable[Allocation], rules: Sequence[Rule] = RULES) -> list[Kind]:
    """The kinds of allocations, in the order of their first ones."""
    found: dict[tuple[object, ...], list[Allocation]] = {}
    category = classifier(rules)
    for each in allocations:
        told: tuple[str, ...] = ("", "", "")
        if each.origin is not None:
            told = (re.sub(r"(?<![^.])\d+(?![^.])", "*", each.origin.module), each.origin.operation, each.origin.place)
        found.setdefault((*told, category(each), each.phase, each.bytes), []).append(each)
    return [Kind(same[0], str(key[0]), len(same)) for key, same in found.items()]


def bytes_at(history: History, event: int, rules: Sequence[Rule] = RULES) -> dict[str, int]:
    """What is allocated after an event, by category; what was there before is one of its own."""
    found = dict.fromkeys(CATEGORIES, 0) | {STANDING: history.standing_bytes}
    category = classifier(rules)
    for allocation in history.allocations:
        if allocation.lives_at(event):
            name = STANDING if allocation.begin < 0 else category(allocation)
            found[name] = found.get(name, 0) + allocation.bytes
    return {category: size for category, size in found.items() if size}
