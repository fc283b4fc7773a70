"""Losses and metrics of a mixture model's routers: by hand, against models' own logits, and split."""

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
    make_policy,
    make_relatives,
    make_samples,
    one_batch,
)
from tests.support.sessions import session_samples
from tidemill.common.errors import ConfigError
from tidemill.common.run.routers import find_routers
from tidemill.services.trainer.algorithm.losses.routing import sequence_balance
from tidemill.services.trainer.algorithm.losses.totals import MicroBatchMetrics, loss_metrics
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.samples import Sample
from tidemill.services.trainer.policy.memory.sizes import count_sizes

ROUTER = {"router": {"balance": 0.3, "z": 0.02}}
MIXTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Mixtral": (torch.softmax, {"num_local_experts": 3}),
    "GraniteMoe": (torch.softmax, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Glm4Moe": (
        lambda logits, _: logits.sigmoid(),
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
}
"""Affinity, and fields of the config. Granite returns logits last; GLM has a dense layer and biases."""


def mixture(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MIXTURES[name][1])
    config._experts_implementation = "eager"  # grouped products know no float64
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return model.double().eval()


make_double = partial(make_policy, torch.float64)
assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
"""Norms of these models compute in float32."""


def test_balance_of_a_sequence_by_hand() -> None:
    # Shares (3/4, 1/4) and (5/8, 3/8): P = (11/16, 5/16), f = (2, 0). Then one token alone: 2 * 3/4.
    affinities = torch.tensor([[3.0, 1.0], [1.0, 3.0], [5.0, 3.0]])
    found = sequence_balance(affinities, 1, torch.tensor([0, 1, 0]), 2)
    assert found.tolist() == pytest.approx([1.375, 1.5])
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
def test_value_and_gradient_are_those_of_the_models_own_logits(name: str) -> None:
    samples = [*make_samples(5), *session_samples(3)]
    plain, policy = make_double(model=mixture(name)), make_double(model=mixture(name), algorithm=ROUTER)
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
def test_no_split_and_no_recomputation_changes_a_number(fields: dict[str, Any]) -> None:
    samples = [*make_relatives(9), *session_samples(3)]
    whole = make_double(model=mixture("Mixtral"), algorithm=ROUTER)
    expected = accumulate_all(whole, [one_batch(samples)])
    for layout in ("padded", "tree"):
        policy = make_double(model=mixture("Mixtral"), algorithm=ROUTER, **fields)
        policy.layout = layout
        sums = accumulate_all(policy, form_micro_batches(samples, 60))
        assert_close(gradients_of(policy), gradients_of(whole))
        assert sums.balance_sum == pytest.approx(expected.balance_sum, rel=1e-7)
        assert sums.expert_counts == expected.expert_counts


def test_measuring_changes_no_gradient() -> None:
    samples = make_samples(6)
    plain = make_policy(model=make_model("Mixtral"))
    policy = make_policy(model=make_model("Mixtral"), algorithm={"router": {"measure": True}})
    sums = [accumulate_all(each, [one_batch(samples)]) for each in (plain, policy)]
    assert torch.equal(gradients_of(policy), gradients_of(plain))
    assert not any(name.startswith("experts/") for name in loss_metrics(sums[0]))
    assert loss_metrics(sums[1])["experts/balance_loss"] > 0.9


def test_routers_that_were_compiled_and_run_before_are_heard() -> None:
    model = make_model("Mixtral", experts_implementation="batched_mm", num_hidden_layers=1)
    block = model.model.layers[0].mlp
    block.compile(backend="eager", dynamic=True)
    block(torch.zeros(2, 8, 32, requires_grad=True) * 1.0)
    policy = make_policy(model=model, algorithm={"router": {"measure": True}})
    sums = accumulate_all(policy, [one_batch(make_samples(3))])
    assert [sum(layer) for layer in sums.expert_counts] == [2 * sums.tokens]


def test_the_estimate_of_memory_counts_their_logits() -> None:
    models = [*map(mixture, MIXTURES), make_model("Llama")]
    sizes = [count_sizes(model, torch.float32, 8).router_logits for model in models]
    assert sizes == [2 * 3, 2 * 4, 4, 0], "experts of each layer; GLM's first layer is dense"


def test_metrics_by_hand() -> None:
    one = MicroBatchMetrics(tokens=1, expert_counts=((1, 1, 0, 0), (2, 0, 0, 0)), balance_sum=2.0)
    two = MicroBatchMetrics(tokens=1, expert_counts=((1, 1, 0, 0), (0, 1, 1, 0)), balance_sum=4.0)
    metrics = loss_metrics(MicroBatchMetrics() + one + two)
    # Layer 0: (2, 2, 0, 0), entropy log 2 of log 4. Layer 1: (2, 1, 1, 0), entropy 1.5 log 2.
    assert metrics["experts/max_load"] == 2.0
    assert metrics["experts/entropy"] == pytest.approx((0.5 + 0.75) / 2)
    assert metrics["experts/idle"] == 3 / 8
    assert metrics["experts/balance_loss"] == 3.0


def test_what_has_no_such_routers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.algorithm\.router: .* no routers in LlamaForCausalLM"):
        make_policy(algorithm=ROUTER)
    with pytest.raises(ConfigError, match=r"routers of PhimoeForCausalLM do not return"):
        make_policy(model=make_model("Phimoe"), algorithm=ROUTER)
