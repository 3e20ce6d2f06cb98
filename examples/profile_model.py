"""Profiles a training step of any nn.Module.

    python examples/profile_model.py                                    # a small encoder of torch's
    python examples/profile_model.py my_package.my_module:make          # your own
    python examples/profile_model.py my_package.my_module:make --save profile.md

``make()`` returns (model, inputs): an nn.Module and what it is called with, a tensor, a tuple or a dict, on any device.

Prints the time of forward, backward and optimizer; the kernels (operators on a CPU) and the classes of modules that
take most of it; the memory at the peak by category; and the largest tensors that autograd saves, with the line that
saves them. Needs pandas: pip install 'cs336_systems[bench]'.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cs336_systems.profiling import profile


def small_encoder() -> tuple[nn.Module, Any]:
    """What is profiled if nothing is named."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).to(device), torch.randn(4, 128, 64, device=device)


def named(text: str) -> tuple[nn.Module, Any]:
    """What the function that ``module:name`` names returns; modules are searched in the current folder too."""
    sys.path.insert(0, "")
    module, _, name = text.partition(":")
    model, inputs = getattr(importlib.import_module(module), name)()
    return model, inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("make", nargs="?", help="module:function, which returns (model, inputs)")
    parser.add_argument("--top", type=int, default=8, help="lines of each table")
    parser.add_argument("--save", type=Path, help="also write a page of Markdown")
    options = parser.parse_args()
    model, inputs = named(options.make) if options.make else small_encoder()
    found = profile(model, inputs, top=options.top)
    print(found)
    if options.save:
        found.save(options.save)


if __name__ == "__main__":
    main()
