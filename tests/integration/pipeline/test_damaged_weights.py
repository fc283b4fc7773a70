"""A run goes on where the files of its newest version are damaged after they were announced."""

from pathlib import Path

import pytest

from tests.support.runs import ServiceRun, hold_scores, simulated_config
from tests.support.training import messages, num_commits
from tests.support.waiting import wait_until
from tidemill.common.run.weight_files import WEIGHTS_FOLDER
from tidemill.common.wire.messages import WeightManifest

STEPS = 8


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_version_with_a_flipped_bit_is_written_again_and_nothing_is_lost(tmp_path, max_staleness):
    config = simulated_config(
        tmp_path, trainer__steps=STEPS, trainer__max_staleness=max_staleness, reward__timeout_s=600.0
    )
    # Enough for the first step, and too little for the run: it may not end before its worker is killed.
    num_free = (1 + max_staleness) * config.trainer.groups_per_step * config.trainer.group_size
    gate = hold_scores(tmp_path, num_free)
    async with ServiceRun(tmp_path, config) as run:

        async def newest() -> WeightManifest:
            return (await messages(run.broker, run.keys.weights, WeightManifest))[-1]

        seen = -1

        async def stands_still() -> bool:
            nonlocal seen
            before = seen
            seen = await num_commits(run.broker, run.keys)
            return before == seen == (await newest()).version

        run.start_all()
        await wait_until(lambda: num_commits(run.broker, run.keys))
        run.kill("rollout")
        gate.touch()
        await wait_until(stands_still)
        damaged = await newest()
        flip(run.run_dir / WEIGHTS_FOLDER / damaged.folder / damaged.files[-1].name)
        run.start("rollout")
        await run.trained()
        manifests = await messages(run.broker, run.keys.weights, WeightManifest)
        assert [m for m in manifests[1:] if not m.is_delta and m.version >= damaged.version]
        digests = {m.version: m.digest for m in manifests}
        assert all(m.digest == digests[m.version] for m in manifests), "a version has one digest"
