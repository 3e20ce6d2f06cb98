"""Measuring: interleaved timing, memory, operation counts, environment, resumable sweeps, tables and plots."""

from cs336_systems.profiling.bars import save_stacked_bars
from cs336_systems.profiling.environment import Environment, collect_environment
from cs336_systems.profiling.flops import (
    AttentionParts,
    attention_flops,
    attention_parts_flops,
    device_peak,
    implausible_rate,
    teraflops_per_second,
)
from cs336_systems.profiling.kernel_classes import class_of
from cs336_systems.profiling.memory import MemoryReading, available_bytes, forward_memory, training_memory
from cs336_systems.profiling.plots import Axes, Panel, Series, save_panels
from cs336_systems.profiling.progress import Progress
from cs336_systems.profiling.regions import Regions, region_of_module
from cs336_systems.profiling.report import format_number, markdown_table
from cs336_systems.profiling.shares import KernelStatistics, class_shares, kernel_statistics, region_times, total_ms
from cs336_systems.profiling.steps import AllocatorReading, StepTimes, time_model, time_steps
from cs336_systems.profiling.sweep import (
    ConfigurationMismatchError,
    DeathLog,
    Outcome,
    RowStore,
    Status,
    outcome_of,
    write_csv,
)
from cs336_systems.profiling.timing import (
    RoundTimes,
    TimingMethod,
    compare,
    consecutive_ms,
    interleave,
    measure_ms,
    rotated,
)
from cs336_systems.profiling.trace import Work, read_trace, record_trace

__all__ = [
    "AllocatorReading",
    "AttentionParts",
    "Axes",
    "ConfigurationMismatchError",
    "DeathLog",
    "Environment",
    "KernelStatistics",
    "MemoryReading",
    "Outcome",
    "Panel",
    "Progress",
    "Regions",
    "RoundTimes",
    "RowStore",
    "Series",
    "Status",
    "StepTimes",
    "TimingMethod",
    "Work",
    "attention_flops",
    "attention_parts_flops",
    "available_bytes",
    "class_of",
    "class_shares",
    "collect_environment",
    "compare",
    "consecutive_ms",
    "device_peak",
    "format_number",
    "forward_memory",
    "implausible_rate",
    "interleave",
    "kernel_statistics",
    "markdown_table",
    "measure_ms",
    "outcome_of",
    "read_trace",
    "record_trace",
    "region_of_module",
    "region_times",
    "rotated",
    "save_panels",
    "save_stacked_bars",
    "teraflops_per_second",
    "time_model",
    "time_steps",
    "total_ms",
    "training_memory",
    "write_csv",
]
