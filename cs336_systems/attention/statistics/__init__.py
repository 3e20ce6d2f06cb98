"""Statistics of the scores of attention: by naive, tiled and Triton, and their operators."""

from .api import ScoreStatistics, score_statistics, score_statistics_varlen

__all__ = ["ScoreStatistics", "score_statistics", "score_statistics_varlen"]
