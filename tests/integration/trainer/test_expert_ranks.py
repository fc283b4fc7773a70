"""Ranks that divide experts give what one process gives, in float64 to 1e-12; and whatever a layout writes,
any other reads.

Experts are computed one by one: `grouped_mm` takes no float64. As it is used, in bfloat16 and float32, it is
held against ranks that have all experts.
"""

import copy
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tests.support.architectures import make_model
from tests.support.models import logprobs_of, make_samples, read_policy_state, run_config, save_state
from tests.support.rank_runs import (
    FIELDS,
    assert_same_outcome,
    gradient_of,
    never_in_float32,
    on_ranks,
    outcome_of,
    policy_on,
    train_alone,
    update,
)
from tests.support.versions import write_version
from tidemill.common.config.run import RunConfig
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.common.weights.digest import Digest
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.rollout.engines.checkpoint import checkpoint_tensors, prove, read_tensors
from tidemill.services.rollout.engines.held_weights import apply, as_tensor
from tidemill.services.rollout.engines.model import copy_weights, load_model, match_weights, pieces_of
from tidemill.services.rollout.weight_follower import LocalVersions, find_route
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.policy.compiling import compile_model
from tidemill.services.trainer.policy.fsdp.rank_policy import RankPolicy, load_rank_policy
from tidemill.services.trainer.policy.fsdp.ranks import Ranks
from tidemill.services.trainer.policy.fsdp.sharded_policy import STOP, ShardedPolicy, serve_calls
from tidemill.services.trainer.policy.loading import open_policy
from tidemill.services.trainer.weights.peers import pack
from tidemill.services.trainer.weights.store import WeightStore

SIZE = 4
RANKS = {"shard_ranks": None, "context_ranks": 1, "expert_ranks": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "two of four have a part, critic, moments on the host": {"expert_ranks": 2, "offload_optimizer": True,
        "algorithm": {"advantage": "gae", "value": {"model": "own"}, "reference": {"model": "frozen"},
        "kl": {"place": "loss", "coefficient": 0.1}, "importance": {"normalise": True}}},
    "four, recomputed, routers": {"expert_ranks": 4, "gradient_checkpointing": True,
        "algorithm": {"router": {"balance": 0.1, "z": 0.01}}},
    "two of six, and shared passes": {"expert_ranks": 2, "context_ranks": 2, "sum_gradients": "micro_batch"},
    "four, and shared passes, compiled": {"expert_ranks": 4, "context_ranks": 2},
    "four, adapters": {"expert_ranks": 4, "lora": {"rank": 3, "alpha": 12}},
    "two copies, and shared passes, value head": {"expert_ranks": 2, "shard_ranks": 2, "context_ranks": 2,
        "algorithm": {"advantage": "gae"}},
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16},
    "GptOss": {},
}
"""The second has biases of experts."""


@cache
def model_of(name: str) -> PreTrainedModel:
    """Of six experts two ranks share three: one has two of them."""
    fields = {"num_hidden_layers": 1 + ("recomputed" in name), "num_local_experts": 6 if "six" in name else 4}
    model = make_model("Mixtral", experts_implementation="eager", **fields).double()
    if "compiled" in name:
        assert compile_model(model, backend="eager")
    return model


