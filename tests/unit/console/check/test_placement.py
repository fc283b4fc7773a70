"""Placement: each process of a run sees the GPUs that the config gives to it, and no others."""

from typing import Any

import pytest

from tidemill.common.config import RunConfig, parse_config
from tidemill.common.errors import ConfigError
from tidemill.services.console.check.placement import find_overlaps, gpus_here, place
from tidemill.services.console.up.specs import service_specs


def config(local: dict[str, Any] | None = None, trainer: Any = (), **rollout: Any) -> RunConfig:
    """With a reward model on two servers, where `local` is given."""
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": rollout}
    if local is not None:
        tree["reward"] = {"rewards": {"rm": {"model": {"servers": "rm"}}}}
        tree["servers"] = {"rm": {"model": "rm", "local": {"count": 2, **local}}}
    return parse_config({**tree, "trainer": {"gpus": list(trainer)}}, "test")


def seen(run: RunConfig, index: int) -> str:
    (spec,) = [spec for spec in service_specs(run) if spec.name == f"replica-rm-{index}"]
    return spec.env.get("CUDA_VISIBLE_DEVICES", "")


def test_rollout_workers_and_trainer_get_their_own() -> None:
    run = config(trainer=[0], workers=2, gpus=[1, 2, 3, 4], vllm={"tensor_parallel_size": 2})
    specs = {spec.name: spec.env.get("CUDA_VISIBLE_DEVICES") for spec in service_specs(run)}
    assert (specs["trainer"], specs["rollout-0"], specs["rollout-1"]) == ("0", "1,2", "3,4")


def test_a_reward_model_has_gpus_of_its_own_or_those_of_its_rollout_worker() -> None:
    assert [seen(config({"gpus": [5, 6]}), i) for i in (0, 1)] == ["5", "6"]
    assert [seen(config({"gpus": [4, 5, 6, 7]}), i) for i in (0, 1)] == ["4,5", "6,7"]
    assert [seen(config({"gpus": [7]}), i) for i in (0, 1)] == ["7", "7"]
    shared = config({"shares_rollout_gpus": True}, workers=2, gpus=[1, 2])
    assert [seen(shared, i) for i in (0, 1)] == ["1", "2"]
    assert shared.shared_turn_s == 5.0


@pytest.mark.parametrize(
    ("model", "rollout", "said"),
    [
        (None, {"workers": 2, "gpus": [1]}, "names 1 GPUs"),
        ({"gpus": [1], "shares_rollout_gpus": True}, {}, "not both"),
        ({"shares_rollout_gpus": True}, {"engine": "transformers"}, "an engine that sleeps"),
        ({"shares_rollout_gpus": True, "engine": "vllm"}, {}, "takes turns by itself"),
    ],
)
def test_what_does_not_fit_is_refused(model: Any, rollout: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(model, **rollout)


def test_every_process_gets_gpus_of_its_own_where_none_are_named() -> None:
    run = config({}, workers=2, vllm={"tensor_parallel_size": 2})
    run, said = place(run, range(8))
    assert (run.trainer.gpus, run.rollout.gpus, seen(run, 0), seen(run, 1)) == ((0,), (1, 2, 3, 4), "5", "6")
    assert said == ["GPUs: trainer 0, rollout 1,2,3,4, servers.rm.local 5,6, 7 unused"]
    assert find_overlaps(run) == []


def test_what_is_named_stays_and_is_given_to_nobody_else() -> None:
    run, _ = place(config({"gpus": [0]}, trainer=[2], workers=2), range(5))
    assert (run.trainer.gpus, run.rollout.gpus, seen(run, 0)) == ((2,), (1, 3), "0")
    whole = config(trainer=[0], gpus=[1])
    assert place(whole, range(2)) == (whole, ["GPUs: trainer 0, rollout 1"])


def test_without_gpus_or_with_one_everything_is_as_it_was() -> None:
    run = config({}, workers=2)
    assert place(run, []) == (run, []) and run.shared_turn_s is None
    assert not any("CUDA_VISIBLE_DEVICES" in spec.env for spec in service_specs(run))
    placed, said = place(config({}, workers=2, trainer_gpus="shared"), [3])
    assert placed.rollout.gpus == () and "all processes are on GPU 3 at once" in said[0]
    assert placed.rollout.trainer_gpus == "shared", "the trainer leaves room for the engine"
    assert "leaves 15%" in said[0]
    simulated = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"engine": "simulated"}}
        | {"trainer": {"policy": "simulated"}}
    )
    assert place(simulated, range(2)) == (simulated, [])


def test_too_few_gpus_are_refused_with_what_to_lower() -> None:
    with pytest.raises(ConfigError, match=r"wants 5 GPUs .1 for trainer, 4 for rollout.* 4 of the 4 here"):
        place(config(workers=4), range(4))
    ranks = parse_config(
        {"model": {"path": "m"}, "data": {"train": "t"}, "trainer": {"num_ranks": 2, "gpus": [0]}}, "t"
    )
    with pytest.raises(ConfigError, match="names 1 GPUs for 2 ranks"):
        place(ranks, range(4))


def test_a_gpu_belongs_to_one_unless_sharing_is_asked_for() -> None:
    assert find_overlaps(config(trainer=[0], gpus=[0])) == ["GPU 0 is in trainer.gpus and in rollout.gpus"]
    assert find_overlaps(config(trainer=[0], gpus=[0], trainer_gpus="shared")) == []
    assert "servers.rm.local.gpus" in find_overlaps(config({"gpus": [1]}, gpus=[1]))[0]
    assert find_overlaps(config({"gpus": [7]}, trainer=[0], gpus=[1])) == []
    assert find_overlaps(config(trainer=[0, 0])) == ["trainer.gpus names a GPU twice"]
    shared, _ = place(config(workers=2, trainer_gpus="shared"), range(2))
    assert (shared.trainer.gpus, shared.rollout.gpus) == ((0,), (0, 0))


def test_one_gpu_is_taken_in_turns_and_several_where_that_is_asked_for() -> None:
    run, said = place(config(), [3])
    assert (run.trainer.gpus, run.rollout.gpus, run.shared_turn_s) == ((3,), (3,), 5.0)
    assert said[0] == "GPUs: trainer 3, rollout 3" and "take turns" in said[1]
    assert place(run, [3]) == (run, said), "resumed, it is the same"
    beside, said = place(config({}, workers=2), [3])
    assert beside.rollout.trainer_gpus == "turns" and "servers.rm.local on it at once" in said[0]
    shared, _ = place(config(trainer_gpus="shared"), [3])
    assert (shared.trainer.gpus, shared.rollout.gpus) == ((3,), (3,)) and place(shared, [3])[0] == shared
    for settings in ({"engine": "transformers"}, {"trainer_gpus": "shared"}):
        assert place(config(**settings), [3])[0].shared_turn_s is None, settings
    many, _ = place(config(workers=2, trainer_gpus="turns", gpu_turn_s=0.5), range(4))
    assert (many.trainer.gpus, many.rollout.gpus, many.shared_turn_s) == ((0,), (0, 0), 0.5)
    assert find_overlaps(many) == [] and place(config(), range(2))[0].shared_turn_s is None


def test_gpus_that_the_environment_names_are_those_to_hand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (gpus_here(3), gpus_here(None)) == ([0, 1, 2], [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    assert gpus_here(8) == [4, 6]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8a1c")
    assert gpus_here(8) == []
