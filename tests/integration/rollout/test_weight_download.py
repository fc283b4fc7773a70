"""Rollout workers without the trainer's folder get the same bytes over HTTP, whole and checked, or none."""

import contextlib
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.full_versions import WritesFull
from tests.support.preloaded import REPO
from tests.support.runs import ServiceRun, simulated_config
from tests.support.servers import free_port, listening
from tests.support.training import assert_nothing_lost
from tests.support.versions import write_version
from tidemill.common.config.weights import WeightsConfig
from tidemill.common.errors import ConfigError, WeightsError
from tidemill.common.run.state import read_state
from tidemill.common.run.weight_files import WEIGHTS_FOLDER, folder_versions
from tidemill.common.weights.remote import WeightServer, open_remote
from tidemill.common.wire.messages import WeightFile, WeightManifest
from tidemill.services.rollout import weight_follower
from tidemill.services.rollout.weight_follower import WeightDownload
from tidemill.services.trainer.weights.store import WeightState, WeightStore, list_files

RUN = "far-away"
TOKEN = "a-token-that-is-long-enough"
SERVER = [sys.executable, "-m", "tidemill.services.trainer.weight_server"]


class Policy(WritesFull):
    """One file with one value; its digest is that value."""

    def __init__(self, value: float) -> None:
        self.value = value

    def compare_weights(self) -> WeightState:
        digest = f"{int(self.value):032x}"
        return WeightState(digest, digest)

    def begin_writing(self, folder: Path, version: int, parent: int) -> Future[tuple[WeightFile, ...]]:
        save_file({"w": np.full(1 << 20, self.value, np.float32)}, folder / "model.safetensors")
        written: Future[tuple[WeightFile, ...]] = Future()
        written.set_result(list_files(folder))
        return written


@dataclass
class Server:
    """`python -m tidemill.services.trainer.weight_server` as a process, on the runs of one folder."""

    runs: Path
    url: str

    def status_of(self, path: str, token: str = TOKEN) -> int:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


