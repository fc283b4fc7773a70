"""Two ranks over NCCL: their numbers are those of one, they resume, leave the GPU and come back; a version
that is written while they train is whole; one that dies ends the other."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.models import DEVICE, IS_DRY, gpu_model, needs_gpu, needs_kernels, needs_two_gpus
from tests.support.models import make_samples, one_batch, run_config, save_state
from tests.support.preloaded import REPO
from tidemill.common.config import RunConfig
from tidemill.common.config.weights import WeightsConfig
from tidemill.common.run.weight_files import verified_files
from tidemill.common.weights.delta import check_whole
from tidemill.services.trainer.policy.loading import open_policy
from tidemill.services.trainer.policy.policy import Policy, UpdateResult
from tidemill.services.trainer.weights.store import WeightStore

pytestmark = [needs_gpu, needs_two_gpus, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def config_of(folder: Path, num_ranks: int = 2, dtype: str = "float32", **trainer: Any) -> RunConfig:
    fields = {"device": DEVICE, "num_ranks": num_ranks, "liger": "off", "optimizer": {"lr": 1e-3}}
    return run_config(
        folder, model={"dtype": dtype}, trainer=fields | {"deterministic": True, "num_threads": 1} | trainer
    )


@contextmanager
def opened(config: RunConfig) -> Iterator[Policy]:
    policy: Any = open_policy(config)
    try:
        yield policy
    finally:
        if config.trainer.num_ranks > 1:
            policy.close()


def step(policy: Policy, seed: int = 0) -> UpdateResult:
    sums = policy.accumulate(one_batch(make_samples(12, seed)))
    return policy.update(sums.denominator)


def start_logprobs(policy: Policy) -> np.ndarray[Any, Any]:
    """Of some samples, as two mini-batches want them."""
    return np.concatenate([columns["proximal_logprobs"] for columns in policy.precompute(make_samples(12))])


@pytest.mark.parametrize("trainer", [{}, {"sum_gradients": "micro_batch"}])
def test_two_ranks_have_the_numbers_of_one(folder: Path, trainer: dict[str, Any]) -> None:
    digests = []
    for num_ranks in (1, 2):
        with opened(config_of(folder, num_ranks, mini_batches=2, **trainer)) as policy:
            before = start_logprobs(policy)
            norms = [step(policy, seed).grad_norm for seed in range(2)]
            digests.append((before, norms, start_logprobs(policy)))
    (before, norms, after), (sharded_before, sharded_norms, sharded_after) = digests
    np.testing.assert_allclose(sharded_before, before, atol=1e-4)
    assert sharded_norms == pytest.approx(norms, rel=1e-3)
    np.testing.assert_allclose(sharded_after, after, atol=5e-3)
    assert np.abs(after - before).max() > 0.02


def test_moments_in_host_memory_change_no_bit(folder: Path) -> None:
    digests = []
    for is_offloaded in (False, True):
        with opened(config_of(folder, offload_optimizer=is_offloaded)) as policy:
            for seed in range(3):
                step(policy, seed)
            digests.append(policy.digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_ranks_resume_where_they_were(folder: Path, tmp_path: Path, is_offloaded: bool) -> None:
    config = config_of(folder, offload_optimizer=is_offloaded)
    with opened(config) as policy:
        step(policy)
        save_state(policy, tmp_path)
        expected = [policy.digest(), step(policy, 1), policy.digest()]
    with opened(config) as policy:
        policy.load_state(tmp_path)
        assert [policy.digest(), step(policy, 1), policy.digest()] == expected


def test_ranks_leave_the_gpu_and_come_back_with_the_same_bits(folder: Path) -> None:
    with opened(config_of(folder)) as policy:
        step(policy)
        policy.leave()
        policy.enter()
        digests = policy.digest(), step(policy, 1), policy.digest()
    with opened(config_of(folder)) as policy:
        step(policy)
        assert digests == (policy.digest(), step(policy, 1), policy.digest())


@needs_kernels
def test_ranks_that_leave_free_their_memory(folder: Path) -> None:
    with opened(config_of(folder)) as policy:
        step(policy)
        before = torch.cuda.memory_allocated()
        policy.leave()
        assert torch.cuda.memory_allocated() < before / 4
        policy.enter()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_version_that_is_written_while_training_goes_on_is_whole(
    folder: Path, tmp_path: Path, num_ranks: int
) -> None:
    store = WeightStore(tmp_path, WeightsConfig(delta="off"))
    with opened(config_of(folder, num_ranks, dtype="bfloat16")) as policy:
        for version in range(4):
            begun = store.begin(version, policy, policy.compare_weights())
            for seed in range(3):
                step(policy, seed)
            manifest = store.finish(begun)
            check_whole(verified_files(tmp_path, manifest), manifest)
        assert not policy.digest().startswith(manifest.digest), "the weights have moved on"


PROGRAM = """
import sys
from pathlib import Path
import torch
from tidemill.common.config import RunConfig
from tidemill.services.trainer.policy.loading import open_policy
from tests.support.models import make_samples, one_batch

policy = open_policy(RunConfig.model_validate_json(Path(sys.argv[1]).read_text()))
policy.accumulate(one_batch(make_samples(2)))  # the ranks are connected from now on
print(*(process.pid for process in policy._ranks._watch._started.values()), flush=True)
torch.distributed.all_reduce(torch.ones(1, device=policy._ranks.device))  # the other one waits for a call
if policy._ranks.device.type == "cuda":
    torch.cuda.synchronize()
"""


def test_a_rank_that_dies_is_named_while_the_other_waits_for_it(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(config_of(folder).model_dump_json())
    command = [sys.executable, "-c", PROGRAM, str(path)]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO)
    assert leader.stdout is not None
    os.kill(int(leader.stdout.readline()), signal.SIGKILL)
    try:
        _, errors = leader.communicate(timeout=120)
    finally:
        leader.kill()
    assert leader.returncode != 0
    assert IS_DRY or ("rank 1" in errors and "SIGKILL" in errors)
