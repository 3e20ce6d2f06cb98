"""Measuring: interleaved timing, memory, operation counts, environment, resumable sweeps, tables and plots."""

from cs336_systems.profiling.allocations import Allocation, History, read_history
from cs336_systems.profiling.attention_memory import AttentionSizes, Share, memory_account
from cs336_systems.profiling.bars import save_stacked_bars
from cs336_systems.profiling.categories import (
    RULES,
    Kind,
    Rule,
    bytes_at,
    category_of,
    kinds,
    largest_by_category,
    largest_first,
)
from cs336_systems.profiling.environment import Environment, collect_environment
from cs336_systems.profiling.flops import (
    AttentionParts,
    attention_bytes,
    attention_flops,
    attention_parts_flops,
    device_peak,
    implausible_rate,
    teraflops_per_second,
)
from cs336_systems.profiling.kernel_classes import class_of
from cs336_systems.profiling.memory import MemoryReading, available_bytes, forward_memory, training_memory
from cs336_systems.profiling.origins import Origin
from cs336_systems.profiling.plots import Axes, Panel, Series, save_panels
from cs336_systems.profiling.precision import ACCUMULATIONS, Accumulation, Reference, SeenDtype, ToyModel, dtypes_of
from cs336_systems.profiling.progress import Progress
from cs336_systems.profiling.recording import AllocationRecorder, Recording
from cs336_systems.profiling.regions import Regions, region_of_module
from cs336_systems.profiling.report import format_number, markdown_table
from cs336_systems.profiling.saved import OperationBytes, SavedTensor, activation_bytes, by_operation, saved_tensors
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
from cs336_systems.profiling.timeline import Timeline, draw_timeline, timeline_of
from cs336_systems.profiling.timeline_html import timeline_page
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
from cs336_systems.profiling.usage import PassMemory, cuda_memory_of, tracked_memory_of

__all__ = [
    "ACCUMULATIONS",
    "RULES",
    "Accumulation",
    "Allocation",
    "AllocationRecorder",
    "AllocatorReading",
    "AttentionParts",
    "AttentionSizes",
    "Axes",
    "ConfigurationMismatchError",
    "DeathLog",
    "Environment",
    "History",
    "KernelStatistics",
    "Kind",
    "MemoryReading",
    "OperationBytes",
    "Origin",
    "Outcome",
    "Panel",
    "PassMemory",
    "Progress",
    "Recording",
    "Reference",
    "Regions",
    "RoundTimes",
    "RowStore",
    "Rule",
    "SavedTensor",
    "SeenDtype",
    "Series",
    "Share",
    "Status",
    "StepTimes",
    "Timeline",
    "TimingMethod",
    "ToyModel",
    "Work",
    "activation_bytes",
    "attention_bytes",
    "attention_flops",
    "attention_parts_flops",
    "available_bytes",
    "by_operation",
    "bytes_at",
    "category_of",
    "class_of",
    "class_shares",
    "collect_environment",
    "compare",
    "consecutive_ms",
    "cuda_memory_of",
    "device_peak",
    "draw_timeline",
    "dtypes_of",
    "format_number",
    "forward_memory",
    "implausible_rate",
    "interleave",
    "kernel_statistics",
    "kinds",
    "largest_by_category",
    "largest_first",
    "markdown_table",
    "measure_ms",
    "memory_account",
    "outcome_of",
    "read_history",
    "read_trace",
    "record_trace",
    "region_of_module",
    "region_times",
    "rotated",
    "save_panels",
    "save_stacked_bars",
    "saved_tensors",
    "teraflops_per_second",
    "time_model",
    "time_steps",
    "timeline_of",
    "timeline_page",
    "total_ms",
    "tracked_memory_of",
    "training_memory",
    "write_csv",
]
