"""Sampling: probabilities, and the distribution of the drawn tokens."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.transformer import Sampling

P = [0.4, 0.1, 0.3, 0.2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, P),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"temperature": 1e-40}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [16 / 30, 1 / 30, 9 / 30, 4 / 30]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 9}, P),
        ({"top_p": 1.0}, P),
        ({"top_p": 0.39}, [1, 0, 0, 0]),
        ({"top_p": 0.41}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.71}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        # Among the three that top_k keeps, with 4/9, 3/9 and 2/9, the first two have 7/9.
        ({"top_k": 3, "top_p": 0.75}, [4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 0.5, "top_p": 0.6}, [16 / 25, 0, 9 / 25, 0]),
    ],
)
def test_probabilities(device, options, expected):
    logits = torch.tensor([P, P], device=device).log() + torch.tensor([[0.0], [5.0]], device=device)
    probabilities = Sampling(**options).probabilities(logits)
    torch.testing.assert_close(probabilities.cpu(), torch.tensor([expected, expected], dtype=torch.float32))


def test_special_cases(device):
    for logits, options, expected in (
        ([[0.0] * 4], {"top_p": 0.5}, [[0.5, 0.5, 0, 0]]),  # exactly top_p is enough
        ([[100.0, 99.0, -100.0]], {"temperature": 2e-38}, [[1, 0, 0]]),  # no overflow
        ([[-2.3, -0.1], [1.0, 1.0]], {"top_p": 0.8}, [[0, 1], [0.5, 0.5]]),  # rows are independent
        ([[0.0] * 100], {"top_k": 2}, [[0.5, 0.5] + [0] * 98]),  # of equal logits the first
    ):
        assert Sampling(**options).probabilities(torch.tensor(logits, device=device)).tolist() == expected
    narrow, sampling = torch.randn(3, 40, device=device).bfloat16(), Sampling(0.7, 12, 0.9)
    assert sampling.probabilities(narrow).dtype == torch.float32
    assert torch.equal(sampling.probabilities(narrow), sampling.probabilities(narrow.float()))


def test_tokens_are_those_of_multinomial(device):
    """So their frequencies are the probabilities."""
    logits = torch.randn(64, 40, device=device)
    for options in ({}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9}):
        sampling = Sampling(**options)
        ours, torchs = (torch.Generator(device).manual_seed(5) for _ in range(2))
        expected = torch.multinomial(sampling.probabilities(logits), 1, generator=torchs).squeeze(-1)
        assert torch.equal(sampling.draw(logits, ours), expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature must be positive and finite; got -1.0"),
        ({"temperature": float("nan")}, ValueError, "temperature must be positive and finite; got nan"),
        ({"temperature": False}, TypeError, "temperature must be a float; got False of type bool"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1; got 0"),
        ({"top_p": 0.0}, ValueError, "top_p must be positive and finite; got 0.0"),
        ({"top_p": float("nan")}, ValueError, "top_p must be positive and finite; got nan"),
        ({"top_p": 1.1}, ValueError, "top_p must be at most 1; got 1.1"),
    ],
)
def test_invalid_attributes(options, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        Sampling(**options)


@pytest.mark.gpu
def test_drawing_does_not_synchronise(waiting_forbidden):
    logits = torch.randn(4, 40, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    with waiting_forbidden():
        for options in ({}, {"temperature": 0}, {"top_k": 5, "top_p": 0.9}):
            Sampling(**options).draw(logits, generator)
