"""A run whose engines record choices trains, archives and replays; only what is missing is not trained."""

import shutil
from typing import Any

import numpy as np
import pytest

from tests.conftest import SERVERS
from tests.support.training import answering_with, commits_of
from tests.support.trajectories import make_trajectory
from tests.support.whole_trainer import GROUPS, crash_after_commit, run
from tidemill.common.archive.archiver import archive_run, check
from tidemill.common.errors import TidemillError
from tidemill.common.history import History, StreamName
from tidemill.common.store import ClaimStore
from tidemill.common.streams import read_raw
from tidemill.common.wire import codec
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.messages import Choices, Ticket, Trajectory
from tidemill.services.trainer.replay.steps import replay_steps

pytestmark = pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)
STEPS = 6


def chosen(ticket: Ticket, index: int, other: int = 30) -> Trajectory:
    ids = np.arange(3, dtype=np.int32) + index
    rows = Rows.of_lists([[token, other + ticket.ticket] for token in ids.tolist()])
    return make_trajectory(
        ticket.ticket,
        index,
        step=ticket.step,
        group_size=ticket.group_size,
        completion_ids=ids,
        spans=((ticket.min_version, 0),),
        choices=Choices(rows={"kept": rows}),
    )


@pytest.mark.parametrize(
    ("least_bytes", "keeps", "lost"), [(0, True, None), (0, False, (3, 1)), (1, True, (3, 1))]
)
async def test_a_run_with_choices_trains_archives_and_replays(
    make, broker, keys, archives_at_once, capfd, least_bytes, keeps, lost
) -> None:
    options: dict[str, Any] = {"trims": True, "archives": True, "keep_checkpoints": 1, "group_size": 3}
    options |= {"reward": {"min_group_size": 2}, "checkpoint_every": 100}
    options |= {"sampling": {"top_k": 2}, "archive": {"keep_choices": keeps}}
    run_dir = make().run_dir
    broker.claims = store = ClaimStore(run_dir, least_bytes)

    def answer(ticket: Ticket, index: int) -> Trajectory:
        # Of a worker that was killed between claim and entry: nobody claims it.
        store.check_in_choices(chosen(ticket, index, other=31))
        sample = store.check_in(store.check_in_choices(chosen(ticket, index)))
        if sample.key == lost:
            (store.folder / sample.choices.claim.pointer).unlink()  # type: ignore[union-attr]
        return sample

    async with answering_with(broker, keys, answer):
        await crash_after_commit(make(**options), 3)
        # What is trimmed is in the archive by now, and its rows there or still in the store.
        await run(make(STEPS, **options))
    told = capfd.readouterr().out
    assert told.count("step replayed, same weights") == 4 and "weights differ" not in told
    commits = await commits_of(broker, keys)
    assert [one for commit in commits for one in commit.dropped] == ([(3, 1, "no_payload")] if lost else [])
    entries = [codec.decode(fields, Trajectory) for _, fields in await read_raw(broker, keys.trajectories())]
    assert entries and not any(entry.choices.rows for entry in entries), "never in Redis"
    claimed = {claim.pointer for entry in entries for claim in entry.claims}
    left = {path.name for path in store.folder.iterdir()}
    first = min(entry.ticket for entry in entries)
    assert {name for name in left if int(name.split("-")[0]) < first} <= claimed, "no others are needed"

    config = make(**options).config
    await archive_run(broker, keys, run_dir, config.streams.archive, is_last=True)
    shutil.rmtree(store.folder)
    archived = History(keys.run_id, run_dir, None)
    samples = [one async for one in archived.messages(StreamName.TRAJECTORIES, Trajectory)]
    assert len(samples) > 4 * GROUPS * 3 and not check(run_dir)
    for sample in samples:
        assert bool(sample.choices.rows) == (keeps and sample.key != lost) and sample.choices.claim
    events: list[dict[str, Any]] = []
    shutil.rmtree(run_dir / "checkpoints")  # from the start, from the archive alone
    if keeps:
        assert await replay_steps(archived, config, run_dir, range(STEPS), events.append)
        assert [event["equal"] for event in events if event["kind"] == "result"] == [True] * STEPS
    else:
        with pytest.raises(TidemillError, match="lost"):
            await replay_steps(archived, config, run_dir, [0], events.append)


async def test_a_sample_without_its_masks_is_left_out_with_a_reason(make, broker, keys) -> None:
    broker.claims = store = ClaimStore(make().run_dir)
    options: dict[str, Any] = {"group_size": 3, "reward": {"min_group_size": 2}, "sampling": {"top_k": 2}}

    def answer(ticket: Ticket, index: int) -> Trajectory:
        sample = chosen(ticket, index)
        bare = sample.model_copy(update={"choices": None})
        return store.check_in_choices(bare if index == 2 else sample)

    async with answering_with(broker, keys, answer):
        await run(make(1, **options))
    (commit,) = await commits_of(broker, keys)
    assert commit.dropped == tuple((ticket, 2, "no_choices") for ticket in commit.groups)
