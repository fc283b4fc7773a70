"""Placement: each process of a run sees the GPUs that the config gives to it, and no others."""

from typing import Any

import pytest

from tidemill.common.config import RunConfig, parse_config
from tidemill.common.errors import ConfigError
from tidemill.services.console.processes.service import (
    replica_gpus,
    rollout_gpus,
    service_specs,
    trainer_gpus,
)

LOCAL = {"count": 2, "model": "rm"}


def config(model: dict[str, Any] | None = None, trainer: Any = (), **rollout: Any) -> RunConfig:
    reward = {"rewards": {"rm": {"model": {"local_replicas": LOCAL, **model}}}} if model is not None else {}
    tree = {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": rollout, "reward": reward}
    return parse_config({**tree, "trainer": {"gpus": list(trainer)}}, "test")


def seen(run: RunConfig, index: int) -> str:
    model = run.reward.named["rm"].model
    return replica_gpus(run, model, index).get("CUDA_VISIBLE_DEVICES", "")


def test_rollout_workers_and_trainer_get_their_own() -> None:
    run = config(trainer=[0], workers=2, gpus=[1, 2, 3, 4], vllm={"tensor_parallel_size": 2})
    assert trainer_gpus(run) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert [rollout_gpus(run, i)["CUDA_VISIBLE_DEVICES"] for i in (0, 1)] == ["1,2", "3,4"]
    specs = {spec.name: spec.env.get("CUDA_VISIBLE_DEVICES") for spec in service_specs(run)}
    assert (specs["trainer"], specs["rollout-0"], specs["rollout-1"]) == ("0", "1,2", "3,4")


def test_a_reward_model_has_gpus_of_its_own_or_those_of_its_rollout_worker() -> None:
    assert [seen(config({"gpus": [5, 6]}), i) for i in (0, 1)] == ["5", "6"]
    assert [seen(config({"gpus": [4, 5, 6, 7]}), i) for i in (0, 1)] == ["4,5", "6,7"]
    assert [seen(config({"gpus": [7]}), i) for i in (0, 1)] == ["7", "7"]
    shared = config({"shares_rollout_gpus": True}, workers=2, gpus=[1, 2])
    assert [seen(shared, i) for i in (0, 1)] == ["1", "2"]
    assert shared.shared_turn_s == 5.0


def test_without_a_word_the_environment_decides() -> None:
    run = config({})
    assert seen(run, 0) == ""
    assert run.shared_turn_s is None
    assert not any("CUDA_VISIBLE_DEVICES" in spec.env for spec in service_specs(run))


@pytest.mark.parametrize(
    ("model", "rollout", "said"),
    [
        (None, {"workers": 2, "gpus": [1]}, "2 workers with 1 each"),
        ({"gpus": [1], "shares_rollout_gpus": True}, {}, "not both"),
        ({"shares_rollout_gpus": True}, {"engine": "transformers"}, "an engine that can sleep"),
        ({"shares_rollout_gpus": True, "server": "vllm"}, {}, "takes turns by itself"),
        ({"token_reward": "mean", "head": "token"}, {}, "needs input: ids"),
        ({"normalise": "clip"}, {}, "needs clip"),
        ({"mean": 1.0}, {}, "belong to normalise: standardise"),
    ],
)
def test_what_does_not_fit_is_refused(model: Any, rollout: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(model, **rollout)
