"""A replay that does not give the committed weights is told of, with how far they are apart."""

import shutil

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.support.training import commits_of, make_score, messages, rewrite
from tests.support.trajectories import make_trajectory
from tests.support.whole_trainer import SIZE, crash_after_commit, crash_before_commit, run
from tidemill.common.errors import TidemillError
from tidemill.common.run.weight_files import verified_files
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy

DIFFER = "step replayed, but the weights differ"

pytestmark = pytest.mark.usefixtures("answers")


@pytest.fixture
def elsewhere(monkeypatch):
    """Let policies made from now on start with other weights, so that replays differ."""

    def elsewhere():
        def start(policy, config):
            initialise(policy, config)
            policy._chain = b"elsewhere elsew."

        initialise = SimulatedPolicy.__init__
        monkeypatch.setattr(SimulatedPolicy, "__init__", start)

    return elsewhere


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize(("deterministic", "level"), [(True, "error"), (False, "warning")])
async def test_a_difference_is_told_with_its_size(
    make, broker, keys, elsewhere, deterministic, level, has_weights
):
    """An error where the run promised identical weights: deterministic, on a CPU. Without weights on the disk
    the metrics tell the size. The run goes on from what it has; the commits before stay as they are."""
    await crash_after_commit(make(steps=4), 2)
    elsewhere()
    if not has_weights:
        shutil.rmtree(make().run_dir / "weights")
    with capture_logs() as logs:
        await run(make(steps=4, deterministic=deterministic, device="cpu"))
    lines = [line for line in logs if line["event"].startswith("step replayed")]
    assert [(line["log_level"], line["event"]) for line in lines] == [(level, DIFFER)] * 3
    for line in lines[:2]:  # the crash came before the last version was written
        assert line["digest"] != line["committed"]
        if has_weights:
            assert 0 < line["mean_abs_difference"] < line["max_abs_difference"] < 256
        else:
            assert line["grad_norm"] == "1 then, 1 now" and "max_abs_difference" not in line
    assert CheckpointStore(make().run_dir, keep=2).versions() == [4]


async def test_weights_that_were_announced_stay_as_the_workers_know_them(make, broker, keys, elsewhere):
    """A replay that is not exact must not change the bytes under a manifest that is out already."""
    await crash_before_commit(make(checkpoint_every=100), 3)
    announced = (await messages(broker, keys.weights, WeightManifest))[-1]
    elsewhere()
    await run(make(3))
    newest = (await messages(broker, keys.weights, WeightManifest))[-1]
    assert (newest.version, newest.digest) == (3, announced.digest)
    assert verified_files(make().run_dir, newest)


@pytest.mark.parametrize("change", ["tokens", "reward"])
async def test_a_step_is_not_replayed_with_other_samples_than_it_was_trained_on(make, broker, keys, change):
    """Redis has lost them, and workers have generated and scored the group again."""
    await crash_after_commit(make(steps=4, checkpoint_every=100), 2)
    ticket, index = (await commits_of(broker, keys))[2].trained_keys[0]
    prompt = np.arange(9, dtype=np.int32)
    key, changed = {
        "tokens": (keys.trajectories(), make_trajectory(ticket, index, group_size=SIZE, prompt_ids=prompt)),
        "reward": (keys.scores(), make_score(ticket, index, 7.0)),
    }[change]
    await rewrite(
        broker, key, type(changed), lambda message: changed if message.key == changed.key else message
    )
    with pytest.raises(TidemillError, match="step 2 was committed, but the streams hold other samples"):
        await run(make(steps=4, checkpoint_every=100))
