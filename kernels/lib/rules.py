"""What all kernels ask of a call's rules when they are compiled."""

import triton


@triton.constexpr_function
def is_singular(score):
    """Whether SCORE, as `rules.score_code` writes it, may make NaN of pairs that do not exist, whose score is 0."""
    return score is not None and score.fn.is_singular
