"""`tidemill check` plays a session with a script in place of the model."""

import pytest

from tests.support.environments import THIS
from tests.support.preloaded import REPO
from tidemill.common.config import RunConfig, load_config
from tidemill.common.data.dataset import Row
from tidemill.common.errors import ConfigError
from tidemill.common.process.checks import check_environment

ROW = Row("guess", "guess", "4", {}, 0, "train.jsonl line 1")


def config_with(**section: object) -> RunConfig:
    tree = load_config(REPO / "examples" / "guess" / "config.yaml").model_dump(mode="json")
    tree["rollout"]["environment"] = section
    tree["reward"]["rewards"] = {"x": {"function": "exact_match"}}
    return RunConfig.model_validate(tree)


def test_what_was_called_and_answered_is_told() -> None:
    lines = check_environment(config_with(use="tools", tools=[f"{THIS}:multiply"]), ROW)
    assert lines[0] == "tools: 2 turns of a script, ended done, no reward"
    assert lines[1:] == ['called multiply({"a": 1, "b": 1})', "answered 1"]


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (f"{THIS}:NoStep", "expected step\\(self, text\\)"),
        (f"{THIS}:Skyrl", "played with the first training row .* raised AttributeError: hint"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(use: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_environment(config_with(use=use), ROW)


def test_an_agents_file_whose_clients_are_made_at_its_top_can_be_loaded_without_a_key() -> None:
    name = "tests.support.module_level_agent:with_clients_of_the_module"
    assert check_environment(config_with(use="agent", agent=name), ROW) == []
