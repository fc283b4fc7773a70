"""A replay that does not give the committed weights is told of, with how far they are apart."""

import shutil
from itertools import chain
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.support.training import answering, commits_of, make_score
from tests.support.trajectories import make_trajectory
from tests.support.whole_trainer import SIZE, crash_after_commit, run
from tidemill.common.errors import TidemillError
from tidemill.common.streams import read_raw
from tidemill.common.wire import codec
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy

DIFFER = "step replayed, but the weights differ"


async def lines_of_a_replay(make: Any, broker: Any, keys: Any, **trainer: Any) -> list[dict[str, Any]]:
    """Steps 0 to 2 are committed, then replayed by a trainer whose policy starts elsewhere."""
    with capture_logs() as lines:
        await run(make(steps=4, **trainer))
    return [line for line in lines if line["event"].startswith("step replayed")]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let policies made from now on start with other weights, so that replays differ."""

    def elsewhere() -> None:
        def start(policy: SimulatedPolicy, config: Any) -> None:
            initialise(policy, config)
            policy._chain = b"elsewhere elsew."

        initialise = SimulatedPolicy.__init__
        monkeypatch.setattr(SimulatedPolicy, "__init__", start)

    return elsewhere


async def test_the_same_weights_are_said_to_be_the_same(make, broker, keys):
    async with answering(broker, keys):
        await crash_after_commit(make(steps=4), 2)
        lines = await lines_of_a_replay(make, broker, keys)
    assert [(line["step"], line["event"]) for line in lines] == [
        (step, "step replayed, same weights") for step in range(3)
    ]


@pytest.mark.parametrize(("deterministic", "level"), [(True, "error"), (False, "warning")])
async def test_a_difference_is_told_with_its_size(make, broker, keys, elsewhere, deterministic, level):
    """An error where the run promised identical weights: deterministic, on a CPU."""
    async with answering(broker, keys):
        await crash_after_commit(make(steps=4), 2)
        elsewhere()
        lines = await lines_of_a_replay(make, broker, keys, deterministic=deterministic, device="cpu")
    assert [(line["log_level"], line["event"]) for line in lines] == [(level, DIFFER)] * 3
    for line in lines[:2]:  # the crash came before the last version was written
        assert line["digest"] != line["committed"]
        assert 0 < line["mean_abs_difference"] < line["max_abs_difference"] < 256


async def test_without_the_weights_on_the_disk_the_metrics_tell_the_size(make, broker, keys, elsewhere):
    async with answering(broker, keys):
        await crash_after_commit(make(steps=4), 2)
        elsewhere()
        shutil.rmtree(make().run_dir / "weights")
        lines = await lines_of_a_replay(make, broker, keys)
    assert [line["event"] for line in lines] == [DIFFER] * 3
    assert all(line["grad_norm"] == "1 then, 1 now" for line in lines)
    assert not any("max_abs_difference" in line for line in lines)


async def test_a_checkpoint_of_a_replay_that_differs_is_one_of_its_own_weights(make, broker, keys, elsewhere):
    """The run goes on from what it has; the commits before stay as they are."""
    async with answering(broker, keys):
        await crash_after_commit(make(steps=4), 2)
        elsewhere()
        await lines_of_a_replay(make, broker, keys)
    assert CheckpointStore(make().run_dir, keep=2).versions() == [4]


@pytest.mark.parametrize("change", ["tokens", "reward"])
async def test_a_step_is_not_replayed_with_other_samples_than_it_was_trained_on(make, broker, keys, change):
    """Redis has lost them, and workers have generated and scored the group again."""
    async with answering(broker, keys):
        await crash_after_commit(make(steps=4, checkpoint_every=100), 2)
    ticket, index = (await commits_of(broker, keys))[2].trained_keys[0]
    prompt = np.arange(9, dtype=np.int32)
    key, other = {
        "tokens": (keys.trajectories(), make_trajectory(ticket, index, group_size=SIZE, prompt_ids=prompt)),
        "reward": (keys.scores(), make_score(ticket, index, 7.0)),
    }[change]
    entries = await read_raw(broker, key)
    await broker.execute("DEL", key)
    for entry_id, fields in entries:
        message = codec.decode(fields, type(other))
        kept = fields if message.key != other.key else codec.encode(other)
        await broker.execute("XADD", key, entry_id, *chain.from_iterable(kept.items()))
    with pytest.raises(TidemillError, match="step 2 was committed, but the streams hold other samples"):
        await run(make(steps=4, checkpoint_every=100))
