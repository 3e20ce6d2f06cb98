"""Where the time and the memory of a training step go, for any nn.Module.

    python examples/profile_model.py                                    # a small encoder of torch's
    python examples/profile_model.py my_package.my_module:make          # your own

``make()`` returns (model, inputs): an nn.Module and the tuple of tensors that it is called with, on any device. The
loss is the mean of the squares of the output, or the output itself if it has one element.

Prints the time of forward, backward and optimizer; the kernels (operators on a CPU) and the classes of modules that
take most of it; the memory at the peak by category; and the largest tensors that autograd saves, with the line that
saves them. Needs pandas: pip install 'cs336_systems[bench]'.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from cs336_systems.profiling import (
    MemoryRecorder,
    ModuleRanges,
    markdown_table,
    read_trace,
    record_trace,
    saved_tensors,
    time_by,
    time_steps,
)

STEPS = 3
Made = tuple[nn.Module, tuple[Tensor, ...]]


def small_encoder() -> Made:
    """What is profiled if nothing is named."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).to(device), (torch.randn(4, 128, 64, device=device),)


def named(text: str) -> Callable[[], Made]:
    """The function that ``module:name`` names; modules are searched in the current folder too."""
    sys.path.insert(0, "")
    module, _, name = text.partition(":")
    function: Callable[[], Made] = getattr(importlib.import_module(module), name)
    return function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("make", nargs="?", help="module:function, which returns (model, inputs)")
    parser.add_argument("--top", type=int, default=8, help="lines of each table")
    options = parser.parse_args()
    model, inputs = (named(options.make) if options.make else small_encoder)()
    device, optimizer = inputs[0].device, torch.optim.AdamW(model.parameters())
    losses: list[Tensor] = []

    def forward() -> None:
        out = model(*inputs)
        losses[:] = [out.sum() if out.numel() == 1 else out.float().square().mean()]

    def backward() -> None:
        losses.pop().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    phases: dict[str, Callable[[], None]] = {"forward": forward, "backward": backward, "optimizer": update}
    times = time_steps(phases, device=device, steps=STEPS, warmup=2)
    rows = [(name, f"{each.median:.3f}") for name, each in (*times.phases.items(), ("step", times.step))]
    print(markdown_table(["phase", "median ms"], rows), end="\n\n")

    def class_of(path: str, module: nn.Module) -> str:
        return type(module).__name__

    with ModuleRanges(model, class_of) as ranges, tempfile.TemporaryDirectory() as folder:

        def step() -> None:
            for name, phase in phases.items():
                with ranges.phase(name):
                    phase()

        record_trace(step, Path(folder) / "trace.json", device=device, steps=STEPS)
        calls = read_trace(Path(folder) / "trace.json", device=device)
    for title, column in (("kernel" if device.type == "cuda" else "operator", "name"), ("class of module", "region")):
        top = time_by(calls, column, steps=STEPS).head(options.top)
        shares = [(str(name)[:60], f"{row.milliseconds:.3f}", f"{row.share:.0%}") for name, row in top.iterrows()]
        print(markdown_table([title, "ms a step", "share"], shares), end="\n\n")

    with MemoryRecorder(model, device, optimizer, region_of=class_of) as recorder:
        for name, phase in phases.items():
            recorder.phase(name)
            phase()
    timeline = recorder.timeline()
    peak = timeline.loc[timeline.sum(axis="columns").idxmax()].sort_values(ascending=False).head(options.top)
    rows = [(str(category), f"{size / 2**20:.2f}") for category, size in peak.items()]
    print(markdown_table(["at the peak", "MiB"], rows), end="\n\n")

    saved = sorted(saved_tensors(lambda: model(*inputs), model, inputs), key=lambda each: -each.bytes)[: options.top]
    lines = [(f"{x.bytes / 2**20:.2f}", x.module, " × ".join(map(str, x.shape)), str(x.statement)) for x in saved]
    print(markdown_table(["saved MiB", "module", "shape", "line"], lines))


if __name__ == "__main__":
    main()
