"""The reward service as processes: scores flow, stopping loses nothing, dying loses nothing."""

import signal
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.support.rewards import num_pending
from tests.support.runs import ServiceRun
from tests.support.training import messages
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import has_ended, wait_until
from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError, ConfigErrors
from tidemill.common.process.checks import check_reward
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.streams import append
from tidemill.common.wire.messages import DeadLetter, Score, ScoreStatus


def run_of(
    folder: Path, source: str, lease_s: float = 30.0, most_deliveries: int = 5, **reward: Any
) -> ServiceRun:
    """A run whose reward is the function of this source."""
    path = folder / "reward.py"
    path.write_text(dedent(source))
    section = {"function": f"{path}:compute_score", "backoff_s": 0.01} | reward
    streams = {"lease_s": lease_s, "max_attempts": most_deliveries}
    return ServiceRun(folder, make_config(run_id="test", reward=section, streams=streams))


async def put(run: ServiceRun, *texts: str, first: int = 0, **fields: Any) -> None:
    samples = [make_trajectory(first + number, text=text, **fields) for number, text in enumerate(texts)]
    await append(run.broker, run.keys.trajectories(), *samples)


async def scores(run: ServiceRun, count: int = 0) -> list[Score]:
    """All scores, once there are `count`."""

    async def found() -> list[Score] | None:
        published = await messages(run.broker, run.keys.scores(), Score)
        return published if len(published) >= count else None

    return await wait_until(found) or []


ASYNC = """
    import asyncio
    from pathlib import Path

    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str != "held":
            await asyncio.sleep(float(solution_str))
            return {"score": 1.0, "slept": float(solution_str)}
        while not Path(ground_truth).exists():
            await asyncio.sleep(0.01)
        return {"score": 1.0, "slept": 0.0}
"""

PLAIN = """
    import os
    from pathlib import Path

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        Path(ground_truth).write_text(str(os.getpid()))
        while True:
            pass
"""


async def test_a_worker_finds_the_redis_that_up_keeps_for_the_run(tmp_path: Path) -> None:
    """Beside a plain `tidemill up`: the environment has no address, the run's folder has it."""
    async with run_of(tmp_path, ASYNC) as run:
        run.variables["reward"] = {"TIDEMILL_REDIS_URL": ""}
        run.start("reward", "early")
        assert await run.wait("early") == 2
        address_file = run.run_dir / "redis.url"
        refusal = run.log_of("early")
        assert "TIDEMILL_REDIS_URL is not set" in refusal and str(address_file) in refusal

        address_file.parent.mkdir(exist_ok=True)
        address_file.write_text(run.url)
        await put(run, *["0.01"] * 5)
        run.start("reward", "guest")
        assert len(await scores(run, 5)) == 5
        await run.stop_all("guest")


async def test_scores_flow_and_sigterm_drains(tmp_path: Path) -> None:
    async with run_of(tmp_path, ASYNC) as run:
        await put(run, *["0.01"] * 50)
        run.start("reward", "w1")
        await scores(run, 50)
        (beat,) = await wait_until(lambda: read_heartbeats(run.broker, run.keys))
        assert (beat.name, beat.role) == ("w1", "reward")

        gate = tmp_path / "gate"
        await put(run, *["held"] * 10, first=50, ground_truth=str(gate))

        async def are_held() -> bool:
            return await num_pending(run.broker, run.keys) == 10

        await wait_until(are_held)
        run.processes["w1"].terminate()
        await wait_until(lambda: "draining" in run.log_of("w1"))
        gate.touch()
        assert await run.wait("w1") == 0, run.log_of("w1")
        published = await scores(run)
        assert sorted(score.key for score in published) == [(t, 0) for t in range(60)]
        assert {score.components["slept"] for score in published} == {0.01, 0.0}
        assert await num_pending(run.broker, run.keys) == 0
        assert await read_heartbeats(run.broker, run.keys) == []


async def test_a_store_of_payloads_that_cannot_be_opened_ends_the_service_before_it_takes_anything(tmp_path):
    run = run_of(tmp_path, ASYNC)
    tree = run.config.model_dump(mode="json")
    tree["streams"] |= {"claim_check_url": "az://container/folder", "claim_check_bytes": 1000}  # no account
    async with ServiceRun(tmp_path, RunConfig.model_validate(tree)) as run:
        await put(run, "0.01")
        run.start("reward")
        assert await run.wait("reward") == 2
        assert "streams.claim_check_url is az://container/folder" in run.log_of("reward")
        assert await run.broker.execute("XINFO", "GROUPS", run.keys.trajectories()) == []


