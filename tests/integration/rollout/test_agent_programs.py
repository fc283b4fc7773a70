"""Programs that only know an address and a key, played as sessions: functions, and commands."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
from structlog.testing import capture_logs

from tests.support.scripted_model import ScriptedModel, make_ticket
from tests.support.scripted_model import agent_player as player
from tests.support.waiting import has_ended, wait_until
from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.environments.agent import SESSION, WORKER, end_leftovers

TICKET = make_ticket()


def function(name: str) -> str:
    return f"tests.support.agents:{name}"


Children = Callable[[], list[psutil.Process]]


@pytest.fixture
def children() -> Children:
    """Those of this process that the test has started, and not the server that forks services."""
    older = set(psutil.Process().children(recursive=True))
    return lambda: [child for child in psutil.Process().children(recursive=True) if child not in older]


CLAIMING = """
import http.client, os, pathlib, time
from urllib.parse import urlsplit
import openai, psutil

client = openai.OpenAI()
folder = pathlib.Path(__file__).parent


def ask(prompt):
    return client.completions.create(model="m", prompt=prompt).choices[0].text


def until(name):
    while not (folder / name).exists():
        time.sleep(0.02)


def play(row, base_url, api_key):
    if row["prompt"] == "honest":
        first = ask("x")
        (folder / "pid").write_text(str(os.getpid()))
        os.replace(folder / "pid", folder / "asked")
        until("claimed")
        return float([first, ask("y")] == ["first", "second"])
    gateway = urlsplit(base_url)
    until("asked")
    pid = int((folder / "asked").read_text())
    connections = psutil.Process(pid).net_connections("tcp")
    (port,) = {c.laddr.port for c in connections if c.raddr and c.raddr.port == gateway.port}
    statuses = []
    for holder in (os.getpid(), pid):
        asking = http.client.HTTPConnection(gateway.hostname, gateway.port)
        path = f"{gateway.path.removesuffix('/v1')}/processes/{holder}/connections/{port}"
        asking.request("POST", path, headers={"x-api-key": api_key})
        statuses.append(asking.getresponse().status)
    (folder / "claimed").touch()
    metrics = {"num_claims": len(statuses), "num_taken": statuses.count(200)}
    return {"reward": float(ask("z") == "mine"), "metrics": metrics}
