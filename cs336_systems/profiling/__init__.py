"""Measuring: interleaved timing, memory, operation counts, environment, resumable sweeps, tables and plots."""

from cs336_systems.profiling.bars import save_stacked_bars
from cs336_systems.profiling.environment import Environment, collect_environment
from cs336_systems.profiling.flops import attention_flops, device_peak, implausible_rate, teraflops_per_second
from cs336_systems.profiling.memory import MemoryReading, available_bytes, forward_memory, training_memory
from cs336_systems.profiling.plots import Axes, Panel, Series, save_panels
from cs336_systems.profiling.progress import Progress
from cs336_systems.profiling.report import format_number, markdown_table
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

__all__ = [
    "AllocatorReading",
    "Axes",
    "ConfigurationMismatchError",
    "DeathLog",
    "Environment",
    "MemoryReading",
    "Outcome",
    "Panel",
    "Progress",
    "RoundTimes",
    "RowStore",
    "Series",
    "Status",
    "StepTimes",
    "TimingMethod",
    "attention_flops",
    "available_bytes",
    "collect_environment",
    "compare",
    "consecutive_ms",
    "device_peak",
    "format_number",
    "forward_memory",
    "implausible_rate",
    "interleave",
    "markdown_table",
    "measure_ms",
    "outcome_of",
    "rotated",
    "save_panels",
    "save_stacked_bars",
    "teraflops_per_second",
    "time_model",
    "time_steps",
    "training_memory",
    "write_csv",
]
