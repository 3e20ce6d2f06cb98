"""What an implementation of attention is held to: inputs of any layout, a float64 oracle, and an error budget.

>>> inputs = make_inputs(Shapes.of(2, q_len=100, d=64), layout="padded_rows")
>>> assert_within_budget(evaluate(my_attention, inputs), inputs)
"""

from .budget import TF32_EPS, Budget, Finding, assert_within_budget, budget_of, compare, difference
from .evaluation import (
    Asked,
    Attend,
    Features,
    Results,
    evaluate,
    naive_results,
    oracle,
    poisoned_memory,
)
from .inputs import LAYOUTS, Inputs, Shapes, make_inputs
from .sequences import (
    assert_cached_within_budget,
    assert_packed_within_budget,
    make_cache,
    make_packed,
    starts_of,
)
from .terms import roundings, terms

__all__ = [
    "LAYOUTS",
    "TF32_EPS",
    "Asked",
    "Attend",
    "Budget",
    "Features",
    "Finding",
    "Inputs",
    "Results",
    "Shapes",
    "assert_cached_within_budget",
    "assert_packed_within_budget",
    "assert_within_budget",
    "budget_of",
    "compare",
    "difference",
    "evaluate",
    "make_cache",
    "make_inputs",
    "make_packed",
    "naive_results",
    "oracle",
    "poisoned_memory",
    "roundings",
    "starts_of",
    "terms",
]
