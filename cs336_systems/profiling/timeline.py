"""Memory over time, stacked by category, with the phases marked: the figures, and a picture of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .allocations import History, Phase
from .categories import CATEGORIES, RULES, STANDING, Rule, classifier
from .memory import MIB
from .plots import save_figure

COLOURS = {
    "there before": "#8b9099",
    "optimizer state": "#5b6b8c",
    "gradient": "#c44e00",
    "narrow parameters": "#b39ddb",
    "residual stream": "#111111",
    "embedding": "#7a3b1e",
    "norm": "#8a6d00",
    "attention projections": "#2b93c4",
    "attention scores": "#a8326e",
    "softmax": "#e07bb0",
    "attention output": "#0060a8",
    "FFN": "#00805e",
    "logits and loss": "#5c8a00",
    "optimizer's temporaries": "#d9a400",
    "other": "#c9c9c9",
}
"""Of the categories."""
OTHER_COLOUR = "#c9c9c9"
"""Of a category that rules of somebody's own have."""


@dataclass(frozen=True)
class Timeline:
    """Bytes at some of the events of a recording.

    Attributes:
        events: which, ascending.
        layers: by category, from the lowest layer up, the bytes at each of them.
        phases: of the recording.
        length: how many events the recording has.
        peak: the event of the peak, and the bytes then.
    """

    events: tuple[int, ...]
    layers: dict[str, tuple[int, ...]]
    phases: tuple[Phase, ...]
    length: int
    peak: tuple[int, int]


def timeline_of(history: History, *, rules: Sequence[Rule] = RULES, points: int = 300) -> Timeline:
    """The timeline of a recording; of about as many stretches as ``points`` the event where most is allocated.

    Raises:
        ValueError: nothing was recorded, or ``points`` is below 2.
    """
    if points < 2:
        raise ValueError(f"points must be at least 2; got {points}")
    if history.events == 0:
        raise ValueError("history must have events; got none")
    changes: dict[str, np.ndarray] = {}
    category = classifier(rules)
    for allocation in history.allocations:
        name = STANDING if allocation.begin < 0 else category(allocation)
        changed = changes.setdefault(name, np.zeros(history.events + 1, dtype=np.int64))
        changed[max(0, allocation.begin)] += allocation.bytes
        if allocation.end is not None:
            changed[allocation.end] -= allocation.bytes
    levels = {category: np.cumsum(changed)[:-1] for category, changed in changes.items()}
    levels[STANDING] = levels.get(STANDING, np.zeros(history.events, dtype=np.int64)) + history.standing_bytes
    total = np.sum(list(levels.values()), axis=0)
    chosen = _highest(total, points)
    order = [*(name for name in CATEGORIES if name in levels), *(name for name in levels if name not in CATEGORIES)]
    layers = {name: tuple(int(levels[name][event]) for event in chosen) for name in order}
    return Timeline(tuple(chosen), layers, history.phases, history.events, history.peak())


def _highest(total: np.ndarray, points: int) -> list[int]:
    edges = np.unique(np.linspace(0, len(total), min(points, len(total)) + 1).astype(int))
    highest = {int(begin + np.argmax(total[begin:end])) for begin, end in itertools.pairwise(edges)}
    return sorted(highest | {0, len(total) - 1})


def draw_timeline(path: Path, timeline: Timeline, *, title: str) -> None:
    """Draw a timeline as PNG; needs matplotlib, which is imported here."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4.6), layout="constrained")
    try:
        layers = [np.array(layer) / MIB for layer in timeline.layers.values()]
        colours = [COLOURS.get(name, OTHER_COLOUR) for name in timeline.layers]
        axes.stackplot(timeline.events, *layers, labels=list(timeline.layers), colors=colours, step="post")
        for phase in timeline.phases:
            axes.axvline(phase.begin, color="#1a1a1a", linewidth=0.8, linestyle="--")
            middle = (phase.begin + phase.end) / 2
            axes.text(middle, 1.01, phase.name, ha="center", va="bottom", transform=axes.get_xaxis_transform())
        event, peak = timeline.peak
        axes.plot([event], [peak / MIB], marker="v", color="#1a1a1a", linestyle="", label=f"peak {peak / MIB:.1f} MiB")
        axes.set_xlim(0, timeline.length)
        axes.set_ylim(0, 1.08 * peak / MIB)
        axes.set_xlabel("allocations and frees, numbered")
        axes.set_ylabel("allocated, MiB")
        figure.legend(loc="outside right center", frameon=False, reverse=True, fontsize=8)
        figure.suptitle(title, fontsize=11, fontweight="bold")
        save_figure(figure, path)
    finally:
        plt.close(figure)
