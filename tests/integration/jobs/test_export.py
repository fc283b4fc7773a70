"""`tidemill export`: what comes out is the policy, as Hugging Face's own classes load it."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from redis import Redis
from rq import Queue, Worker
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import preloaded
from tests.support.models import make_policy, tiny_llama, tiny_model
from tests.support.trajectories import make_config
from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError, WeightsError
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.weight_files import version_name
from tidemill.common.wire.keys import Keys
from tidemill.services.jobs.export import export, find_version
from tidemill.services.trainer.weights.store import WeightStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two versions; the policy of version 1 is the model of seed 1."""
    run = tmp_path / "runs" / "one"
    store = WeightStore(run)
    for version in (0, 1):
        store.write(version, make_policy(model=tiny_llama(seed=version)))
    (run / "best.json").write_text('{"version": 0}')
    tree = make_config().model_dump(mode="json")
    tree["model"]["path"] = str(tiny_model(tmp_path / "model", seed=7))
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    return run


def assert_is_policy(folder: Path, version: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = tiny_llama(seed=version).state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert AutoTokenizer.from_pretrained(folder).decode([3, 4]) == "w0 w1"
    origin = json.loads((folder / "tidemill.json").read_text())
    assert (origin["run_id"], origin["version"]) == ("one", version)


def tidemill(run: Path, *words: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TIDEMILL_REDIS_URL"}
    if url:
        environment["TIDEMILL_REDIS_URL"] = url
    return preloaded.tidemill("export", "one", "--runs-dir", str(run.parent), *words, **environment)


def test_an_export_is_the_policy(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = tidemill(run, "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert "version 1 of one" in done.stdout
    assert_is_policy(out, 1)
    again = tidemill(run, "--now", "-o", str(out))
    assert again.returncode == 2 and "not empty" in again.stderr and "Traceback" not in again.stderr


def test_an_export_has_the_overrides_of_its_model(run: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"]["overrides"] = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    done = tidemill(run, "--now", "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.rope_parameters
    assert (found["rope_type"], found["factor"]) == ("linear", 2.0)


async def test_a_worker_of_the_run_does_it_where_there_is_one(
    run: Path, tmp_path: Path, redis_server: EmbeddedRedis
) -> None:
    url = redis_server.url
    environment = {**os.environ, "TIDEMILL_REDIS_URL": url}
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tidemill.services.jobs", "one", env=environment
    )
    queue = Queue(Keys("one").jobs_queue, connection=Redis.from_url(url))
    try:
        await wait_until(lambda: Worker.count(queue=queue) == 1)
        done = await asyncio.to_thread(
            tidemill, run, "--version", "best", "-o", str(tmp_path / "out"), url=url
        )
        assert done.returncode == 0, done.stderr
        refused = await asyncio.to_thread(
            tidemill, run, "--version", "8", "-o", str(tmp_path / "no"), url=url
        )
        assert refused.returncode == 1 and "version 8 of one has no weights" in refused.stderr
        assert queue.count == 0 and Worker.all(queue=queue)[0].successful_job_count == 1
    finally:
        worker.terminate()
        await asyncio.wait_for(worker.wait(), 120)
    assert_is_policy(tmp_path / "out", 0)


def test_versions_are_found_by_name_and_number(run: Path) -> None:
    assert [find_version(run, name) for name in ("best", "last", "0")] == [0, 1, 0]
    with pytest.raises(ConfigError, match="expected a number, best or last"):
        find_version(run, "newest")
    (run / "best.json").unlink()
    with pytest.raises(ConfigError, match="no best version"):
        find_version(run, "best")


def test_damaged_weights_are_not_exported(run: Path, tmp_path: Path) -> None:
    path = run / "weights" / version_name(1) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(WeightsError, match="damaged"):
        export(str(run), str(tmp_path / "model"), "float32", "last", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