def config_of(name: str, **more: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(FIELDS | OPTIONS[name] | more)


def largest_part(policy: RankPolicy) -> float:
    """Share of its experts that this rank has."""
    experts = [weight for name, weight in policy._model.named_parameters() if ".experts." in name]
    sizes = [weight.to_local().numel() for weight in experts if isinstance(weight, DTensor)]
    return sum(sizes) / sum(weight.numel() for weight in experts)


def train_all(ranks: Ranks, folder: Path) -> dict[str, Any]:
    written: dict[str, Any] = {}
    with never_in_float32():
        for name in OPTIONS:
            config = config_of(name, num_ranks=SIZE)
            written[name] = outcome_of(policy_on(ranks, copy.deepcopy(model_of(name)), config), config)
        written["families"] = {name: family_gradient(ranks, name) for name in FAMILIES}
        written["resharded"] = reshard(ranks, folder)
    written["written"] = {name: write(ranks, folder, name) for name in WRITERS}
    written["refused"] = [refusal(ranks, "Llama", 2), refusal(ranks, "Mixtral", 2)]
    return written


def family_gradient(ranks: Ranks | None, family: str) -> Tensor:
    model = make_model(family, experts_implementation="eager", **FAMILIES[family]).double()
    fields = {"num_ranks": SIZE, "expert_ranks": 2} if ranks else {}
    policy = policy_on(ranks, model, TrainerConfig.model_validate(FIELDS | fields))
    return gradient_of(policy, [MicroBatch(tuple(make_samples(8)))])


LAYOUTS: list[dict[str, Any]] = [
    {"expert_ranks": 4},
    {},
    {"expert_ranks": 2, "shard_ranks": 2},
    {"expert_ranks": 4, "context_ranks": 4},
]


def reshard(ranks: Ranks, folder: Path) -> list[tuple[str, float]]:
    """The digest and the next update's norm of a state that goes from layout to layout, and at the end back
    to the first; each writes what it has read."""
    results = []
    source = None
    for number, fields in enumerate([*LAYOUTS, LAYOUTS[0]]):
        config = TrainerConfig.model_validate(FIELDS | {"num_ranks": SIZE} | fields)
        policy = policy_on(ranks, copy.deepcopy(model_of("four")), config)
        if source is None:
            update(policy, make_samples(9))
        else:
            policy.load_state(source)
        source = folder / f"state-{number}"
        save_state(policy, source)
        digest = policy.digest()
        results.append((digest, update(policy, make_samples(9, seed=1))[1].grad_norm))
    return results


WRITERS: dict[str, dict[str, Any]] = {
    "one has all": {},
    "two": {"expert_ranks": 2},
    "four": {"expert_ranks": 4},
    "two, and shared passes": {"expert_ranks": 2, "context_ranks": 2},
    "two copies, and shared passes": {"expert_ranks": 2, "context_ranks": 2, "shard_ranks": 2},
    "four, adapters": {"expert_ranks": 4, "lora": {"rank": 3}},
}
NUM_VERSIONS = 5
BASE_EVERY = 4


def writer_config(folder: Path, name: str, **more: Any) -> RunConfig:
    """In bfloat16, with grouped products."""
    trainer = {"num_ranks": SIZE, "num_threads": 1, "optimizer": {"lr": 1e-3}} | WRITERS[name] | more
    weights = {"base_every": BASE_EVERY, "max_share_changed": 1.0}
    return run_config(folder / "model", model={"dtype": "bfloat16"}, trainer=trainer, weights=weights)


def write(ranks: Ranks, folder: Path, name: str) -> dict[str, Any]:
    """What a trainer publishes of a model that ranks read from its files; the state at each version, and what
    torch itself gathers of the ranks' shards."""
    config = writer_config(folder, name)
    rank_policy = load_rank_policy(config, ranks)
    share = largest_part(rank_policy)
    logprobs = logprobs_of(rank_policy, make_samples(6))
    manifests = []
    gathered = []
    if ranks.is_leader:
        policy: Any = ShardedPolicy(rank_policy, ranks)
        store = WeightStore(folder / name, config.weights)
        store.max_chain_share = 10.0
        for version in range(NUM_VERSIONS):
            if version not in (0, 3):  # 3 is what 2 was
                update(policy, make_samples(6, seed=version))
            manifests.append(write_version(store, version, policy))
            gathered.append(dict(policy.named_parameters_for_export()))
            save_state(policy, folder / name / f"state-{version}")
        ranks.broadcast(pack((STOP, ())))
    else:
        serve_calls(rank_policy, ranks)
    return {"share": share, "logprobs": logprobs, "manifests": manifests, "gathered": gathered}


def refusal(ranks: Ranks, family: str, size: int) -> str:
    config = TrainerConfig.model_validate(FIELDS | {"num_ranks": SIZE, "expert_ranks": size})
    try:
        policy_on(ranks, make_model(family).double(), config)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def of_four(folder):
    make_model("Mixtral", num_local_experts=4).save_pretrained(folder / "model")
    results: dict[str, Any] = on_ranks(SIZE, partial(train_all, folder=folder), folder)
    return results


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_gradients_and_weights_after_three_steps_are_those_of_one(name, of_four):
    with never_in_float32():
        alone = train_alone(copy.deepcopy(model_of(name)), config_of(name, **RANKS))
    assert_same_outcome(of_four[name], alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_architectures_give_the_gradient_of_one(family, of_four):
    with never_in_float32():
        gradient = family_gradient(None, family)
    assert ((of_four["families"][family] - gradient).norm() / gradient.norm()).item() < 1e-6


def test_a_state_goes_through_all_layouts_and_back_bit_by_bit(of_four, folder):
    (digest, norm), *others = of_four["resharded"]
    assert {digest_of_rank for digest_of_rank, _ in others} == {digest}
    assert others[-1][1] == norm
    assert [norm_of_rank for _, norm_of_rank in others] == pytest.approx([norm] * len(others), rel=1e-9)
    first = read_policy_state(folder / "state-0")
    for number in range(1, len(LAYOUTS) + 1):
        state = read_policy_state(folder / f"state-{number}")
        assert state.values == first.values and state.tensors.keys() == first.tensors.keys()
        assert all(torch.equal(state.tensors[name], tensor) for name, tensor in first.tensors.items())


def test_versions_are_those_of_ranks_with_all_experts(of_four, folder):
    expected = of_four["written"]["one has all"]
    first, second, third, *_ = expected["manifests"]
    trained = weights_of(folder / "one has all", third)
    for name, written in of_four["written"].items():
        assert written["share"] == 1 / (WRITERS[name].get("shard_ranks") or SIZE)
        assert written["manifests"][0].digest == first.digest
        for mine, theirs in zip(written["logprobs"], expected["logprobs"], strict=True):
            assert abs(mine - theirs).max() < 1e-6, "all round in the same places"
        if "lora" not in WRITERS[name]:
            assert written["manifests"][1].share_changed == pytest.approx(second.share_changed, abs=0.02)
            stored = weights_of(folder / name, written["manifests"][2])
            for tensor in trained:
                torch.testing.assert_close(stored[tensor], trained[tensor], rtol=0.05, atol=0.01, msg=tensor)


def weights_of(run: Path, manifest: WeightManifest) -> dict[str, Tensor]:
    """What a worker that starts reads."""
    files, deltas = find_route(LocalVersions(run), manifest, None)
    return dict(checkpoint_tensors(read_tensors(files), deltas))


@pytest.mark.parametrize("name", WRITERS)
def test_workers_hold_the_weights_of_every_version_bit_by_bit(name, of_four, folder):
    """One that starts reads the whole chain, one that follows patches what it has."""
    config = writer_config(folder, name, num_ranks=1, **RANKS)
    alone = open_policy(config)
    started = load_model(config.model)
    follower = Follower()
    manifests = of_four["written"][name]["manifests"]
    assert [manifest.is_delta for manifest in manifests] == [False, True, True, True, False]
    assert 0.0 == manifests[3].share_changed < manifests[1].share_changed
    for version, manifest in enumerate(manifests):
        expected = of_four["written"][name]["gathered"][version]
        alone.load_state(folder / name / f"state-{version}")
        assert_same_bits(dict(alone.named_parameters_for_export()), expected)
        assert alone.digest().startswith(manifest.digest)

        loaded = weights_of(folder / name, manifest)
        assert_same_bits(loaded, expected)
        copy_weights(match_weights(started, loaded))
        assert all(torch.equal(mine, theirs) for mine, theirs in match_weights(started, expected))

        follower.load(*find_route(LocalVersions(folder / name), manifest, follower.manifest), manifest)
        assert_same_bits(follower.tensors, expected)


class Follower:
    """What a worker's engine holds, under the names of the files."""

    def __init__(self) -> None:
        self.manifest: WeightManifest | None = None

    def load(self, files: list[Path], deltas: list[list[Path]], manifest: WeightManifest) -> None:
        if manifest.is_delta:
            assert not files and [len(delta) for delta in deltas] == [SIZE], "a file of each rank"
            change, changes = self.held.stage(deltas)
            self.digest = prove(self.digest, change, manifest.digest)
            assert apply(changes) == 0
        else:
            read = read_tensors(files)
            self.tensors = {name: as_tensor(*tensor).clone() for name, tensor in read.items()}
            model = SimpleNamespace(state_dict=lambda: self.tensors)
            self.held = pieces_of(model, [info for info, _ in read.values()])
            self.digest = Digest.parse(manifest.digest)
        self.manifest = manifest


def assert_same_bits(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        assert mine[name].dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(mine[name].view(torch.int16), tensor.view(torch.int16)), name


def test_what_has_no_such_experts_is_refused_by_name(of_four):
    assert ["trainer.expert_ranks" in said for said in of_four["refused"]] == [True, True]
    assert "llama" in of_four["refused"][0] and "take 1" in of_four["refused"][1]