@contextlib.contextmanager
def serving(runs: Path) -> Iterator[Server]:
    port = free_port()
    env = os.environ | {"TIDEMILL_RUNS_DIR": str(runs), "TIDEMILL_WEIGHTS_TOKEN": TOKEN}
    with listening([*SERVER, "--port", str(port)], port, cwd=REPO, env=env):
        yield Server(runs, f"http://127.0.0.1:{port}")


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests: starting it takes longer than most of them."""
    with serving(tmp_path_factory.mktemp("runs")) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    """Without the runs of earlier tests."""
    shutil.rmtree(shared_server.runs / RUN, ignore_errors=True)
    return shared_server


def written(server: Server, version: int, value: float) -> WeightManifest:
    return write_version(WeightStore(server.runs / RUN), version, Policy(value))


def download_to(server: Server, cache: Path, token: str = TOKEN) -> WeightDownload:
    return WeightDownload(WeightServer(server.url, token, RUN), RUN, cache)


def value_of(paths: list[Path]) -> float:
    return float(load_file(paths[0])["w"][-1])


def test_a_version_arrives_with_its_bytes_and_old_ones_go(server: Server, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    worker = download_to(server, cache)
    for version in range(4):
        assert value_of(worker.files(written(server, version, version + 0.5))) == version + 0.5
    assert folder_versions(cache / RUN / WEIGHTS_FOLDER) == [2, 3]


def test_workers_of_one_machine_download_a_version_once(tmp_path: Path) -> None:
    with serving(tmp_path / "runs") as server:
        manifest = written(server, 1, 7.0)
        download_to(server, tmp_path / "cache").files(manifest)
    assert value_of(download_to(server, tmp_path / "cache").files(manifest)) == 7.0
    with pytest.raises(WeightsError, match="does the head serve weights"):
        download_to(server, tmp_path / "another cache").files(manifest)


def test_other_bytes_than_those_announced_are_not_kept(server: Server, tmp_path: Path) -> None:
    manifest = written(server, 1, 7.0)
    path = server.runs / RUN / WEIGHTS_FOLDER / manifest.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"torn")
    with pytest.raises(WeightsError, match="damaged"):
        download_to(server, tmp_path / "cache").files(manifest)
    path.write_bytes(path.read_bytes() + b"and more")
    with pytest.raises(WeightsError, match="damaged"):
        download_to(server, tmp_path / "other").files(manifest)
    assert folder_versions(tmp_path / "other" / RUN / WEIGHTS_FOLDER) == []


def test_a_broken_download_goes_on_where_it_was(server, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_follower, "PIECE_BYTES", 1 << 18)
    manifest = written(server, 1, 7.0)
    asked = list[int]()
    read = WeightServer.read
    num_answers = 9

    def read_some(self: WeightServer, path: str, start: int, length: int) -> bytes:
        asked.append(start)
        if len(asked) > num_answers:
            raise WeightsError("the connection broke")
        return read(self, path, start, length)

    monkeypatch.setattr(WeightServer, "read", read_some)
    with pytest.raises(WeightsError, match="broke"):
        download_to(server, tmp_path / "cache").files(manifest)
    assert folder_versions(tmp_path / "cache" / RUN / WEIGHTS_FOLDER) == []
    first = set(asked[:num_answers])
    asked.clear()
    num_answers = 1 << 10
    assert value_of(download_to(server, tmp_path / "cache").files(manifest)) == 7.0
    assert len(asked) == 17 - len(first) and not first & set(asked)


def test_damaged_files_of_the_cache_are_downloaded_again(server: Server, tmp_path: Path) -> None:
    manifest = written(server, 1, 7.0)
    worker = download_to(server, tmp_path / "cache")
    worker.files(manifest)[0].write_bytes(b"gone")
    assert value_of(worker.files(manifest)) == 7.0


def test_only_files_of_manifests_are_served_and_only_with_the_token(server: Server, tmp_path: Path) -> None:
    manifest = written(server, 1, 7.0)
    (server.runs / RUN / "config.yaml").write_text("secret")
    (server.runs / RUN / WEIGHTS_FOLDER / "v00000001" / "notes.txt").write_text("not of the manifest")
    weights_path = f"/runs/{RUN}/weights/v00000001/model.safetensors"
    assert server.status_of(weights_path) == 200
    assert server.status_of(f"/runs/{RUN}/weights/v00000001/manifest.json") == 200
    assert server.status_of(weights_path, token="a guess") == 401
    assert server.status_of(weights_path, token="") == 401
    for path in (
        f"/runs/{RUN}/weights/v00000001/notes.txt",
        f"/runs/{RUN}/weights/v00000002/model.safetensors",
        f"/runs/{RUN}/weights/v00000001/..%2f..%2fconfig.yaml",
        f"/runs/{RUN}/config.yaml",
        "/runs/..%2f/weights/v00000001/model.safetensors",
        "/etc/passwd",
    ):
        assert server.status_of(path) == 404, path
    with pytest.raises(WeightsError, match="TIDEMILL_WEIGHTS_TOKEN is not the one of the server"):
        download_to(server, tmp_path / "cache", token="another-token-that-is-long").files(manifest)


def test_an_address_that_is_none_is_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_WEIGHTS_URL", "head:8200")
    with pytest.raises(ConfigError, match="such as http://head:8200"):
        open_remote(WeightsConfig().address, RUN)
    monkeypatch.setenv("TIDEMILL_WEIGHTS_URL", "")
    assert open_remote(WeightsConfig().address, RUN) is None


def test_a_server_without_a_token_does_not_start(tmp_path: Path) -> None:
    env = os.environ | {"TIDEMILL_WEIGHTS_TOKEN": "short", "TIDEMILL_RUNS_DIR": str(tmp_path)}
    ended = subprocess.run(
        [*SERVER, "--port", "0"], cwd=REPO, env=env, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2 and "has 5 characters" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_a_worker_without_the_trainers_folder_does_a_whole_run(server: Server, tmp_path: Path) -> None:
    config = simulated_config(
        tmp_path, rollout__engine="transformers", rollout__sampling={"max_tokens": 8},
        trainer__policy="transformers", trainer__steps=3,
    )  # fmt: skip
    async with ServiceRun(tmp_path, config) as run:
        run.variables["trainer"] = {"TIDEMILL_RUNS_DIR": str(server.runs)}
        run.variables["rollout"] = {
            "TIDEMILL_RUNS_DIR": str(tmp_path / "nothing here"),
            "TIDEMILL_CACHE_DIR": str(tmp_path / "cache"),
            "TIDEMILL_WEIGHTS_URL": server.url,
            "TIDEMILL_WEIGHTS_TOKEN": TOKEN,
        }
        run.start_all()
        assert await run.wait("trainer") == 0, run.log_of("trainer") + run.log_of("rollout")
        await assert_nothing_lost(run.broker, run.keys, 3 * 4)
        state = await read_state(run.broker, run.keys)
    assert state["version"] == 3
    assert not (tmp_path / "nothing here").exists()
    assert "weights downloaded" in run.log_of("rollout")
