"""A replay that does not give the committed weights is told of, with how far they are apart."""

import shutil
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.training import answering
from tests.support.whole_trainer import crash_after_commit, run
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
