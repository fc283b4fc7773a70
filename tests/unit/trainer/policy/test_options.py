"""An option's hooks are called when `PolicyOption` says so, and one that does nothing changes no bit."""

import tomllib
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from infra.docs.pages import REPO
from tests.support.architectures import make_model
from tests.support.models import (
    load_state,
    make_policy,
    make_samples,
    one_batch,
    option_of,
    tiny_llama,
    train,
)
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.run.routers import find_routers
from tidemill.services.trainer.policy import transformers_policy
from tidemill.services.trainer.policy.critic import Critic
from tidemill.services.trainer.policy.options import (
    OPTIONS,
    BesideModel,
    OptionSettings,
    PolicyOption,
    load_options,
)
from tidemill.services.trainer.policy.reference import ReferenceModel

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
    of_constructor = drain(calls)
    assert of_constructor[:4] == ["change_model", "join", "around_trial", "beside_model"]
    assert of_constructor[-1] == "modules"
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


def test_an_option_that_does_nothing_changes_no_bit(request: pytest.FixtureRequest) -> None:
    without = make_policy()
    # From here on: `without` has no option in its passes either.
    calls = request.getfixturevalue("calls")
    with_option = make_policy()
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

    monkeypatch.setattr(transformers_policy, "load_options", lambda *_: [Beside(settings())])
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
    # In another order the compiler would try layers without the adapters and kernels that are trained.
    assert names(lora={}, liger="on", compile=True) == ["Adapters", "LigerKernels", "Compiler"]


def test_copies_of_the_model_have_no_hooks_of_its_routers() -> None:
    model = make_model("Mixtral", experts_implementation="eager")
    algorithm = {"reference": {"model": "frozen"}, "advantage": "gae", "value": {"model": "own"}}
    policy = make_policy(model=model, replays_routes=True, algorithm=algorithm)
    copies = (option_of(policy, ReferenceModel)._model, option_of(policy, Critic).model)

    def num_hooked(routed: Any) -> int:
        return sum(bool(router._forward_hooks) for _, router in find_routers(routed))

    assert num_hooked(model) == len(find_routers(model)) > 0
    assert [num_hooked(of_option) for of_option in copies] == [0, 0]


def test_the_import_contract_names_each_file_of_the_policy_on_one_side() -> None:
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [item for item in contracts if "imports no option" in item["name"]]
    prefix = "tidemill.services.trainer.policy."
    core = {name.removeprefix(prefix) for name in contract["source_modules"] if name.startswith(prefix)}
    options = {name.removeprefix(prefix) for name in contract["forbidden_modules"]}
    assert options >= {row.implementation.partition(":")[0] for row in OPTIONS.values()}
    files = {path.stem for path in (REPO / "services/trainer/policy").iterdir()}
    # `loading` chooses among policies; `memory` estimates for the console.
    assert core | options == files - {"__init__", "__pycache__", "loading", "memory", "simulated_policy"}
    assert not core & options
