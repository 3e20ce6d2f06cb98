"""Where a training step of any model spends its time and its memory, in one call."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..files import write_text
from .environment import Environment, collect_environment
from .module_ranges import ModuleRanges
from .recording import MemoryRecorder
from .report import format_number, markdown_table
from .saved import SavedTensor, saved_tensors
from .steps import time_steps
from .trace import read_trace, record_trace, time_by

MIB = 2**20

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""What a model is called with: a tensor, positional arguments, or keyword arguments."""


@dataclass(frozen=True)
class Profile:
    """What `profile` measured. Its text is a page of tables in Markdown.

    Attributes:
        model: the class of the model.
        phases: median milliseconds of forward, backward, optimizer and the whole step.
        kernels: milliseconds a step by kernel, or on a CPU by operator, the longest first.
        modules: the same by class of module.
        peak: bytes by category when most memory was allocated, the largest first.
        saved: tensors that autograd saves for the backward, the largest first.
        environment: device and versions.
        top: lines of each table of the text.
    """

    model: str
    phases: dict[str, float]
    kernels: dict[str, float]
    modules: dict[str, float]
    peak: dict[str, int]
    saved: tuple[SavedTensor, ...]
    environment: Environment
    top: int

    def __str__(self) -> str:
        here = self.environment
        triton = f", triton {here.triton}" if here.triton else ""
        whole = sum(self.kernels.values()) or 1.0
        return "\n\n".join(
            [
                f"A training step of {self.model} on {here.device}: torch {here.torch}{triton}, {here.date}",
                markdown_table(["phase", "median ms"], [(name, format_number(ms)) for name, ms in self.phases.items()]),
                self._times("kernel" if here.device_type == "cuda" else "operator", self.kernels, whole),
                self._times("class of module", self.modules, whole),
                markdown_table(
                    ["at the peak", "MiB"],
                    [(name, format_number(size / MIB)) for name, size in [*self.peak.items()][: self.top]],
                ),
                markdown_table(
                    ["saved by", "MiB", "shape", "line"],
                    [
                        (x.module or self.model, format_number(x.bytes / MIB), shape_of(x), str(x.statement))
                        for x in self.saved[: self.top]
                    ],
                ),
            ]
        )

    def _times(self, title: str, times: Mapping[str, float], whole: float) -> str:
        lines = [(name[:60], format_number(ms), f"{ms / whole:.0%}") for name, ms in [*times.items()][: self.top]]
        return markdown_table([title, "ms a step", "share"], lines)

    def save(self, path: Path | str) -> None:
        """Write the text as a page of Markdown, atomically."""
        write_text(Path(path), f"# Profile of {self.model}\n\n{self}\n")


def shape_of(saved: SavedTensor) -> str:
    """A shape as tables have it: 4 × 128."""
    return " × ".join(map(str, saved.shape))


def profile(
    model: nn.Module,
    inputs: Inputs,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 3,
    top: int = 8,
) -> Profile:
    """Run a few training steps of a model, and say where their time and memory go.

    >>> found = profile(model, (x,))
    >>> print(found)
    >>> found.save("profile.md")

    Gradients are cleared, and modules that count batches count these. Parameters stay as they are unless an optimizer
    is given. Needs pandas.

    Args:
        model: any module, with at least one parameter that needs a gradient.
        inputs: what it is called with: a tensor, positional arguments, or keyword arguments.
        loss: makes a scalar of the output. By default it is the attribute ``loss`` of the output, the output if that
            has one element, or the mean of its squares.
        optimizer: of the model; by default AdamW with a learning rate of 0.
        steps: timed, after two that are not.
        top: lines of each table of the text.

    Raises:
        ValueError: the model has no parameter that needs a gradient, or ``steps`` is below 1.
        TypeError: the output has neither a loss nor is a tensor, and ``loss`` is None.
    """
    parameters = [x for x in model.parameters() if x.requires_grad]
    if not parameters:
        raise ValueError("model must have a parameter that needs a gradient; got none")
    if steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")
    optimizer = optimizer or torch.optim.AdamW(parameters, lr=0.0)
    device, phases = parameters[0].device, _phases(model, inputs, loss or _loss_of, optimizer)
    times = time_steps(phases, device=device, steps=steps, warmup=2)

    def class_of(path: str, module: nn.Module) -> str:
        return type(module).__name__

    with ModuleRanges(model, class_of) as ranges, tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"

        def step() -> None:
            for name, phase in phases.items():
                with ranges.phase(name):
                    phase()

        record_trace(step, trace, device=device, steps=steps)
        calls = read_trace(trace, device=device)
    by_name, by_class = (time_by(calls, column, steps=steps).milliseconds.to_dict() for column in ("name", "region"))
    return Profile(
        type(model).__name__,
        {name: each.median for name, each in times.phases.items()} | {"step": times.step.median},
        by_name,
        by_class,
        _peak(MemoryRecorder(model, device, optimizer, region_of=class_of), phases),
        tuple(sorted(_saved(model, inputs), key=lambda each: -each.bytes)),
        collect_environment(device),
        top,
    )


def _call(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs) if isinstance(inputs, Tensor) else model(*inputs)


def _loss_of(output: Any) -> Tensor:
    found = getattr(output, "loss", None)
    if found is None:
        found = output
    if not isinstance(found, Tensor):
        raise TypeError(
            f"loss must be given for an output without a loss that is no tensor; got {type(output).__name__}"
        )
    return found.sum() if found.numel() == 1 else found.float().square().mean()


def _phases(
    model: nn.Module, inputs: Inputs, loss: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Callable[[], None]]:
    """What a step calls, by name, in order."""
    losses: list[Tensor] = []

    def forward() -> None:
        losses[:] = [loss(_call(model, inputs))]

    def backward() -> None:
        losses.pop().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return {"forward": forward, "backward": backward, "optimizer": update}


def _peak(recorder: MemoryRecorder, phases: Mapping[str, Callable[[], None]]) -> dict[str, int]:
    """Bytes by category at the peak of a step."""
    with recorder:
        for name, phase in phases.items():
            recorder.phase(name)
            phase()
    timeline = recorder.timeline()
    peak = timeline.loc[timeline.sum(axis="columns").idxmax()].sort_values(ascending=False)
    return {str(category): int(size) for category, size in peak.items()}


def _saved(model: nn.Module, inputs: Inputs) -> list[SavedTensor]:
    values = inputs.values() if isinstance(inputs, Mapping) else (inputs,) if isinstance(inputs, Tensor) else inputs
    return saved_tensors(lambda: _call(model, inputs), model, [x for x in values if isinstance(x, Tensor)])
