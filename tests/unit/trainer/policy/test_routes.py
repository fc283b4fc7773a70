"""A mixture model's routers: their losses and metrics, by hand and against models' own logits; and replay of
the engine's routes, of which the model's own change no bit and others give the right gradients."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from tests.support.architectures import SIZES, make_model
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
from tests.support.samples import changed
from tests.support.sessions import session_samples
from tidemill.common.errors import ConfigError
from tidemill.common.run.routers import find_routers
from tidemill.services.trainer.algorithm.losses.routing import sequence_balance
from tidemill.services.trainer.algorithm.losses.sums import Sums, loss_metrics
from tidemill.services.trainer.groups.bins import PrefixOrder, form_micro_batches
from tidemill.services.trainer.groups.choices import make_routes
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.compiling import compile_model
from tidemill.services.trainer.policy.memory.sizes import count_sizes

ROUTER = {"router": {"balance": 0.3, "z": 0.02}}


MIXTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Mixtral": (torch.softmax, {"num_local_experts": 3}),
    "GraniteMoe": (torch.softmax, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Glm4Moe": (lambda logits, _: logits.sigmoid(), {"n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16} | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
}  # fmt: skip
"""Affinity, and fields of the config. Granite returns logits last; GLM has a dense layer and biases."""


def mixture(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MIXTURES[name][1])
    config._experts_implementation = "eager"  # grouped products know no float64
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return model.double().eval()


double_policy = partial(make_policy, torch.float64)
assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
"""Norms of these models compute in float32."""


def test_balance_of_a_sequence_by_hand():
    # Shares (3/4, 1/4) and (5/8, 3/8): P = (11/16, 5/16), f = (2, 0). Then one token alone: 2 * 3/4.
    affinities = torch.tensor([[3.0, 1.0], [1.0, 3.0], [5.0, 3.0]])
    balance = sequence_balance(affinities, 1, torch.tensor([0, 1, 0]), 2)
    assert balance.tolist() == pytest.approx([1.375, 1.5])
    even = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.2, 0.1, 0.4, 0.3]])
    assert sequence_balance(even, 2, torch.zeros(2, dtype=torch.int64), 1).item() == pytest.approx(1.0)


def expected_term(model: PreTrainedModel, samples: list[Sample], name: str) -> torch.Tensor:
    """Of `normalisation: token`, one row at a time, from what the model itself calls its router logits."""
    affinity, fields = MIXTURES[name]
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        by_layer: list[list[torch.Tensor]] = []
        start = 0
        for prompt_ids, count in sample.segments:
            ids = np.concatenate([prompt_ids, sample.completion_ids[start : start + count]])
            layers = model(input_ids=torch.tensor(ids)[None].long(), output_router_logits=True).router_logits
            places = len(prompt_ids) - 1 + np.flatnonzero(sample.mask[start : start + count])
            by_layer.append([layer.reshape(-1, layer.shape[-1])[places] for layer in layers])
            start += count
        for parts in zip(*by_layer, strict=True):
            logits = torch.cat(parts)
            if not len(logits):
                continue
            num_tokens, num_experts = logits.shape
            num_chosen = fields.get("num_experts_per_tok", 2)
            shares = affinity(logits, -1)
            shares = shares / shares.sum(-1, keepdim=True)
            balance = torch.zeros((), dtype=torch.float64)
            for expert in range(num_experts):
                ranks = (shares > shares[:, expert : expert + 1]).sum(-1)
                frequency = num_experts / (num_chosen * num_tokens) * int((ranks < num_chosen).sum())
                balance = balance + frequency * shares[:, expert].sum() / num_tokens
            total = total + 0.3 * num_tokens * balance + 0.02 * logits.exp().sum(-1).log().square().sum()
    return total


@pytest.mark.parametrize("name", MIXTURES)
def test_value_and_gradient_are_those_of_the_models_own_logits(name):
    samples = [*make_samples(5), *session_samples(3)]
    plain = double_policy(model=mixture(name))
    policy = double_policy(model=mixture(name), algorithm=ROUTER)
    sums = [accumulate_all(each, [one_batch(samples)]) for each in (plain, policy)]
    expected = expected_term(plain._model, samples, name)
    assert sums[1].loss_sum - sums[0].loss_sum == pytest.approx(expected.item(), rel=1e-7)
    without = gradients_of(plain).clone()
    expected.backward()
    assert_close(gradients_of(policy), gradients_of(plain))
    assert not torch.allclose(gradients_of(policy), without)
    assert not sums[0].expert_counts
    counts = sums[1].expert_counts
    assert [sum(layer) for layer in counts] == [2 * sums[1].tokens] * len(find_routers(policy._model))


@pytest.mark.parametrize("fields", [{}, {"gradient_checkpointing": True}, {"packing": False}])
def test_no_split_and_no_recomputation_changes_a_number(fields):
    samples = [*make_relatives(9), *session_samples(3)]
    whole = double_policy(model=mixture("Mixtral"), algorithm=ROUTER)
    expected = accumulate_all(whole, [one_batch(samples)])
    for layout in ("padded", "tree"):
        policy = double_policy(model=mixture("Mixtral"), algorithm=ROUTER, **fields)
        policy.layout = layout
        sums = accumulate_all(policy, form_micro_batches(samples, 60))
        assert_close(gradients_of(policy), gradients_of(whole))
        assert sums.balance_sum == pytest.approx(expected.balance_sum, rel=1e-7)
        assert sums.expert_counts == expected.expert_counts


def test_measuring_changes_no_gradient():
    samples = make_samples(6)
    plain = make_policy(model=make_model("Mixtral"))
    policy = make_policy(model=make_model("Mixtral"), algorithm={"router": {"measure": True}})
    sums = [accumulate_all(each, [one_batch(samples)]) for each in (plain, policy)]
    assert torch.equal(gradients_of(policy), gradients_of(plain))
    assert not any(name.startswith("experts/") for name in loss_metrics(sums[0]))
    assert loss_metrics(sums[1])["experts/balance_loss"] > 0.9


def test_routers_that_were_compiled_and_run_before_are_heard():
    model = make_model("Mixtral", experts_implementation="batched_mm", num_hidden_layers=1)
    block = model.model.layers[0].mlp
    block.compile(backend="eager", dynamic=True)
    block(torch.zeros(2, 8, 32, requires_grad=True) * 1.0)
    policy = make_policy(model=model, algorithm={"router": {"measure": True}})
    sums = accumulate_all(policy, [one_batch(make_samples(3))])
    assert [sum(layer) for layer in sums.expert_counts] == [2 * sums.tokens]


def test_the_estimate_of_memory_counts_their_logits():
    models = [*map(mixture, MIXTURES), make_model("Llama")]
    sizes = [count_sizes(model, torch.float32, 8).router_logits for model in models]
    assert sizes == [2 * 3, 2 * 4, 4, 0], "experts of each layer; GLM's first layer is dense"


def counts_of(*layers: tuple[int, ...]) -> dict[str, Any]:
    return {f"expert_counts/{number}": np.array(layer) for number, layer in enumerate(layers)}


def test_metrics_by_hand():
    first = Sums({"tokens": 1, "balance_sum": 2.0} | counts_of((1, 1, 0, 0), (2, 0, 0, 0)))
    second = Sums({"tokens": 1, "balance_sum": 4.0} | counts_of((1, 1, 0, 0), (0, 1, 1, 0)))
    metrics = loss_metrics(Sums() + first + second)
    # Layer 0: (2, 2, 0, 0), entropy log 2 of log 4. Layer 1: (2, 1, 1, 0), entropy 1.5 log 2.
    assert metrics["experts/max_load"] == 2.0
    assert metrics["experts/entropy"] == pytest.approx((0.5 + 0.75) / 2)
    assert metrics["experts/idle"] == 3 / 8
    assert metrics["experts/balance_loss"] == 3.0


def test_what_has_no_such_routers_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.algorithm\.router: .* no routers in LlamaForCausalLM"):
        make_policy(algorithm=ROUTER)
    with pytest.raises(ConfigError, match=r"routers of PhimoeForCausalLM do not return"):
        make_policy(model=make_model("Phimoe"), algorithm=ROUTER)


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
def test_own_routes_change_no_bit(family):
    model = make_model(family, experts_implementation="eager", **FAMILIES[family])
    samples = with_own(model, [*make_relatives(7), *session_samples(3)])
    policy = make_policy(model=model, replays_routes=True)
    results = []
    for trained_samples in (samples, [changed(sample, routes=()) for sample in samples]):
        policy.zero()
        sums = accumulate_all(policy, form_micro_batches(trained_samples, 80))
        results.append((gradients_of(policy).clone(), sums.loss_sum, sums.mismatch_max))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@pytest.fixture
def samples():
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
        outputs = graph.forward(*args)
        rounded = []
        for output in outputs:
            is_number = isinstance(output, torch.Tensor) and output.is_floating_point()
            rounded.append(output * (1 + 2**-51) if is_number else output)
        return tuple(rounded)

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name == "compiled")) for name in LAYOUTS]
)
def test_gradient_of_foreign_routes(name, samples, monkeypatch):
    model = wide_mixtral(monkeypatch)
    if name == "compiled":
        assert compile_model(model, torch.float64, backend=rounds_otherwise)
    policy = make_double(model=model, **LAYOUTS[name])
    policy.layout = "padded" if name == "padded" else "tree"
    accumulate_all(policy, form_micro_batches([changed(s, routes=()) for s in samples], 80))
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


def test_what_would_have_been_chosen_otherwise_is_counted():
    """In one layer of two, at one of five trained tokens; and the gap of the row that is scored again."""
    model = make_model("Mixtral", experts_implementation="eager")
    (sample,) = make_samples(1)
    sample = changed(sample, mask=np.ones_like(sample.mask))
    chosen = choice_of(model, next(rows_of(sample)))
    replayed = chosen.copy()
    source = len(sample.prompt_ids)
    replayed[source, 1] = (replayed[source, 1] + 1) % 3
    policy = make_policy(model=model, replays_routes=True)
    sums = policy.accumulate(one_batch([changed(sample, routes=(make_routes(replayed),))]))
    assert (sums.changed_tokens, sums.changed_layers) == (1, 0.5)
    (plain,) = logprobs_of(policy, [changed(sample, routes=())])
    gap = np.abs(plain - sample.rollout_logprobs).sum()
    assert sums.compared_tokens == sums.tokens == len(plain)
    gaps = [sums.replayed_gap_sum, sums.unreplayed_gap_sum]
    assert gaps == pytest.approx([sums.mismatch_sum, gap], rel=1e-5)
    assert policy.accumulate(one_batch([sample])).compared_tokens == 0, "once an update"


def test_replay_closes_the_gap_to_an_engine_whose_routers_round_otherwise():
    fields = {"experts_implementation": "eager", "num_local_experts": 8}
    model = make_model("Mixtral", **fields)
    engine = make_model("Mixtral", **fields)
    for _, router in find_routers(engine):

        def route(hidden, router=router):
            logits = (hidden.reshape(-1, 32).bfloat16() @ router.weight.bfloat16().T).float()
            weights, chosen = logits.softmax(-1).topk(2)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        router.forward = route
    of_engine = make_policy(model=engine)
    samples = with_own(engine, make_samples(60))
    logprobs = logprobs_of(of_engine, [changed(sample, routes=()) for sample in samples])
    samples = [changed(s, rollout_logprobs=of_sample) for s, of_sample in zip(samples, logprobs, strict=True)]
    policy = make_policy(model=model, replays_routes=True)
    with_replay = policy.accumulate(one_batch(samples)).mismatch_max
    without = policy.accumulate(one_batch([changed(s, routes=()) for s in samples])).mismatch_max
    assert without > 10 * with_replay


def test_a_reference_chooses_by_itself():
    samples = with_foreign(make_samples(4), experts=3)
    for fields in ({}, {"lora": {"rank": 2}}):
        algorithm = {"reference": {"model": "frozen"}, "kl": {"place": "loss", "coefficient": 0.1}}
        policy = make_policy(
            model=make_model("Mixtral", experts_implementation="eager"),
            replays_routes=True,
            algorithm=algorithm,
            **fields,
        )
        references = [columns["reference_logprobs"] for columns in policy.precompute(samples)]
        plain = logprobs_of(policy, [changed(sample, routes=()) for sample in samples])
        replayed = logprobs_of(policy, samples)
        for reference, unreplayed, with_replay in zip(references, plain, replayed, strict=True):
            np.testing.assert_allclose(reference, unreplayed, atol=1e-6)
            assert np.abs(reference - with_replay).max() > 1e-3


def test_routes_of_all_layers_are_looked_up_by_the_number_of_the_layer():
    model = make_model("DeepseekV3", experts_implementation="eager", **FAMILIES["DeepseekV3"])
    (sample,) = with_own(model, make_samples(1))
    (routes,) = sample.routes
    assert routes.experts.shape[1] == 1, "its first layer is dense"
    rng = np.random.default_rng(0)
    routed = (routes.experts + rng.integers(1, 4, routes.experts.shape, dtype=np.uint8)[..., :1]) % 8
    both = np.concatenate([np.zeros_like(routed), routed], 1)
    policy = make_policy(model=model, replays_routes=True)
    logprobs = [
        logprobs_of(policy, [changed(sample, routes=(make_routes(experts),))])[0]
        for experts in (routed, both)
    ]
    np.testing.assert_array_equal(*logprobs)


def test_rows_share_a_token_only_where_routes_are_equal():
    first, *_ = make_samples(1)
    count = len(first.prompt_ids) + len(first.completion_ids)
    experts = np.zeros((count - 1, 2, 2), dtype=np.uint8)
    changed_experts = experts.copy()
    changed_experts[-1, 1, 1] = 1
    samples = [
        changed(first, key=(0, i), routes=(make_routes(routes),))
        for i, routes in enumerate((experts, experts, changed_experts))
    ]
    # The last one has its own last two tokens: the one whose routes differ, and the one after it.
    assert PrefixOrder(samples[:2], "tree").num_tokens == count
    assert PrefixOrder(samples, "tree").num_tokens == count + 2


def test_routers_that_cannot_be_told_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"rollout\.record_routes: the routers of PhimoeForCausalLM"):
        make_policy(model=make_model("Phimoe"), replays_routes=True)
    assert make_policy(replays_routes=True).routing is None, "a Llama has none"
    with pytest.raises(ValueError, match=r"routes of \[3\] tokens, expected"):
        replace(make_samples(1)[0], routes=(make_routes(np.zeros((3, 2, 2), dtype=np.uint8)),))
