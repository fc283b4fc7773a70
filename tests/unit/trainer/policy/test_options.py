"""An option's hooks are called when `PolicyOption` says so, and one that does nothing changes no bit."""

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.models import load_state, make_policy, make_samples, one_batch, tiny_llama, train
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.policy import transformers_policy
from tidemill.services.trainer.policy.options import (
    BesideModel,
    OptionSettings,
    PolicyOption,
    load_options,
)

HOOKS = [name for name in vars(PolicyOption) if callable(getattr(PolicyOption, name)) and name[0] != "_"]


class Noting(PolicyOption):
    """Notes each call of a hook."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def note(self, hook: str, *args: Any, **options: Any) -> Any:
        self._calls.append(hook)
        return getattr(super(), hook)(*args, **options)


for hook_name in HOOKS:
    setattr(Noting, hook_name, partialmethod(Noting.note, hook_name))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hooks in the order of their calls; every policy has an option that notes them."""
    noted: list[str] = []
    monkeypatch.setattr(transformers_policy, "load_options", lambda *_: [Noting(noted)])
    return noted


def drain(calls: list[str]) -> list[str]:
    """The calls since the last time."""
    last_calls = list(calls)
    calls.clear()
    return last_calls


def test_hooks_are_called_when_they_say(calls: list[str], tmp_path: Path) -> None:
    policy = make_policy(gradient_checkpointing=True)
    assert drain(calls)[:4] == ["change_model", "join", "around_trial", "beside_model"]
    batch = one_batch(make_samples(4))
    policy.accumulate(batch)
    of_tile = ["complete_tile", "around_pass", "pass_scores", "columns_of", "sums_of"]
    first = drain(calls)
    assert first == ["begin_update", *of_tile * (len(first) // len(of_tile))]
    policy.accumulate(batch)
    assert "begin_update" not in drain(calls), "only the first micro-batch of an update begins it"
    policy.update(1.0)
    assert drain(calls) == ["end_step"]
    policy.precompute(batch.samples)
    assert drain(calls) == ["precompute"]
    load_state(policy, policy.state())
    assert set(drain(calls)) == {"state", "check_state"}
    policy.compare_weights()
    assert drain(calls) == ["base_of", "published", "marks"]
    policy.begin_writing(tmp_path, 1, -1).result()
    assert set(drain(calls)) == {"save_beside", "published"}
    policy.leave()
    policy.enter()
    assert drain(calls) == ["modules", "modules"]


def test_an_option_that_does_nothing_changes_no_bit(calls: list[str]) -> None:
    with_option = make_policy()
    without = make_policy()
    without.options = []
    batch = one_batch(make_samples(6))
    for policy in (with_option, without):
        train(policy, [batch, batch])
    assert drain(calls) and with_option.digest() == without.digest()


def test_what_is_trained_beside_the_model_is_updated_and_saved_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.Linear(2, 2)

    class Beside(PolicyOption):
        def beside_model(self) -> BesideModel:
            return BesideModel([("beside.weight", layer.weight)], lr=0.5, is_clipped_alone=True)

    monkeypatch.setattr(transformers_policy, "load_options", lambda *_: [Beside(settings(), tiny_llama())])
    policy = make_policy()
    assert "beside.weight" in policy.state().tensors
    assert "model.beside.weight" not in policy.state().tensors
    rates = {group["lr"] for group in policy._optimizer.param_groups}
    assert rates == {1e-2, 0.5}
    assert "+" in policy.digest(), "commits cover what is trained and not published"


def settings(**trainer: Any) -> OptionSettings:
    config = TrainerConfig.model_validate(trainer)
    model = tiny_llama()
    return OptionSettings(config, model.dtype, model.device)


def test_a_plain_run_has_no_option_and_others_have_those_that_they_ask_for() -> None:
    def names(**trainer: Any) -> list[str]:
        return [type(option).__name__ for option in load_options(settings(**trainer), tiny_llama())]

    assert names() == []
    frozen = {"reference": {"model": "frozen"}}
    assert names(algorithm=frozen, offload_optimizer=True) == ["ReferenceModel", "OffloadedMoments"]
    assert names(algorithm=frozen, lora={}) == ["Adapters"], "with its adapters off it is the reference"
    assert names(algorithm={"advantage": "gae"}) == ["ValueHead"]
    assert names(algorithm={"advantage": "gae", "value": {"model": "own"}}, compile=True) == [
        "Compiler",
        "Critic",
    ]
