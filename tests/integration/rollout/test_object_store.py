"""Weights through an object store: the trainer publishes, workers read. The server is moto's, a process."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import tiny_model
from tests.support.preloaded import REPO
from tests.support.runs import ServiceRun, simulated_config
from tests.support.servers import free_port
from tests.support.training import assert_nothing_lost
from tests.support.versions import Chain
from tests.support.waiting import PATIENCE_S
from tidemill.common.errors import ConfigError, WeightsError
from tidemill.common.files import StorageError
from tidemill.common.run.weight_files import MANIFEST_FILE
from tidemill.common.weights.remote import ObjectStore, open_remote
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.rollout.weights.download import WeightDownload
from tidemill.services.rollout.weights.routes import find_route
from tidemill.services.trainer.weights.publisher import ObjectPublisher

RUN = "far-away"
VENV = Path(__file__).parents[3] / "build" / "objects"
PIP = [VENV / "bin" / "python", "-m", "pip", "-q", "install"]
CLIENT = VENV / "client"
"""Apart from the server, whose dependencies are not those of the product."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Its address; the client and the server are installed once, apart from the product's packages."""
    commands = [
        [sys.executable, "-m", "venv", VENV],
        [*PIP, "--target", CLIENT, "--no-deps", "obstore>=0.8"],
        [*PIP, "moto[server]>=5"],
    ]
    for command in [] if (VENV / "bin" / "moto_server").exists() else commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        if done.returncode:
            pytest.skip(f"build/objects cannot be made: {done.stderr.strip()[-200:]}")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [VENV / "bin" / "moto_server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not is_up(url):
            assert time.monotonic() < deadline and process.poll() is None, "the store does not answer"
            time.sleep(0.05)
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=30).read()
        yield url
    finally:
        process.kill()
        process.wait()


def is_up(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=5).status)
    except OSError:
        return False


def variables(server: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


@pytest.fixture
def url(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A folder of its own in the bucket."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(CLIENT)])
    for name, value in variables(server).items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{request.node.name}"


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    made = Chain(tmp_path / "run")
    made.full(0, tiny_model(tmp_path / "model") / "model.safetensors")
    return made


def publish(chain: Chain, url: str, manifest: WeightManifest) -> None:
    ObjectPublisher(url, RUN).publish(manifest, chain.paths(manifest.version)[0].parent)


def download(url: str, cache: Path) -> WeightDownload:
    remote = open_remote(url, RUN)
    assert isinstance(remote, ObjectStore)
    return WeightDownload(remote, RUN, cache)


def test_a_chain_arrives_through_the_store_and_old_versions_go(
    chain: Chain, url: str, tmp_path: Path
) -> None:
    publish(chain, url, chain.manifests[0])
    for version in (1, 2):
        publish(chain, url, chain.delta(version))
    worker = download(url, tmp_path / "cache")
    route = find_route(worker, chain.newest, None)
    assert [path.read_bytes() for path in route.files] == [path.read_bytes() for path in chain.paths(0)]
    assert len(route.deltas) == 2
    publish(chain, url, chain.base(3))
    ObjectPublisher(url, RUN).remove(1)
    with pytest.raises(WeightsError, match="not found"):
        find_route(download(url, tmp_path / "another cache"), chain.manifests[2], None)
    assert find_route(download(url, tmp_path / "another cache"), chain.newest, None).deltas == []


def test_a_version_of_another_history_is_replaced_manifest_last(
    chain: Chain, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(chain, url, chain.delta(1))
    chain.delta(2)
    chain.tensors = {name: (info, bits + 1) for name, (info, bits) in chain.tensors.items()}
    other, written = chain.base(2), list[str]()
    write = ObjectStore.write

    def write_some(store: ObjectStore, path: str, file: Path) -> None:
        written.append(Path(path).name)
        if len(written) == 1:
            raise WeightsError("the store went away")
        write(store, path, file)

    publish(chain, url, other)
    monkeypatch.setattr(ObjectStore, "write", write_some)
    changed = other.model_copy(update={"digest": chain.manifests[1].digest})
    with pytest.raises(StorageError, match="went away") as raised:
        publish(chain, url, changed)
    assert raised.value.can_clear
    assert download(url, tmp_path / "cache").manifest(1) == chain.manifests[1]
    with pytest.raises(WeightsError):
        download(url, tmp_path / "cache").manifest(2)
    publish(chain, url, other)
    assert written[-1] == MANIFEST_FILE
    written.clear()
    publish(chain, url, other)
    assert not written, "it was there already"


def test_an_address_that_cannot_be_used_is_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match="tidemill\\[objects\\]"):
        open_remote("s3://bucket/folder", RUN)
    with pytest.raises(ConfigError, match="expected one such as"):
        open_remote("ftp://head", RUN)


async def test_a_run_through_the_store_goes_by_deltas(server: str, tmp_path: Path) -> None:
    """bfloat16 weights of which a step changes few; the worker sees nothing of the trainer's folder."""
    config = simulated_config(
        tmp_path,
        model__dtype="bfloat16",
        rollout__engine="transformers",
        rollout__sampling={"max_tokens": 8},
        trainer__policy="transformers",
        trainer__optimizer={"lr": 1e-6},
        trainer__steps=3,
        weights__url="s3://bucket/run",
    )
    async with ServiceRun(tmp_path, config) as run:
        path = {"PYTHONPATH": os.pathsep.join([str(REPO), str(CLIENT)])}
        run.variables["trainer"] = variables(server) | path
        run.variables["rollout"] = run.variables["trainer"] | {
            "TIDEMILL_RUNS_DIR": str(tmp_path / "nothing here"),
            "TIDEMILL_CACHE_DIR": str(tmp_path / "cache"),
        }
        for role in ("rollout", "reward", "trainer"):
            run.start(role)
        assert await run.wait("trainer") == 0, run.log_of("trainer") + run.log_of("rollout")
        await assert_nothing_lost(run.broker, run.keys, 3 * 4)
    cached = list((tmp_path / "cache").glob("*/weights/v*/*.tmd"))
    assert len({path.parent for path in cached}) == 3, "every version after the first was a delta"
    assert "weights downloaded" in run.log_of("rollout")
    assert "other weights" not in run.log_of("rollout")
