"""Trajectories beside the stream, with all services as processes: what a user sees is the same."""

from pathlib import Path

from tests.support.runs import ServiceRun, simulated_config
from tidemill.common.history import History, StreamName
from tidemill.common.streams import read_raw
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Commit, Score, Trajectory


async def test_a_run_whose_trajectories_are_all_claims_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path,
) -> None:
    config = simulated_config(tmp_path, streams__claim_check_bytes=1)
    async with ServiceRun(tmp_path, config) as run:
        run.start_all()
        assert await run.wait("trainer") == 0
        entries = await read_raw(run.broker, run.keys.trajectories(), count=4096)
        claims = [codec.decode(fields, Trajectory).claim for _, fields in entries]
        assert claims and all(claims), "every trajectory went beside the stream"
        history = History(run.keys.run_id, run.run_dir, run.broker)
        commits = [commit async for commit in history.messages(StreamName.COMMITS, Commit)]
        trained = [key for commit in commits for key in commit.trained_keys]
        size = config.trainer.steps * config.trainer.groups_per_step * config.trainer.group_size
        assert len(trained) == len(set(trained)) == size
        samples = [sample async for sample in history.messages(StreamName.TRAJECTORIES, Trajectory)]
        assert {*trained} <= {sample.key for sample in samples if sample.num_tokens and not sample.fault}
        scores = [score async for score in history.messages(StreamName.SCORES, Score)]
        assert all(not score.error for score in scores)
