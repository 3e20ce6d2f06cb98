"""Several processes, of a GPU each, that train one model: who has what part of it, of a batch, and of a sequence."""

from .context import ContextAttention, share_context, whole_sequences
from .layout import MODES, Layout, is_main_process, launched, start
from .model import ParallelModel
from .zigzag import Share, share_of

__all__ = [
    "MODES",
    "ContextAttention",
    "Layout",
    "ParallelModel",
    "Share",
    "is_main_process",
    "launched",
    "share_context",
    "share_of",
    "start",
    "whole_sequences",
]
