"""What torch.compile and torch.export trace: modules whose calls have every kind of feature, and their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cs336_systems.attention import Attention, attention_varlen
from cs336_systems.attention.validation import FAR
from cs336_systems.attention.variants import document, prefix, relative_bias
from cs336_systems.attention.variants import window as window_rule
from cs336_systems.testing import Shapes, make_inputs, make_packed

from .features import bent
from .helpers import FLOAT, packed_arguments

HEADS = 4


class Attend(nn.Module):
    """A call whose features are parameters by name, settings, tensors, and rules made of both."""

    def __init__(self, parameters: tuple[str, ...] = (), scores: str | None = None, **settings: Any) -> None:
        super().__init__()
        self.asked = {name: settings.pop(name) for name in ("seed", "return_lse") if name in settings}
        self.attend, self.scores = Attention(**settings), scores
        self.of_heads = nn.ParameterDict({name: nn.Parameter(torch.rand(HEADS)) for name in parameters})
        if scores:
            self.rates = nn.Parameter(torch.rand(HEADS, 7))

    def forward(self, q, k, v, bias=None, mask=None, ids=None):
        features: dict[str, Any] = {name: self.of_heads[name] for name in self.of_heads}
        features |= {"bias": bias, "mask": mask}
        q_len, k_len = q.shape[-2], k.shape[-2]
        if ids is not None:
            own = document(ids[:, :q_len], ids) & window_rule(5, 3, k_len - q_len)
            # ~ by a name, as torch.compile traces no ~ of a class.
            features["mask"] = own | (prefix(ids[:, -1]) & window_rule(2, 1)).inverted()
        if self.scores == "bent":
            rows, columns = (torch.arange(length, device=q.device) % 7 for length in (q_len, k_len))
            changed = bent(self.rates[:, rows], self.rates[:1, columns])
            features["scores"] = changed + changed
        elif self.scores == "table":
            distances = torch.arange(1 - q_len, k_len, device=q.device)
            features["scores"] = relative_bias(self.rates[:, distances.clamp(-3, 3) + 3], q_len - 1)
        return self.attend(q, k, v, **features, **self.asked)


EVERYTHING = {"causal": True, "window": (6, 2), "softcap": 1.5, "dropout_p": 0.3, "seed": 7, "return_lse": True}
CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "causal": ((), (), {"causal": True, "return_lse": True}),
    "top_left": ((), (), {"causal": "top_left"}),
    "window": ((), (), {"causal": True, "window": (6, None)}),
    "window_and_cap": ((), (), {"window": (6, 2), "softcap": 1.5}),
    "far_window": ((), (), {"causal": True, "window": (2**63, None)}),
    "far_sides": ((), (), {"window": (2, FAR)}),
    "slopes_and_sinks": (("alibi_slopes", "sinks"), (), {"causal": True}),
    "bias_and_mask": ((), ("bias", "mask"), {}),
    "rules": ((), ("ids",), {"scores": "bent"}),
    "by_distance": ((), (), {"scores": "table"}),
    "everything": (("alibi_slopes", "sinks"), ("bias", "mask"), EVERYTHING),
}
"""Parameters, further tensors, settings."""
FAR_WINDOWS = ("far_window", "far_sides")


def module_of(name, impl, device):
    parameters, further, settings = CALLS[name]
    return Attend(parameters, impl=impl, **settings).to(device), further


def tensors_for(q_len, k_len, device, further=(), *, batch=2, kv_heads=2, dtype=FLOAT):
    """Arguments by name."""
    shapes = Shapes.of(batch, q_len=q_len, k_len=k_len, d=16, dv=8, q_heads=2 * kv_heads, kv_heads=kv_heads)
    made = make_inputs(shapes, dtype=dtype, device=device)
    every = {
        "bias": torch.randn(HEADS, q_len, k_len, device=device),
        "mask": torch.rand(batch, 1, 1, k_len, device=device) < 0.7,
        "ids": (torch.arange(k_len, device=device) // 4)[None],
    }
    return {"q": made.q, "k": made.k, "v": made.v} | {name: every[name] for name in further}


class AttendPacked(nn.Module):
    """Packed sequences."""

    def __init__(self, impl: str) -> None:
        super().__init__()
        self.impl = impl
        self.sinks, self.slopes = (nn.Parameter(torch.rand(HEADS)) for _ in "ab")

    def forward(self, q, k, v, starts, k_starts):
        settings = {"causal": True, "window": (4, None), "softcap": 2.0, "impl": self.impl}
        return attention_varlen(q, k, v, starts, k_starts, sinks=self.sinks, alibi_slopes=self.slopes, **settings)


def packed_tensors(lengths, device):
    """Its arguments by name."""
    made, given = make_packed(lengths, heads=(HEADS, 2), d=16, device=device), packed_arguments(lengths, device)
    starts = {"starts": given["cu_seqlens_q"], "k_starts": given["cu_seqlens_k"]}
    return {"q": made.q, "k": made.k, "v": made.v} | starts


def values_and_gradients(module, own, tensors):
    """Of a module whose parameters are ``own``."""
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}
    results = module(**leaves)
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(5)
    wanted = [x for x in (*leaves.values(), *own) if x.requires_grad]
    return results, torch.autograd.grad(results, wanted, [torch.randn_like(x) for x in results])


def assert_alike(program, module, tensors):
    """The same values, and gradients of the tensors and of the parameters."""
    expected = values_and_gradients(module, module.parameters(), tensors)
    torch.testing.assert_close(values_and_gradients(program, program.parameters(), tensors), expected)
