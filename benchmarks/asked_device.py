"""Which kind of device a command line asks for, before it is parsed: the defaults of the others depend on it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch


def asks_for_gpu(arguments: Sequence[str] | None) -> bool:
    """Whether ``--device`` names a CUDA GPU; where it is not given, or "auto", whether there is one.

    Arguments are as argparse takes them: None is those that the process was started with.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="auto")
    device: str = parser.parse_known_args(arguments)[0].device
    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
