"""A trainer that dies again and again, at any point of a step, makes the weights of one that never died."""

import asyncio
import multiprocessing
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.chaos.mortal_trainer import POINTS, Death, live
from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import answering, assert_nothing_lost, messages, num_commits, replayed_digests
from tidemill.common.run.weight_files import (
    WEIGHTS_FOLDER,
    folder_versions,
    read_chain,
    read_manifest,
    verified_files,
)
from tidemill.common.weights.delta import check_whole, write_whole
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.policy.transformers_policy import load_policy

STEPS = 44
GROUPS = 2
SIZE = 4
LIFE_S = 90.0


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the trainer process: the order of sums depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(before)


@pytest.mark.timeout(900)  # some twenty lives, on a busy machine
@pytest.mark.parametrize("seed", [0])
async def test_at_any_point_of_a_step(tmp_path: Path, one_thread: None, seed: int) -> None:
    """Every point of the list once, in random order, and three times more within the micro-batches."""
    rng = random.Random(seed)
    deaths = [Death(point, 1 + rng.randrange(2)) for point in POINTS]
    deaths += [Death("after a micro-batch", rng.randint(2, 9)) for _ in range(3)]
    rng.shuffle(deaths)
    config = simulated_config(
        tmp_path,
        model__dtype="bfloat16",  # float32 has no deltas
        weights__max_share_changed=1.0,
        rollout__sampling={"max_tokens": 8},
        trainer__policy="transformers",
        trainer__deterministic=True,
        trainer__num_threads=1,
        trainer__optimizer={"lr": 0.01},
        trainer__steps=STEPS,
        trainer__groups_per_step=GROUPS,
        trainer__group_size=SIZE,
        trainer__checkpoint_every=2,
        trainer__micro_batch_tokens=16,
    )
    deltas: set[int] = set()
    async with ServiceRun(tmp_path, config) as run, answering(run.broker, run.keys):
        for number, death in enumerate(deaths):
            code = await _live(run, death)
            announced_so_far = await messages(run.broker, run.keys.weights, WeightManifest)
            deltas |= {manifest.version for manifest in announced_so_far if manifest.is_delta}
            assert code == -signal.SIGKILL, f"life {number} did not reach its end {death.point!r}"
        assert await num_commits(run.broker, run.keys) < STEPS, "there is still something to do"
        assert await _live(run, None) == 0
        commits = await assert_nothing_lost(run.broker, run.keys, STEPS * GROUPS)
        digests = await replayed_digests(run.broker, run.keys, config, load_policy(config))
        manifests = await messages(run.broker, run.keys.weights, WeightManifest)
    assert [commit.digest for commit in commits] == digests
    assert len(set(digests)) == STEPS, "every step changed the weights"
    announced = {manifest.version: manifest.digest for manifest in manifests}
    assert all(announced.get(commit.version, commit.digest) == commit.digest for commit in commits)
    assert deltas, "lives of two steps and more write them; the last life may have one step only"
    for version in folder_versions(run.run_dir / WEIGHTS_FOLDER):
        assert_leads_to_its_digest(run.run_dir, version, tmp_path / f"whole-{version}")
    newest = CheckpointStore(run.run_dir, keep=2).load_latest()
    assert newest is not None
    assert newest.state.version == STEPS


def assert_leads_to_its_digest(run: Path, version: int, folder: Path) -> None:
    manifest = read_manifest(run, version)
    assert manifest is not None
    files = [verified_files(run, link) for link in read_chain(run, manifest)]
    base, *deltas = files
    folder.mkdir()
    check_whole(write_whole(base, deltas, folder), manifest)


async def _live(run: ServiceRun, death: Death | None) -> int:
    """One life, forked off a process that has imported torch already; returns its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.mortal_trainer"])
    text = run.config.model_dump_json()
    process = context.Process(
        target=live, args=(run.redis.url, run.keys.run_id, str(run.run_dir), text, death)
    )
    process.start()
    try:
        await asyncio.to_thread(process.join, LIFE_S)
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
    assert process.exitcode is not None
    return process.exitcode
