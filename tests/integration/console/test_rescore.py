"""Recorded trajectories through a real reward service again."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.letters import make_ticket
from tests.support.recorded import record, tidemill
from tests.support.recorded_sessions import MESSAGES, as_session
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.wire.messages import Score, ScoreStatus, Ticket

NUM_TICKETS = 12
GROUP_SIZE = 4
REWARD = """
def longest(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))


def broken(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str.endswith("3"):
        raise ValueError("cannot score a three")
    return 1.0


def wrong(data_source, solution_str, ground_truth, extra_info=None):
    return {}["missing"]
"""


CALLS = """
def calculator(expression: str) -> str:
    '''
    Compute.

    Args:
        expression: what to compute
    '''
    return str(eval(expression))


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 100.0 * extra_info["num_turns"] + len(extra_info["messages"])
"""


def recorded_ticket(ticket: int) -> Ticket:
    """Four to a step."""
    return make_ticket(ticket, step=ticket // 4, group_size=GROUP_SIZE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one: step s has tickets 4s to 4s + 3; recorded rewards are the index."""
    runs = tmp_path_factory.mktemp("runs")
    (runs / "mine.py").write_text(REWARD)
    config = make_config(run_id="base", reward={"workers": 0, "max_attempts": 1}, streams={"lease_s": 60.0})
    tickets = []
    trajectories = []
    scores = []
    for ticket in range(NUM_TICKETS):
        tickets.append(recorded_ticket(ticket))
        for index in range(GROUP_SIZE):
            # Longer is better in all groups but that of ticket 5, where the reward turns everything around.
            text = "x" * (9 - index if ticket == 5 else index) + str(index)
            trajectory = make_trajectory(ticket, index, text, group_size=GROUP_SIZE, step=ticket // 4)
            trajectories.append(trajectory)
            scores.append(
                Score(ticket=ticket, index=index, status=ScoreStatus.OK, value=float(index), worker="then")
            )
    asyncio.run(record(runs, config, tickets, trajectories, scores))
    return runs


def fingerprint(folder: Path) -> dict[str, bytes]:
    """All that a run's folder holds, but for the log of whoever served its data."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "redis.log"
    }


def test_another_reward_is_held_against_the_recorded_one_and_the_run_is_as_it_was(runs: Path) -> None:
    before = fingerprint(runs / "base")
    done = tidemill(runs, "rescore", "base", "--reward", f"{runs / 'mine.py'}:longest", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    agreement = report["agreement"]
    assert (agreement["compared"], agreement["groups"]) == (NUM_TICKETS * GROUP_SIZE, NUM_TICKETS)
    assert agreement["groups_with_another_best"] == [5]
    assert agreement["spearman_within_groups"] == pytest.approx((NUM_TICKETS - 1 - 1) / NUM_TICKETS)
    assert report["cost"]["trajectories"] == NUM_TICKETS * GROUP_SIZE
    assert json.loads((runs / report["sandbox"] / "rescore.json").read_text()) == report
    assert fingerprint(runs / "base") == before
    output = tidemill(runs, "streams", "show", "scores", "5.0", "--run", report["sandbox"], "--json")
    assert output.returncode == 0 and '"value": 10.0' in output.stdout, output.stdout + output.stderr


def test_a_stretch_of_steps_a_failing_reward_and_a_name_for_the_sandbox(runs: Path) -> None:
    settings = [
        "--reward",
        f"{runs / 'mine.py'}:broken",
        *["--from-step", "1", "--to-step", "1", "--into", "second"],
    ]
    done = tidemill(runs, "rescore", "base", *settings)
    assert done.returncode == 0, done.stderr
    assert "12 trajectories in 4 groups" in done.stdout
    assert "0 before, 4 now" in done.stdout
    assert "cannot score a three" in done.stdout
    again = tidemill(runs, "rescore", "base", *settings)
    assert again.returncode == 2 and "second is there already" in again.stderr


def test_code_that_always_fails_ends_the_scoring_with_its_reason(runs: Path, tmp_path: Path) -> None:
    config = make_config(run_id="more", reward={"workers": 0}, streams={"lease_s": 60.0})
    numbers = range(200)
    tickets = [make_ticket(number, step=0, group_size=1) for number in numbers]
    samples = [make_trajectory(number, 0, group_size=1, step=0) for number in numbers]
    asyncio.run(record(tmp_path, config, tickets, samples, []))
    done = tidemill(tmp_path, "rescore", "more", "--reward", f"{runs / 'mine.py'}:wrong")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "KeyError: 'missing' (mine.py, line 13)" in done.stderr and "then score again" in done.stderr
    assert "compared" not in done.stdout


def test_sessions_are_rescored_from_their_conversation_and_from_what_their_environment_gave(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    config = make_config(
        run_id="sessions",
        rollout={"environment": {"use": "tools", "tools": [f"{tmp_path / 'calls.py'}:calculator"]}},
        reward={"workers": 1, "rewards": {"game": {"environment": True}}},
    )
    tickets = [recorded_ticket(number) for number in range(2)]
    samples = [
        as_session(
            make_trajectory(ticket, index, group_size=GROUP_SIZE, step=0), reward=0.1 + index, messages=said
        )
        for ticket in range(2)
        for index, said in enumerate((MESSAGES[:1], MESSAGES[:3], MESSAGES, MESSAGES[:2]))
    ]
    scores = [
        Score(
            ticket=sample.ticket,
            index=sample.index,
            status=ScoreStatus.OK,
            value=0.1 + sample.index,
            worker="then",
        )
        for sample in samples
    ]
    asyncio.run(record(tmp_path, config, tickets, samples, scores))
    again = tidemill(tmp_path, "rescore", "sessions", "--json")
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    assert report["agreement"]["compared"] == len(samples)
    assert report["agreement"]["spearman_within_groups"] == pytest.approx(1.0)
    second_output = tidemill(
        tmp_path, "rescore", "sessions", "--reward", f"{tmp_path / 'calls.py'}:compute_score", "--json"
    )
    assert second_output.returncode == 0, second_output.stderr
    report = json.loads(second_output.stdout)
    assert report["agreement"]["groups_with_another_best"] == [0, 1]
    output = tidemill(tmp_path, "streams", "show", "scores", "1.2", "--run", report["sandbox"], "--json")
    assert '"value": 306.0' in output.stdout, output.stdout  # 3 turns, a prompt and 5 messages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rescore", "base", "--reward", "nowhere.py:fn"), "nowhere.py"),
        (("rescore", "base", "--from-step", "9"), "no train trajectories in that stretch"),
        (("rescore", "base", "--from-step", "2", "--to-step", "1"), "--from-step 2 is after --to-step 1"),
        (("rescore", "nobody"), "nobody"),
        (("rescore", "base", "--into", "a b"), "--into"),
    ],
)
def test_a_mistake_is_told_in_plain_words(runs: Path, arguments: tuple[str, ...], message: str) -> None:
    done = tidemill(runs, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
