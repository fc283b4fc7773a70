"""Reward workers killed while they finish a group: every score once, and nothing is paid for twice."""

from pathlib import Path
from textwrap import dedent
from typing import Any

from tests.support.runs import ServiceRun
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.streams import Entry, append, group_status, read_range
from tidemill.common.wire.keys import REWARD_GROUP
from tidemill.common.wire.messages import Score

NUM_GROUPS, SIZE = 6, 4
SOURCE = """
    import os, time
    from pathlib import Path
    FOLDER = Path({folder!r})

    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        with open(FOLDER / "calls", "a") as calls:
            calls.write(solution_str + "\\n")
        return float(solution_str)

    async def post_process(scores, samples):
        with open(FOLDER / "begun", "a") as begun:
            begun.write(f"{{samples[0]['extra_info'].get('group')}} {{os.getpid()}}\\n")
        if (FOLDER / "stuck").exists():
            time.sleep(3600)  # holds up the whole worker, heartbeats and leases too
        return [score - min(scores) for score in scores]
"""


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


async def _scores(run: ServiceRun) -> list[Score]:
    entries = await read_range(run.broker, run.keys.scores(), Score)
    return [entry.message for entry in entries if isinstance(entry, Entry)]


async def test_a_worker_killed_inside_the_group_function_is_replaced_and_no_score_is_lost_or_doubled(
    tmp_path: Path,
) -> None:
    (tmp_path / "rewards.py").write_text(dedent(SOURCE).format(folder=str(tmp_path)))
    (tmp_path / "stuck").touch()
    functions: Any = {name: f"{tmp_path}/rewards.py:{name}" for name in ("compute_score", "post_process")}
    reward = {"function": functions["compute_score"], "group": functions["post_process"], "timeout_s": 3000}
    config = make_config(run_id="test", reward=reward, streams={"lease_s": 1.0})
    wanted = [(ticket, index) for ticket in range(NUM_GROUPS) for index in range(SIZE)]
    async with ServiceRun(tmp_path, config) as run:
        await append(
            run.broker,
            run.keys.trajectories(),
            *[
                make_trajectory(t, i, text=str(t * 10 + i), group_size=SIZE, extra={"group": t})
                for t, i in wanted
            ],
        )
        for victim in ("first", "second"):  # the second takes over what the first held, and dies with it too
            seen = len(_lines(tmp_path / "begun"))
            run.start("reward", victim)
            await wait_until(lambda seen=seen: len(_lines(tmp_path / "begun")) > seen)
            run.kill(victim)
        assert await _scores(run) == []
        (tmp_path / "stuck").unlink()
        run.start("reward", "last")
        await wait_until(lambda: _has(run, len(wanted)))
        assert await run.stop("last") == 0
        made = await _scores(run)
        assert sorted(score.key for score in made) == wanted
        assert {score.key: score.value for score in made} == {key: float(key[1]) for key in wanted}
        status = await group_status(run.broker, run.keys.trajectories(), REWARD_GROUP)
        assert status is not None and status.pending == 0
    # The group that was in the middle of it was begun once by each, and none of its samples scored again.
    assert len(_lines(tmp_path / "begun")) >= NUM_GROUPS + 2
    first_group = _lines(tmp_path / "begun")[0].split()[0]
    calls = _lines(tmp_path / "calls")
    assert [calls.count(str(int(first_group) * 10 + i)) for i in range(SIZE)] == [1] * SIZE


async def _has(run: ServiceRun, count: int) -> bool:
    return len(await _scores(run)) >= count
