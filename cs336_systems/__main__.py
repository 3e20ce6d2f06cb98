"""`python -m cs336_systems`: what a bug report begins with. Versions, GPUs, and which kernels run on each of them."""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

PACKAGES = (
    *("cs336_systems", "torch", "triton", "einops", "jaxtyping", "numpy", "transformers", "safetensors"),
    *("flash-attn", "flash_attn_3", "flash-attn-4", "xformers", "matplotlib", "pandas"),
)


def main() -> int:
    """Print the report; returns 1 if a part of it could not be made."""
    print(*versions(), sep="\n")
    try:
        for line in devices():
            print(line)
    except Exception as error:  # a broken installation is what is to be reported
        print(f"error: {type(error).__name__}: {error}")
        return 1
    return 0


def versions() -> Iterator[str]:
    """Of Python and of packages that are installed, read without importing any."""
    yield f"Python {platform.python_version()} on {platform.platform()}"
    for name in PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    yield f"imported from {Path(__file__).parent}"


def devices() -> Iterator[str]:
    """CUDA and its driver; the kernels written in Gluon; each device and what computes attention there."""
    import torch

    from .attention.dispatch import TRITON_IS_INSTALLED
    from .profiling.environment import collect_environment, device_name

    count = torch.cuda.device_count()
    found = collect_environment("cuda:0" if count else "cpu")
    if (Path(__file__).parents[1] / "pyproject.toml").exists():  # else git would answer for somebody else's repository
        yield f"commit {found.commit}{', with changes' if found.dirty else ''}"
    yield f"torch {torch.__version__} for CUDA {torch.version.cuda}; cuDNN {found.cudnn}; driver {found.driver}"
    yield f"kernels in Gluon: {_why_not_gluon() if TRITON_IS_INSTALLED else 'triton is not installed'}"
    for device in [*(f"cuda:{number}" for number in range(count)), "cpu"]:
        yield ""
        about = ""
        if device != "cpu":
            properties = torch.cuda.get_device_properties(device)
            about = f", compute capability {properties.major}.{properties.minor}, {properties.total_memory >> 20} MiB"
        yield f"{device}: {device_name(device)}{about}"
        yield from _attention_on(device)


def _why_not_gluon() -> str:
    from .kernels.versions import why_not_gluon

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return why_not_gluon() or "usable with this triton and torch"


def _attention_on(device: str) -> Iterator[str]:
    """The explanation of a training step's call in each dtype."""
    import torch

    from .attention import explain

    for dtype in (torch.bfloat16, torch.float32):
        q = torch.zeros(1, 1, 128, 128, dtype=dtype, device=device, requires_grad=True)
        yield f"  causal, head dimension 128, {str(dtype).removeprefix('torch.')}, with gradients"
        yield from (f"    {line}" for line in str(explain(q, q, q, causal=True)).splitlines())


if __name__ == "__main__":
    sys.exit(main())