async def test_a_killed_worker_leaves_no_process_behind(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with run_of(tmp_path, PLAIN, timeout_s=3600.0) as run:
        await put(run, "hang", ground_truth=str(file))
        run.start("reward")
        pid = await wait_until(lambda: file.exists() and int(file.read_text() or 0))
        run.kill("reward")
        await wait_until(lambda: has_ended(pid))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; print('x'); os._exit(3)", "its import ended Python"),
        ("import os; os._exit(2)", "its import ended Python"),
        ("import os; os._exit(0)", "its import ended Python"),
    ],
)
async def test_a_bad_function_ends_the_service_with_2_and_is_found_by_the_check(tmp_path, source, expected):
    run = run_of(tmp_path, source)
    with pytest.raises(ConfigError) as caught:
        check_reward(run.config)
    assert expected in str(caught.value) and "reward.py:compute_score" in str(caught.value)

    if expected == "SystemExit":  # the hardest to turn into an exit code of ours
        async with run:
            run.start("reward")
            assert await run.wait("reward") == 2
        said = run.log_of("reward")
        assert "Traceback" not in said and expected in said and "reward.py:compute_score" in said


FINE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0"


@pytest.mark.parametrize("end", ["", "atexit.register(lambda: print('bye', file=sys.stderr))"])
def test_what_a_function_prints_hides_neither_the_answer_of_a_check_nor_a_mistake(tmp_path, end):
    begin = f"import atexit, sys; print('begun', end=''); print('begun', end='', file=sys.stderr); {end}"
    assert isinstance(check_reward(run_of(tmp_path, f"{begin}\n{FINE}").config), dict)

    with pytest.raises(ConfigError) as caught:
        check_reward(run_of(tmp_path, begin).config)
    assert str(caught.value).startswith("reward.function") and "has no" in str(caught.value)

    path = tmp_path / "reward.py"
    named = {"one": {"function": f"{path}:one"}, "two": {"function": f"{path}:two"}}
    with pytest.raises(ConfigErrors) as several:
        check_reward(make_config(run_id="test", reward={"rewards": named}))
    assert len(several.value.problems) == 2


async def test_a_reward_that_blocks_in_async_def_costs_no_lease_and_is_named(tmp_path: Path) -> None:
    source = """
        import time

        async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            time.sleep(0.2)  # as requests.post does
            return 1.0
    """
    async with run_of(tmp_path, source, lease_s=1.0) as run:
        await put(run, *[""] * 80)
        for name in ("w1", "w2"):
            run.start("reward", name)

        async def is_named() -> bool:
            said = [beat.detail for beat in await read_heartbeats(run.broker, run.keys)]
            return any("blocks its event loop" in line and "reward.py, line 5" in line for line in said)

        await wait_until(is_named)
        assert {score.status for score in await scores(run, 80)} == {ScoreStatus.OK}
        assert await run.broker.execute("XLEN", run.keys.dead) == 0
        await run.stop_all("w1", "w2")
    logs = run.log_of("w1") + run.log_of("w2")
    assert "blocks its event loop" in logs and "lease lost" not in logs


async def test_of_forty_samples_that_die_with_their_worker_only_the_one_to_blame_is_dead_lettered(tmp_path):
    source = """
        import os, signal, time

        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            time.sleep(0.1)
            if solution_str == "poison":
                os.kill(os.getppid(), signal.SIGKILL)  # the worker: as running out of memory does
            return 1.0
    """
    # Five lives: two with any others, one with a few, one alone, and one that gives it up. With a shorter
    # lease a worker that waits for a core would look silent.
    async with run_of(tmp_path, source, lease_s=1.0, most_deliveries=4, processes=1, max_in_flight=40) as run:
        await put(run, *("poison" if ticket == 17 else "fine" for ticket in range(40)))
        for life in range(5):
            worker = run.start("reward", f"w{life}")

            async def is_over(worker: Any = worker) -> bool:
                return worker.poll() is not None or await run.broker.execute("XLEN", run.keys.dead) > 0

            await wait_until(is_over)
            if worker.poll() is None:
                break
            assert worker.returncode == -signal.SIGKILL
        published = await scores(run, 39)
        assert [letter.ticket for letter in await messages(run.broker, run.keys.dead, DeadLetter)] == [17]
    assert sorted(score.ticket for score in published) == [i for i in range(40) if i != 17]
