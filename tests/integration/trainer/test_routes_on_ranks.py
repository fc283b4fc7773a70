"""Ranks that replay foreign routes give the gradient of rows with experts told by hand, to 1e-12."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.support.models import make_relatives
from tests.support.rank_runs import FIELDS, gradient_of, on_ranks, policy_on
from tests.support.routes import gradient_by_hand, wide_mixtral, with_foreign
from tests.support.sessions import session_samples
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.fsdp.ranks import Ranks

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {"gradient_checkpointing": True}),
    "four": (4, {"shard_ranks": 2, "expert_ranks": 2}),
    "four share passes": (4, {"context_ranks": 4}),
    "two of four share passes, adapters": (4, {"context_ranks": 2, "lora": {"rank": 3, "alpha": 12}}),
}


def samples() -> list[Sample]:
    return with_foreign([*make_relatives(9), *session_samples(3)])


def gradient_on(ranks: Ranks, model: Any, fields: dict[str, Any]) -> tuple[torch.Tensor, Sums]:
    config = TrainerConfig.model_validate(FIELDS | {"num_ranks": ranks.size} | fields)
    policy = policy_on(ranks, model, config, replays_routes=True, temperature=1.0)
    batches = form_micro_batches(samples(), 80, config.num_bins)
    sums = sum((policy.accumulate(batch) for batch in batches), Sums())
    return gradient_of(policy), sums


@pytest.mark.parametrize("name", CASES)
def test_gradient_of_foreign_routes(name, tmp_path, monkeypatch):
    size, fields = CASES[name]
    model = wide_mixtral(monkeypatch)
    gradient, sums = on_ranks(size, partial(gradient_on, model=model, fields=fields), tmp_path)
    settings = {"lora": fields["lora"]} if "lora" in fields else {}
    expected = gradient_by_hand(wide_mixtral(monkeypatch), samples(), monkeypatch, **settings)
    assert (gradient - expected).abs().max() < 1e-12 * expected.abs().max()
    assert 0.5 < sums.changed_layers / sums.tokens < sums.changed_tokens / sums.tokens <= 1.0
    assert sums.compared_tokens and sums.replayed_gap_sum != sums.unreplayed_gap_sum
