"""A worker dies with half-done groups, and a second trainer comes: the run goes on as if they had not."""

from collections import defaultdict
from pathlib import Path

from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import make_plan, messages
from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.streams import group_status
from tidemill.common.wire.messages import Trajectory

SIZE = 4


async def test_who_takes_over_half_done_groups_generates_only_what_is_missing(tmp_path: Path) -> None:
    """No trainer: eight tickets, a worker that is killed half-way, and another one."""
    config = simulated_config(
        tmp_path,
        rollout__simulated={"tokens": 4, "vocab_size": 32, "group_s": 0.4, "jitter": 1.0},
        rollout__max_num_seqs=2,
        streams__lease_s=1.0,
        trainer__max_staleness=1,
    )
    async with ServiceRun(tmp_path, config) as run:
        await _issue_tickets(run)
        run.start("rollout", "first")
        half_done = await wait_until(lambda: _half_done(run))
        run.kill("first")
        before = {sample.key for sample in await messages(run.broker, run.keys.trajectories(), Trajectory)}
        run.start("rollout", "second", "rollout.simulated.group_s=0", "rollout.max_num_seqs=100")
        await wait_until(lambda: _is_all_generated(run, 8 * SIZE))
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        assert await run.stop("second") == 0
        status = await group_status(run.broker, run.keys.prompts(), "rollout")
        assert status is not None
        assert status.pending == 0
    workers: dict[int, set[str]] = defaultdict(set)
    for sample in samples:
        workers[sample.ticket].add(sample.worker)
    assert len({sample.key for sample in samples}) == len(samples) == 8 * SIZE, "nothing twice"
    assert {sample.key for sample in samples if sample.worker == "first"} == before
    assert workers[half_done] == {"first", "second"}, "a half-done group was completed, not begun again"


async def _issue_tickets(run: ServiceRun) -> None:
    from tidemill.services.trainer.batch.scheduler import Scheduler

    scheduler = Scheduler(run.broker, run.keys, run.config, make_plan(run.config), lambda _: None)
    await scheduler.admit(0)


async def _half_done(run: ServiceRun) -> int | None:
    """A ticket that has some but not all of its trajectories; tickets are never 0 here."""
    counts: dict[int, int] = defaultdict(int)
    for sample in await messages(run.broker, run.keys.trajectories(), Trajectory):
        counts[sample.ticket] += 1
    return next((ticket for ticket, count in counts.items() if ticket and count < SIZE), None)


async def _is_all_generated(run: ServiceRun, count: int) -> bool:
    return int(await run.broker.execute("XLEN", run.keys.trajectories())) >= count


async def test_a_second_trainer_with_a_folder_of_its_own_is_refused_and_the_first_goes_on(
    tmp_path: Path,
) -> None:
    async with ServiceRun(tmp_path, simulated_config(tmp_path)) as run:
        run.start("trainer")
        await wait_until(lambda: read_heartbeats(run.broker, run.keys))
        run.variables["trainer"] = {"TIDEMILL_RUNS_DIR": str(tmp_path / "elsewhere")}
        run.start("trainer", "second")
        assert await run.wait("second") == ConfigError.exit_code
        assert "has a trainer already" in run.log_of("second")
        run.start("rollout")
        run.start("reward")
        await run.trained()
