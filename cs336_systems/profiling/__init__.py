"""Time, FLOPs, kernels, memory and precision of a model's training step, for any PyTorch model.

- `summary`: `profile`, all of these in one call.
- `steps`, `timing`: time of each phase of a step; interleaved comparisons of functions.
- `flops`: FLOP counts, peak rates, and the bytes that attention moves and saves.
- `module_ranges`, `trace`, `nsys`: time by kernel, phase and region, from torch.profiler or Nsight
  Systems.
- `memory`, `saved`, `recording`: peak and held memory, saved tensors, memory over time by category.
- `precision`: sums and autocast's dtypes in low precision.
- `environment`, `report`: the environment of a measurement; tables as Markdown.
"""

from .environment import Environment, collect_environment
from .flops import attention_flops, attention_memory, device_peak, teraflops_per_second
from .memory import MemoryUsage, measure_memory
from .module_ranges import ModuleRanges
from .nsys import read_nsys
from .precision import ACCUMULATIONS, tensor_dtypes
from .recording import MemoryRecorder
from .regions import region_of_module
from .report import format_number, markdown_table
from .saved import activation_bytes, saved_tensors
from .steps import time_steps
from .summary import Profile, profile
from .timing import RoundTimes, TimingMethod, compare, measure_ms
from .trace import read_trace, record_trace, time_by

__all__ = [
    "ACCUMULATIONS",
    "Environment",
    "MemoryRecorder",
    "MemoryUsage",
    "ModuleRanges",
    "Profile",
    "RoundTimes",
    "TimingMethod",
    "activation_bytes",
    "attention_flops",
    "attention_memory",
    "collect_environment",
    "compare",
    "device_peak",
    "format_number",
    "markdown_table",
    "measure_memory",
    "measure_ms",
    "profile",
    "read_nsys",
    "read_trace",
    "record_trace",
    "region_of_module",
    "saved_tensors",
    "tensor_dtypes",
    "teraflops_per_second",
    "time_by",
    "time_steps",
]
