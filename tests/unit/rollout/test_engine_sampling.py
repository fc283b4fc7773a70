"""Hand-computed distributions, and draws from them."""

import math

import pytest
import torch

from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.decoding import SamplingBatch, draw, processed_logprobs

PROBS = [0.5, 0.25, 0.15, 0.1]
CPU = torch.device("cpu")


def params(**changes: float) -> SamplingParams:
    return SamplingParams.model_validate({"max_tokens": 1} | changes)


def processed(*rows: SamplingParams, order: list[int] | None = None) -> list[list[float]]:
    """The probabilities each row samples from, for logits whose softmax is PROBS."""
    probs = [PROBS[i] for i in order or range(4)]
    logits_BV = torch.tensor([probs] * len(rows)).log() + 7.0
    result_BV = processed_logprobs(logits_BV, SamplingBatch.of(rows, 4, CPU)).exp()
    rows_rounded = []
    for row in result_BV.tolist():
        rows_rounded.append([round(value, 6) for value in row])
    return rows_rounded


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, [p * p / 0.345 for p in PROBS]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, PROBS),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.001}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),
        ({"min_p": 0.4}, [2 / 3, 1 / 3, 0, 0]),  # below 0.4 * 0.5
        ({"min_p": 0.25}, [p / 0.9 for p in PROBS[:3]] + [0]),
        ({"min_p": 0.25, "top_p": 0.54}, [1, 0, 0, 0]),  # 0.5 / 0.9 reaches 0.54: min-p comes first
        ({"temperature": 0.5, "min_p": 0.2}, [0.8, 0.2, 0, 0]),  # 0.25, 0.0625: after temperature
        ({"temperature": 0.0, "top_k": 1, "top_p": 0.1, "min_p": 0.9}, PROBS),
    ],
)
def test_the_distribution_is_filtered_and_renormalised(changes, expected):
    assert processed(params(**changes))[0] == pytest.approx(expected, abs=1e-5)


def test_filters_follow_the_likelihood_and_not_the_position() -> None:
    assert processed(params(top_k=2), order=[3, 1, 0, 2])[0] == pytest.approx([0, 1 / 3, 2 / 3, 0], abs=1e-5)


def test_rows_of_a_batch_do_not_share_their_parameters() -> None:
    rows = [params(top_k=1), params(), params(min_p=0.4), params(top_p=0.6), params(temperature=0.0)]
    together = processed(*rows)
    assert together == [processed(row)[0] for row in rows]


def test_a_row_without_top_p_keeps_its_tail_beside_one_with_it():
    # A running sum over so many tokens rounds to more than 1 before it reaches the last of them.
    torch.manual_seed(0)
    logits_BV = 2.0 * torch.randn(4, 50_000)
    sampling = SamplingBatch.of([params(), params(), params(), params(top_p=0.5)], 50_000, CPU)
    assert torch.isfinite(processed_logprobs(logits_BV, sampling)[:3]).all()


def test_draws_have_the_distribution_s_frequencies_and_report_its_logprobs() -> None:
    num_draws = 1000
    logprobs_BV = torch.tensor([PROBS]).log().expand(num_draws, 4)
    sampling = SamplingBatch.of([params()] * num_draws, 4, CPU)
    grid_B = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    ids_B, drawn_B = draw(logprobs_BV, sampling, grid_B)
    assert torch.bincount(ids_B, minlength=4).tolist() == [500, 250, 150, 100]
    assert drawn_B.tolist() == pytest.approx([math.log(PROBS[i]) for i in ids_B.tolist()])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53, 1.0])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logprobs_BV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).log()
    ids_B, _ = draw(
        logprobs_BV, SamplingBatch.of([params()], 5, CPU), torch.tensor([uniform], dtype=torch.float64)
    )
    assert ids_B.item() in (1, 3)


def test_a_greedy_row_takes_the_likeliest_token_whatever_the_noise() -> None:
    logprobs_BV = torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3]]).log()
    sampling = SamplingBatch.of([params(temperature=0.0), params()], 3, CPU)
    ids_B, _ = draw(logprobs_BV, sampling, torch.tensor([0.99, 0.99]).double())
    assert ids_B.tolist() == [1, 2]
