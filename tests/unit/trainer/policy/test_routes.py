"""Replay of the engine's routes: the model's own change no bit, others give the right gradients."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.architectures import make_model
from tests.support.models import (
    accumulate_all,
    gradients_of,
    logprobs_of,
    make_policy,
    make_relatives,
    make_samples,
    one_batch,
)
from tests.support.routes import choice_of, gradient_by_hand, rows_of, wide_mixtral, with_foreign, with_own
from tests.support.sessions import session_samples
from tidemill.common.errors import ConfigError
from tidemill.common.run.routers import find_routers
from tidemill.services.trainer.algorithm.losses.totals import loss_metrics
from tidemill.services.trainer.groups.bins import PrefixOrder, form_micro_batches
from tidemill.services.trainer.groups.samples import Sample, make_routes
from tidemill.services.trainer.policy.compiling import compile_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "GptOss": {},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "Qwen3Moe": EXPERTS | {"head_dim": 8, "norm_topk_prob": True},
    "Olmoe": EXPERTS,
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}
    | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
}
make_double = partial(make_policy, torch.float64, replays_routes=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_own_routes_change_no_bit(family: str) -> None:
    model = make_model(family, experts_implementation="eager", **FAMILIES[family])
    samples = with_own(model, [*make_relatives(7), *session_samples(3)])
    policy = make_policy(model=model, replays_routes=True)
    found = []
    for given in (samples, [replace(sample, routes=()) for sample in samples]):
        policy.zero()
        sums = accumulate_all(policy, form_micro_batches(given, 80))
        found.append((gradients_of(policy).clone(), sums.loss_sum, sums.mismatch_max))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


@pytest.fixture
def samples() -> list[Sample]:
    return with_foreign([*make_relatives(9), *session_samples(3)])


LAYOUTS: dict[str, dict[str, Any]] = {
    "tree": {},
    "padded": {},
    "checkpointed": {"gradient_checkpointing": True},
    "compiled": {},
}


def rounds_otherwise(graph: torch.fx.GraphModule, _: object) -> Any:
    """A compiler whose numbers have other last bits."""

    def run(*args: Any) -> tuple[Any, ...]:
        found = graph.forward(*args)
        is_rounded = [isinstance(one, torch.Tensor) and one.is_floating_point() for one in found]
        return tuple(one * (1 + 2**-51) if own else one for one, own in zip(found, is_rounded, strict=True))

    return run


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradient_of_foreign_routes(name: str, samples: list[Sample], monkeypatch: Any) -> None:
    model = wide_mixtral(monkeypatch)
    if name == "compiled":
        assert compile_model(model, torch.float64, backend=rounds_otherwise)
    policy = make_double(model=model, **LAYOUTS[name])
    policy.layout = "padded" if name == "padded" else "tree"
    accumulate_all(policy, form_micro_batches([replace(s, routes=()) for s in samples], 80))
    without = gradients_of(policy).clone()
    policy.zero()
    sums = accumulate_all(policy, form_micro_batches(samples, 80))
    if name != "padded":
        assert sums.positions < sums.row_tokens, "some rows of like routes share a beginning"
    expected = gradient_by_hand(wide_mixtral(monkeypatch), samples, monkeypatch)
    largest = expected.abs().max()
    assert (gradients_of(policy) - expected).abs().max() < 1e-12 * largest
    assert (without - expected).abs().max() > 1e-3 * largest
    metrics = loss_metrics(sums)
    assert 0.5 < metrics["routes/changed_layers"] < metrics["routes/changed_tokens"] <= 1.0


def test_what_would_have_been_chosen_otherwise_is_counted() -> None:
    """In one layer of two, at one of five trained tokens; and the gap of the row that is scored again."""
    model = make_model("Mixtral", experts_implementation="eager")
    (sample,) = make_samples(1)
    sample = replace(sample, mask=np.ones_like(sample.mask))
    own = choice_of(model, next(rows_of(sample)))
    changed, source = own.copy(), len(sample.prompt_ids)
    changed[source, 1] = (changed[source, 1] + 1) % 3
    policy = make_policy(model=model, replays_routes=True)
    sums = policy.accumulate(one_batch([replace(sample, routes=(make_routes(changed),))]))
    assert (sums.changed_tokens, sums.changed_layers) == (1, 0.5)
    (plain,) = logprobs_of(policy, [replace(sample, routes=())])
    gap = np.abs(plain - sample.rollout_logprobs).sum()
    assert sums.compared_tokens == sums.tokens == len(plain)
    found = [sums.replayed_gap_sum, sums.unreplayed_gap_sum]
    assert found == pytest.approx([sums.mismatch_sum, gap], rel=1e-5)
    assert policy.accumulate(one_batch([sample])).compared_tokens == 0, "once an update"


def test_replay_closes_the_gap_to_an_engine_whose_routers_round_otherwise() -> None:
    fields = {"experts_implementation": "eager", "num_local_experts": 8}
    model, engine = make_model("Mixtral", **fields), make_model("Mixtral", **fields)
    for _, router in find_routers(engine):

        def route(hidden: torch.Tensor, router: Any = router) -> tuple[torch.Tensor, ...]:
            logits = (hidden.reshape(-1, 32).bfloat16() @ router.weight.bfloat16().T).float()
            weights, chosen = logits.softmax(-1).topk(2)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        router.forward = route
    of_engine = make_policy(model=engine)
    samples = with_own(engine, make_samples(60))
    logprobs = logprobs_of(of_engine, [replace(sample, routes=()) for sample in samples])
    samples = [replace(s, rollout_logprobs=own) for s, own in zip(samples, logprobs, strict=True)]
    policy = make_policy(model=model, replays_routes=True)
    with_replay = policy.accumulate(one_batch(samples)).mismatch_max
    without = policy.accumulate(one_batch([replace(s, routes=()) for s in samples])).mismatch_max
    assert without > 10 * with_replay


def test_a_reference_chooses_by_itself() -> None:
    samples = with_foreign(make_samples(4), experts=3)
    for fields in ({}, {"lora": {"rank": 2}}):
        algorithm = {"reference": {"model": "frozen"}, "kl": {"place": "loss", "coefficient": 0.1}}
        policy = make_policy(
            model=make_model("Mixtral", experts_implementation="eager"),
            replays_routes=True,
            algorithm=algorithm,
            **fields,
        )
        found = [one["reference_logprobs"] for one in policy.precompute(samples)]
        plain = logprobs_of(policy, [replace(sample, routes=()) for sample in samples])
        replayed = logprobs_of(policy, samples)
        for reference, own, other in zip(found, plain, replayed, strict=True):
            np.testing.assert_allclose(reference, own, atol=1e-6)
            assert np.abs(reference - other).max() > 1e-3


def test_routes_of_all_layers_are_looked_up_by_the_number_of_the_layer() -> None:
    model = make_model("DeepseekV3", experts_implementation="eager", **FAMILIES["DeepseekV3"])
    (sample,) = with_own(model, make_samples(1))
    (routes,) = sample.routes
    assert routes.experts.shape[1] == 1, "its first layer is dense"
    rng = np.random.default_rng(0)
    routed = (routes.experts + rng.integers(1, 4, routes.experts.shape, dtype=np.uint8)[..., :1]) % 8
    both = np.concatenate([np.zeros_like(routed), routed], 1)
    policy = make_policy(model=model, replays_routes=True)
    found = [logprobs_of(policy, [replace(sample, routes=(make_routes(own),))])[0] for own in (routed, both)]
    np.testing.assert_array_equal(*found)


def test_rows_share_a_token_only_where_routes_are_equal() -> None:
    first, *_ = make_samples(1)
    count = len(first.prompt_ids) + len(first.completion_ids)
    own = np.zeros((count - 1, 2, 2), dtype=np.uint8)
    other = own.copy()
    other[-1, 1, 1] = 1
    samples = [
        replace(first, key=(0, i), routes=(make_routes(routes),))
        for i, routes in enumerate((own, own, other))
    ]
    # The last one has its own last two tokens: the one whose routes differ, and the one after it.
    assert PrefixOrder(samples[:2], "tree").num_tokens == count
    assert PrefixOrder(samples, "tree").num_tokens == count + 2


def test_routers_that_cannot_be_told_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.record_routes: the routers of PhimoeForCausalLM"):
        make_policy(model=make_model("Phimoe"), replays_routes=True)
    assert not make_policy(replays_routes=True).replays_routes, "a Llama has none"
    with pytest.raises(ValueError, match=r"routes of \[3\] tokens, expected"):
        replace(make_samples(1)[0], routes=(make_routes(np.zeros((3, 2, 2), dtype=np.uint8)),))
