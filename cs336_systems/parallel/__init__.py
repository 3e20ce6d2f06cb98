"""Training one model on several GPUs: data parallel, fully sharded, and context parallel, one process for each GPU."""

from .context import ContextAttention, share_context, whole_sequences
from .layout import MODES, Layout, start
from .model import ParallelModel
from .zigzag import Shard, zigzag_shard

__all__ = [
    "MODES",
    "ContextAttention",
    "Layout",
    "ParallelModel",
    "Shard",
    "share_context",
    "start",
    "whole_sequences",
    "zigzag_shard",
]