"""


async def test_a_plain_function_gives_its_reward_and_all_that_it_heard_is_kept() -> None:
    async with player(function("twice")) as agent:
        models = [ScriptedModel("2", "yes"), ScriptedModel("2", "no")]
        played = await asyncio.gather(*(agent.play(TICKET, f"s{i}", m.ask) for i, m in enumerate(models)))
        assert [trajectory.session.reward for trajectory in played] == [1.0, 0.0]
        assert played[0].session.metrics == {"asked": 2.0} and played[0].session.histories == {"clean": 1}
        assert played[0].first.prompt_ids.tolist() == models[0].seen[0]
        said = [message["content"] for message in played[0].session.messages]
        assert said == ["2", "Sure?", "yes"] and played[0].finish == "stop"


async def test_clients_made_as_the_file_is_imported_ask_their_own_session(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own, for a provider")
    async with player("tests.support.module_level_agent:with_clients_of_the_module") as agent:
        models = [ScriptedModel(*"abcd"), ScriptedModel(*"abcx")]
        played = await asyncio.gather(*(agent.play(TICKET, f"s{i}", m.ask) for i, m in enumerate(models)))
        assert [trajectory.session.reward for trajectory in played] == [1.0, 0.0]
        assert [len(model.seen) for model in models] == [4, 4]


async def test_a_program_cannot_claim_the_connection_of_another_session(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(CLAIMING)
    async with player(f"{program}:play", call_timeout_s=60.0) as agent:
        honest = ScriptedModel("first", "second")
        claiming = ScriptedModel("mine")
        tickets = [make_ticket("honest"), make_ticket("claiming")]
        models = [honest, claiming]
        plays = [agent.play(t, t.prompt_text, m.ask) for t, m in zip(tickets, models, strict=True)]
        played = await asyncio.gather(*plays)
    assert [trajectory.session.reward for trajectory in played] == [1.0, 1.0], "each heard its own model only"
    assert [len(model.seen) for model in models] == [2, 1]
    assert played[1].session.metrics == {"num_claims": 2.0, "num_taken": 0.0}


async def test_an_async_function_with_anthropics_client_may_give_a_number() -> None:
    async with player(function("with_anthropic")) as agent:
        played = await agent.play(TICKET, "s", ScriptedModel("four").ask)
        assert played.session.reward == 4.0


async def test_a_command_reads_its_row_and_its_last_line_is_the_result(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys, openai\n"
        "row = json.load(sys.stdin)\n"
        "assert row == json.loads(os.environ['TIDEMILL_ROW'])\n"
        "assert os.environ['OPENAI_AGENTS_DISABLE_TRACING'] == '1'\n"
        "assert os.environ['LITELLM_LOCAL_MODEL_COST_MAP'] == 'True'\n"
        "assert os.environ['DSPY_CACHE_LIMIT'] == '0'\n"
        "assert os.environ['MSWEA_COST_TRACKING'] == 'ignore_errors'\n"
        "assert os.environ['MSWEA_SILENT_STARTUP'] == '1'\n"
        "assert os.environ['CREWAI_DISABLE_TELEMETRY'] == 'true'\n"
        "assert os.environ['HAYSTACK_TELEMETRY_ENABLED'] == 'false'\n"
        "assert os.environ['AGNO_TELEMETRY'] == 'false'\n"
        "assert os.environ['CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC'] == '1'\n"
        "said = openai.OpenAI().responses.create(model='m', input=row['prompt']).output_text\n"
        "print('working')\n"
        "print(json.dumps({'reward': len(said), 'metrics': {'n': 1}}))\n"
    )
    async with player(f"$ {sys.executable} {script}") as agent:
        played = await agent.play(TICKET, "s", ScriptedModel("two").ask)
        assert played.session.reward == 3.0 and played.session.metrics == {"n": 1.0}


TRUNCATED: dict[str, Any] = {"on_program_error": "truncated"}
VALUE: dict[str, Any] = {"on_program_error": -1.0}
SILENT = "neither asked the model nor ended"


@pytest.mark.parametrize(
    ("agent", "section", "words"),
    [
        (function("raising"), {}, "LookupError: the page is gone"),
        (function("raising"), TRUNCATED, "LookupError"),
        (function("raising_once_answered"), {}, ""),
        (function("raising_of_the_machine"), TRUNCATED, ""),
        (function("dying"), {}, "without a result"),
        (function("idle"), {}, "without an answer of the model"),
        (function("wordy"), {}, "expected a finite number"),
        (function("endless"), {"call_timeout_s": 2.0, "late": "fault"}, SILENT),
        ("$ echo ready; echo no browser >&2; exit 7", {}, "exit code 7: no browser"),
    ],
)
async def test_a_program_that_fails_is_a_fault_in_every_attempt_and_never_a_reward(agent, section, words):
    """Those of the machine, and those that say nothing of the model, whatever the config says."""
    async with player(agent, attempts=2, **section) as played:
        with pytest.raises(EnvironmentFaultError, match=words or None):
            await played.play(TICKET, "s", ScriptedModel("a", "b").ask)


COMMAND = (
    "import json, openai; json.loads(openai.OpenAI().responses.create(model='m', input='x').output_text)"
)


@pytest.mark.parametrize(
    ("agent", "policy", "reward"),
    [
        (function("raising_as_frameworks_do"), {}, None),
        (f'$ {sys.executable} -c "{COMMAND}"', {}, None),  # its traceback says so
        (function("raising_as_frameworks_do"), VALUE, -1.0),
        (function("raising_once_answered"), TRUNCATED, None),
        (function("exiting_once_answered"), TRUNCATED, None),
    ],
)
async def test_a_program_that_raises_because_the_model_was_wrong_is_played_once(agent, policy, reward):
    async with player(agent, attempts=2, **policy) as started:
        played = await started.play(TICKET, "s", ScriptedModel("nonsense").ask)
        assert played.session.reward == reward and played.finish == ("length" if reward is None else "stop")
        assert played.session.metrics == {"program_error": 1.0} and played.session.num_faults == 0


@pytest.mark.parametrize(("policy", "reward"), [({}, None), (VALUE, -1.0)])
async def test_an_error_after_a_limit_is_in_the_log(policy: dict[str, Any], reward: float | None) -> None:
    async with player(function("for_ever"), max_turns=1, **policy) as agent:
        with structlog.testing.capture_logs() as logs:
            played = await agent.play(TICKET, "s", ScriptedModel("a").ask)
    assert (played.session.end, played.session.reward) == ("max_turns", reward)
    assert [entry["end"] for entry in logs if "end" in entry] == ["max_turns"]


async def test_a_limit_that_one_branch_met_is_no_fault_where_another_one_went_on() -> None:
    async with player(function("branching")) as agent:
        played = await agent.play(TICKET, "s", ScriptedModel("a").ask)
    assert (played.session.end, played.session.num_faults) == ("max_tokens", 0)


async def test_a_program_that_says_nothing_is_a_fault_and_is_killed(children: Children) -> None:
    async with player("$ sleep 3600 & sleep 3600", call_timeout_s=0.3) as agent:
        idle = len(children())
        with pytest.raises(EnvironmentFaultError, match=SILENT):
            await agent.play(TICKET, "s", ScriptedModel().ask)
        await wait_until(lambda: len(children()) == idle)


async def test_a_session_over_its_time_is_truncated_and_keeps_what_was_said() -> None:
    model = ScriptedModel("a")

    async def ask(ids: Any, sampling: SamplingParams) -> Any:
        return await (model.ask(ids, sampling) if model.lines else asyncio.Event().wait())

    async with player(function("asking_and_working"), session_timeout_s=10.0) as agent:
        played = await agent.play(TICKET, "s", ask)
        assert played.session.end == "timeout" and len(played.session.turns) == 1
        assert played.session.late == "session"


@pytest.mark.parametrize(("name", "section"), [("for_ever", {"session_timeout_s": 15.0}), ("impatient", {})])
async def test_time_that_a_hung_engine_took_is_a_fault_whoever_measured_it(name, section):
    model = ScriptedModel("a")

    async def ask(ids: Any, sampling: SamplingParams) -> Any:
        return await (model.ask(ids, sampling) if model.lines else asyncio.Event().wait())

    async with player(function(name), **section) as agent:
        with pytest.raises(EnvironmentFaultError, match="the engine was slow"):
            await agent.play(TICKET, "s", ask)


async def test_a_program_that_says_that_its_time_was_over_is_truncated_with_its_reward() -> None:
    async with player(function("late_by_itself")) as agent:
        played = await agent.play(TICKET, "s", ScriptedModel("a").ask)
    assert (played.session.end, played.session.late, played.session.reward) == ("timeout", "program", 0.25)


@pytest.mark.parametrize(("policy", "reward"), [({}, None), (VALUE, -1.0)])
async def test_a_program_without_an_end_is_truncated_and_costs_what_the_config_says(policy, reward):
    async with player(function("endless"), call_timeout_s=2.0, **policy) as agent:
        played = await agent.play(TICKET, "s", ScriptedModel("while True: pass").ask)
        assert (played.session.end, played.finish, played.session.num_faults) == ("timeout", "length", 0)
        assert (played.session.reward, played.session.late) == (reward, "program")


async def test_what_the_engine_raises_is_no_fault_of_the_program() -> None:
    async def ask(ids: Any, sampling: SamplingParams) -> Any:
        raise LookupError("the engine is gone")

    async with player(function("for_ever")) as agent:
        with pytest.raises(LookupError, match="the engine is gone"):
            await agent.play(TICKET, "s", ask)


@pytest.mark.parametrize("agent", [function("dying"), function("twice"), "$ exit 3", "$ echo {}"])
async def test_a_group_is_killed_while_its_number_is_still_its_own(agent, monkeypatch, children):
    killed = []
    kill = os.killpg

    def noting(group: int, number: int) -> None:
        killed.append(psutil.pid_exists(group))
        kill(group, number)

    async with player(agent) as started:
        with monkeypatch.context() as patched:
            patched.setattr(os, "killpg", noting)
            with contextlib.suppress(EnvironmentFaultError):
                await started.play(TICKET, "s", ScriptedModel("2", "yes").ask)
    assert killed == [True]
    await wait_until(lambda: not children())


@pytest.mark.parametrize("agent", [function("silent"), "$ sleep 3600"])
async def test_a_play_that_is_broken_off_leaves_no_process(agent: str, children: Children) -> None:
    async with player(agent) as started:
        idle = len(children())
        playing = asyncio.create_task(started.play(TICKET, "s", ScriptedModel().ask))
        await wait_until(lambda: len(children()) > idle)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await wait_until(lambda: len(children()) == idle)
    await wait_until(lambda: not children())


async def test_a_host_of_functions_that_was_killed_is_started_again(children: Children) -> None:
    async with player(function("twice"), attempts=2) as agent:
        (host,) = children()
        host.kill()
        with capture_logs() as logs:
            played = await agent.play(TICKET, "s", ScriptedModel("2", "yes", "2", "yes").ask)
        assert played.session.reward == 1.0
    # Or the session has found it dead, and says so itself.
    assert any("died" in line["event"] or "ended without" in line.get("error", "") for line in logs)


async def test_why_a_host_has_died_is_known_when_its_death_is_logged() -> None:
    async with player(function("twice")) as agent:
        # As after the loss of its socket: it is dead, and nobody has waited for its exit code yet.
        agent._program._host.kill()
        with capture_logs() as logs:
            await agent.play(TICKET, "s", ScriptedModel("2", "yes").ask)
    (reason,) = [line["reason"] for line in logs if "died" in line["event"]]
    assert "SIGKILL" in reason


async def test_what_a_dead_worker_left_is_killed_and_what_a_living_one_runs_is_not() -> None:
    def sleeper(worker: str) -> Any:
        return asyncio.create_subprocess_exec("sleep", "3600", env={SESSION: "s", WORKER: worker})

    me = psutil.Process()
    sleeping = await sleeper("999999:1.00")
    kept = await sleeper(f"{me.pid}:{me.create_time():.2f}")
    try:
        assert end_leftovers({"s"}) == 1
        assert await sleeping.wait() == -9 and kept.returncode is None
        assert end_leftovers({"another"}) == 1
        assert await kept.wait() == -9
    finally:
        with contextlib.suppress(ProcessLookupError):
            kept.kill()


async def test_no_more_commands_start_at_once_than_there_are_cores(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    script = tmp_path / "agent.py"
    script.write_text(
        "import os, pathlib, openai\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "mine = folder / f'{os.getpid()}.starting'\n"
        "mine.touch()\n"
        "print('{\"reward\": %d}' % len(list(folder.glob('*.starting'))), flush=True)\n"
        "client = openai.OpenAI()\n"
        "mine.unlink()\n"
        "client.completions.create(model='m', prompt='x')\n"
    )
    async with player(f"$ {sys.executable} {script}") as agent:
        plays = [agent.play(TICKET, f"s{number}", ScriptedModel("a").ask) for number in range(3)]
        assert [trajectory.session.reward for trajectory in await asyncio.gather(*plays)] == [1.0, 1.0, 1.0]


async def test_a_program_that_left_its_group_does_not_outlive_its_session_for_long(monkeypatch, tmp_path):
    monkeypatch.setattr("tidemill.services.rollout.environments.agent.SWEEP_S", 0.1)
    started = tmp_path / "pid"
    command = f"$ setsid sh -c 'echo $$ > {started}; exec sleep 3600' >/dev/null 2>&1 & exec sleep 3600"
    async with player(command) as agent:
        playing = asyncio.create_task(agent.play(TICKET, "s", ScriptedModel().ask))
        await wait_until(lambda: started.exists() and started.read_text().strip())
        program = psutil.Process(int(started.read_text()))
        playing.cancel()
        await asyncio.wait({playing})
        await wait_until(lambda: has_ended(program))


@pytest.mark.parametrize(
    ("agent", "words"),
    [(function("demanding"), "nothing gives browser"), (function("twise"), "did you mean 'twice'")],
)
async def test_a_function_that_cannot_be_called_is_said_before_the_first_session(agent, words):
    with pytest.raises(ConfigError, match=words):
        async with player(agent):
            pass
