"""`tidemill check` plays a session with a script in place of the model."""

from pathlib import Path

import pytest

from tests.support.containers import containers_in
from tests.support.environments import THIS
from tests.support.preloaded import REPO
from tidemill.common.config import RunConfig, load_config
from tidemill.common.data.dataset import Row
from tidemill.common.errors import ConfigError
from tidemill.common.process import checks
from tidemill.common.process.checks import check_environment

forked = pytest.mark.usefixtures("forked_checks")
"""For tests of what a check says; the others have it start as users' does."""
ROW = Row("guess", "guess", "4", {}, 0, "train.jsonl line 1")


def config_with(**section: object) -> RunConfig:
    tree = load_config(REPO / "examples" / "guess" / "config.yaml").model_dump(mode="json")
    tree["rollout"]["environment"] = section
    tree["reward"]["rewards"] = {"x": {"function": "exact_match"}}
    return RunConfig.model_validate(tree)


def test_what_was_called_and_answered_is_told() -> None:
    lines = check_environment(config_with(use="tools", tools=[f"{THIS}:multiply"]), [ROW])
    assert lines[0] == "tools: 2 turns of a script, ended done, no reward"
    assert lines[1:] == ['called multiply({"a": 1, "b": 1})', "answered 1"]


@forked
@pytest.mark.parametrize(
    ("use", "said"),
    [
        (f"{THIS}:NoStep", "expected step\\(self, text\\)"),
        (f"{THIS}:Skyrl", "played with the first training row .* raised AttributeError: hint"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(use: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_environment(config_with(use=use), [ROW])


def test_an_agents_file_whose_clients_are_made_at_its_top_can_be_loaded_without_a_key() -> None:
    name = "tests.support.module_level_agent:with_clients_of_the_module"
    assert check_environment(config_with(use="agent", agent=name), [ROW]) == []


SOLVED = """
import pathlib

pathlib.Path(__file__).with_suffix(".imported").touch()


class Text:
    def reset(self, row):
        self.answer = row["ground_truth"]

    def step(self, text):
        return None, float(text == self.answer), True


class Generous(Text):
    def step(self, text):
        return None, 1.0, True


class Tools:
    def reset(self, **row):
        self.answer = row["ground_truth"]
        self.said = None

    def submit(self, answer: str) -> str:
        \"\"\"
        Submit the answer.

        Args:
            answer: The answer.
        \"\"\"
        self.said = answer
        return "thanks"

    def get_reward(self):
        return float(self.said == self.answer)


def program(row, base_url, api_key, model):
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    submit = {"type": "function", "function": {"name": "submit", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": row["prompt"]}]
    answer = client.chat.completions.create(model=model, messages=messages, tools=[submit])
    calls = answer.choices[0].message.tool_calls or ()
    return float(row["ground_truth"] in "".join(call.function.arguments for call in calls))


def text(row):
    return [row["ground_truth"]]


def call(row):
    return [{"submit": {"answer": "9" if row["ground_truth"] == "7" else row["ground_truth"]}}, "done"]


def number(row):
    return 4


def broken(row):
    return [row["column"]]


def verbose(row):
    raise ValueError("first line\\nlast line")


async def coroutine(row):
    return [row["ground_truth"]]


def arguments(row):
    return [{"submit": {"answer": {4}}}]


def turn(row):
    return [4]


class Killed(Text):
    def reset(self, row):
        import os, signal, subprocess

        label = "tidemill.session=" + row["tidemill_session"]
        subprocess.run(["docker", "run", "-d", "--label", label, "image"], check=True)
        pathlib.Path(__file__).with_suffix(".started").touch()
        os.kill(os.getppid(), signal.SIGKILL)
"""
ROWS = [Row("guess", "guess", truth, {}, 0, f"train.jsonl line {truth}") for truth in "467"]


@pytest.fixture
def solved(tmp_path: Path) -> Path:
    file = tmp_path / "solved.py"
    file.write_text(SOLVED)
    return file


def play_oracle(file: Path, oracle: str, rows: list[Row], **section: object) -> list[str]:
    config = config_with(oracle=f"{file}:{oracle}", **section)
    return check_environment(config, rows, plays_oracle=True)


@forked
@pytest.mark.parametrize("kind", ["Text", "Tools", "agent"])
def test_the_oracle_plays_rows_with_their_solution_and_with_nothing(kind: str, solved: Path) -> None:
    section: dict[str, object] = {"use": f"{solved}:{kind}"}
    if kind == "agent":
        section = {"use": "agent", "agent": f"{solved}:program"}
    oracle = "text" if kind == "Text" else "call"
    lines = play_oracle(solved, oracle, ROWS[:2], **section)
    assert lines == [
        f"rollout.environment.oracle {solved}:{oracle}: 2 rows: the solution got 1, nothing got 0"
    ]


@forked
def test_rows_whose_reward_is_not_that_of_their_solution_are_named(solved: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        play_oracle(solved, "call", ROWS, use=f"{solved}:Tools")
    said = str(refused.value)
    assert said.endswith("call: train.jsonl line 7: the solution got a reward of 0, and has to get 1")
    with pytest.raises(ConfigError, match=r"line 4: nothing got a reward of 1, and has to get 0$"):
        play_oracle(solved, "text", ROWS[:1], use=f"{solved}:Generous")


@forked
@pytest.mark.parametrize(
    ("oracle", "said"),
    [
        ("number", "returned 4; expected a list"),
        ("turn", "returned the turn 4; expected a list"),
        ("coroutine", "returned <coroutine object .*; expected a list"),
        ("arguments", "returned the turn .*, whose arguments JSON cannot have: Object of type set"),
        ("broken", "raised KeyError: 'column'"),
        ("verbose", "raised ValueError: first line last line"),
    ],
)
def test_an_oracle_that_cannot_be_used_is_named_with_its_row(oracle: str, said: str, solved: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"^rollout.environment.oracle .*:{oracle}: train.jsonl line 4: it {said}"
    ):
        play_oracle(solved, oracle, ROWS[:1], use=f"{solved}:Text")


def test_an_oracle_that_hangs_is_named(solved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ORACLE_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match=r"^rollout.environment.oracle .*:text, .* took longer than 0.1 s"):
        play_oracle(solved, "text", ROWS[:1], use=f"{solved}:Text")


def test_what_a_check_that_was_killed_has_started_is_removed(
    solved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with containers_in(tmp_path / "containers", monkeypatch) as containers:
        stays = containers.start(tidemill__session="tidemill-00000000-e-0-0-0-0-0-1")
        with pytest.raises(ConfigError, match=r"rollout.environment.oracle .*:text"):
            play_oracle(solved, "text", ROWS[:1], use=f"{solved}:Killed", containers="docker")
        assert solved.with_suffix(".started").exists()
        assert containers.ids == {stays}


@pytest.mark.parametrize("plays_oracle", [False, True])
def test_without_an_engine_of_containers_nothing_is_started(
    plays_oracle: bool, solved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    config = config_with(use=f"{solved}:Text", oracle=f"{solved}:text", containers="docker")
    with pytest.raises(ConfigError, match="containers docker: no engine of containers answers"):
        check_environment(config, ROWS, plays_oracle)
    assert not solved.with_suffix(".imported").exists()
