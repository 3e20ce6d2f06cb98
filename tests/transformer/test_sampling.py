"""Which tokens may be drawn, and how often."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.transformer import Sampling

P = [0.4, 0.1, 0.3, 0.2]


@pytest.mark.parametrize(
    ("settings", "expected"),
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
        # Of what top_k leaves, 4/9, 3/9 and 2/9, the first two have 7/9.
        ({"top_k": 3, "top_p": 0.75}, [4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 0.5, "top_p": 0.6}, [16 / 25, 0, 9 / 25, 0]),
    ],
)
def test_probabilities(device, settings, expected):
    logits = torch.tensor([P, P], device=device).log() + torch.tensor([[0.0], [5.0]], device=device)
    probabilities = Sampling(**settings).probabilities(logits)
    torch.testing.assert_close(probabilities.cpu(), torch.tensor([expected, expected], dtype=torch.float32))


def test_the_mass_of_top_p_is_enough_when_it_is_reached(device):
    kept = Sampling(top_p=0.5).probabilities(torch.zeros(1, 4, device=device))
    assert kept.tolist() == [[0.5, 0.5, 0, 0]]


def test_large_logits_over_a_small_temperature(device):
    logits = torch.tensor([[100.0, 99.0, -100.0]], device=device)
    assert Sampling(temperature=2e-38).probabilities(logits).tolist() == [[1, 0, 0]]


def test_narrow_logits_have_wide_probabilities(device):
    logits = torch.randn(3, 40, device=device).bfloat16()
    for settings in ({}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9}):
        probabilities = Sampling(**settings).probabilities(logits)
        assert probabilities.dtype == torch.float32
        assert torch.equal(probabilities, Sampling(**settings).probabilities(logits.float()))


def test_rows_are_filtered_each_by_itself(device):
    logits = torch.tensor([[0.1, 0.9], [0.5, 0.5]], device=device).log()
    kept = Sampling(top_p=0.8).probabilities(logits)
    torch.testing.assert_close(kept.cpu(), torch.tensor([[0.0, 1.0], [0.5, 0.5]]))


def test_of_equal_logits_the_first_are_kept(device):
    kept = Sampling(top_k=3).probabilities(torch.zeros(1, 100, device=device))
    assert kept[0].nonzero().flatten().tolist() == [0, 1, 2]


def test_draws_are_as_frequent_as_they_are_probable(device):
    logits = torch.tensor([P], device=device).log().expand(20_000, 4)
    generator = torch.Generator(device).manual_seed(0)
    drawn = Sampling(top_k=3).draw(logits, generator)
    frequencies = drawn.bincount(minlength=4).cpu() / 20_000
    torch.testing.assert_close(frequencies, torch.tensor([4 / 9, 0, 3 / 9, 2 / 9]), atol=0.015, rtol=0)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature must be positive and finite; got -1.0"),
        ({"temperature": False}, TypeError, "temperature must be a float; got False of type bool"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1; got 0"),
        ({"top_p": 0.0}, ValueError, "top_p must be positive and finite; got 0.0"),
        ({"top_p": 1.1}, ValueError, "top_p must be at most 1; got 1.1"),
    ],
)
def test_what_is_refused(settings, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        Sampling(**settings)


def test_tokens_are_those_of_multinomial(device):
    """So seeds mean what they always did."""
    logits = torch.randn(64, 40, device=device)
    for settings in ({}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9}):
        sampling = Sampling(**settings)
        expected, drawn = (torch.Generator(device).manual_seed(5) for _ in range(2))
        tokens = torch.multinomial(sampling.probabilities(logits), 1, generator=expected).squeeze(-1)
        assert torch.equal(sampling.draw(logits, drawn), tokens)


@pytest.mark.gpu
def test_drawing_waits_for_nothing(waiting_forbidden):
    logits = torch.randn(4, 40, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    with waiting_forbidden():
        for settings in ({}, {"temperature": 0}, {"top_k": 5, "top_p": 0.9}):
            Sampling(**settings).draw(logits, generator)
