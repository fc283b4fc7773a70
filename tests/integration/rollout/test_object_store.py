"""Weights and large trajectories through an object store. The server is moto's, a process."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.models import tiny_model
from tests.support.pictures import noise_png
from tests.support.preloaded import REPO
from tests.support.runs import ServiceRun, simulated_config
from tests.support.servers import free_port, listening
from tests.support.training import assert_nothing_lost
from tests.support.trajectories import make_trajectory
from tests.support.venvs import BUILD, python_with
from tests.support.versions import Chain
from tests.support.vision import image_of
from tests.support.waiting import wait_until
from tidemill.common.config.images import ImagesConfig
from tidemill.common.errors import (
    BrokenImageError,
    ConfigError,
    RefusedError,
    StoreError,
    UnreadableError,
    WeightsError,
)
from tidemill.common.files import StorageError
from tidemill.common.history import History, StreamName
from tidemill.common.images.door import NOTES_FILE, ImageDoor
from tidemill.common.images.sources import ImageSource
from tidemill.common.images.store import ImageStore, read_images
from tidemill.common.run.weight_files import MANIFEST_FILE
from tidemill.common.store import ClaimStore, claims, resolved
from tidemill.common.store.claims import NUM_THREADS, RETRIES
from tidemill.common.streams import read_raw
from tidemill.common.weights.remote import ObjectStore, open_remote
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Score, Trajectory, WeightManifest, fault_of
from tidemill.services.rollout.weight_follower import WeightDownload, find_route
from tidemill.services.trainer.weights.object_publisher import ObjectPublisher

RUN = "far-away"
CLIENT = BUILD / "objects" / "client"
"""Apart from the server, whose dependencies are not those of the product."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Its address; the client and the server are installed once, apart from the product's packages."""
    client = ["--target", CLIENT, "--no-deps", "obstore>=0.8"]
    python = python_with("objects", "moto.server", client, ["moto[server]>=5"])
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [python.with_name("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with listening(command, port, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=30).read()
        yield url


def variables(server: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
    }  # fmt: skip


@pytest.fixture
def url(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A folder of its own in the bucket."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(CLIENT)])
    for name, value in variables(server).items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{request.node.name}"


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path / "run")
    chain.full(0, tiny_model(tmp_path / "model") / "model.safetensors")
    return chain


def publish(chain: Chain, url: str, manifest: WeightManifest) -> None:
    ObjectPublisher(url, RUN).publish(manifest, chain.paths(manifest.version)[0].parent)


def download(url: str, cache: Path) -> WeightDownload:
    remote = open_remote(url, RUN)
    assert isinstance(remote, ObjectStore)
    return WeightDownload(remote, RUN, cache)


def test_a_chain_arrives_through_the_store_and_old_versions_go(chain, url, tmp_path):
    publish(chain, url, chain.manifests[0])
    for version in (1, 2):
        publish(chain, url, chain.delta(version))
    worker = download(url, tmp_path / "cache")
    files, deltas = find_route(worker, chain.newest, None)
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in chain.paths(0)]
    assert len(deltas) == 2
    publish(chain, url, chain.base(3))
    ObjectPublisher(url, RUN).remove(1)
    with pytest.raises(WeightsError, match="not found"):
        find_route(download(url, tmp_path / "another cache"), chain.manifests[2], None)
    assert find_route(download(url, tmp_path / "another cache"), chain.newest, None)[1] == []


def test_a_version_of_another_history_is_replaced_manifest_last(chain, url, tmp_path, monkeypatch):
    publish(chain, url, chain.delta(1))
    chain.delta(2)
    chain.tensors = {name: (info, bits + 1) for name, (info, bits) in chain.tensors.items()}
    second_base = chain.base(2)
    written = list[str]()
    write = ObjectStore.write

    def write_some(store: ObjectStore, path: str, file: Path) -> None:
        written.append(Path(path).name)
        if len(written) == 1:
            raise WeightsError("the store went away")
        write(store, path, file)

    publish(chain, url, second_base)
    monkeypatch.setattr(ObjectStore, "write", write_some)
    changed = second_base.model_copy(update={"digest": chain.manifests[1].digest})
    with pytest.raises(StorageError, match="went away") as raised:
        publish(chain, url, changed)
    assert raised.value.can_clear
    assert download(url, tmp_path / "cache").manifest(1) == chain.manifests[1]
    with pytest.raises(WeightsError):
        download(url, tmp_path / "cache").manifest(2)
    publish(chain, url, second_base)
    assert written[-1] == MANIFEST_FILE
    written.clear()
    publish(chain, url, second_base)
    assert not written, "it was there already"


def test_an_address_that_cannot_be_used_is_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match="tidemill\\[objects\\]"):
        open_remote("s3://bucket/folder", RUN)
    with pytest.raises(ConfigError, match="expected one such as"):
        open_remote("ftp://head", RUN)


def test_a_claim_says_where_its_object_is_and_one_that_is_gone_or_torn_is_one_failed_sample(url, tmp_path):
    store = ClaimStore(tmp_path / RUN, 1, url)
    whole = make_trajectory(3, 1)
    sent = codec.decode_payload(codec.encode_payload(store.check_in(whole)), Trajectory)
    assert sent.claim is not None and sent.claim.pointer.startswith(f"{url}/{RUN}/claims/3-1-")
    elsewhere = ClaimStore(tmp_path / "no folder and no config")
    assert codec.encode_payload(elsewhere.resolve(sent)) == codec.encode_payload(whole)
    objects = store._objects(store.url)
    name = sent.claim.pointer.rpartition("/")[2]
    objects.write(name, objects.read_all(name)[:-7])
    assert "instead of" in fault_of(elsewhere.resolve(sent))
    later = store.check_in(make_trajectory(4, 0)).claim
    assert later is not None and store.settled(4) == {sent.claim.pointer}
    store.remove(store.settled(4))
    assert "not found" in fault_of(elsewhere.resolve(sent)) and url in fault_of(elsewhere.resolve(sent))
    assert store.settled(5) == {later.pointer}
    assert not tmp_path.joinpath(RUN).exists()


def test_a_store_that_is_away_is_asked_again_and_trajectories_go_through_the_stream(
    url, tmp_path, monkeypatch
):
    claim = ClaimStore(tmp_path / RUN, 1, url).check_in(make_trajectory(3, 1))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setitem(RETRIES, "max_retries", 2)
    store = ClaimStore(tmp_path / RUN, 1, url)
    with pytest.raises(StoreError, match="after 2 retries"):
        store.resolve(claim)
    sample = make_trajectory(5, 0)
    with pytest.raises(StoreError, match="after 2 retries"):
        store.check_in(sample)
    assert store.check_in(sample) is sample, "nobody waits for it again at once"


async def test_while_the_store_does_not_answer_other_calls_go_on(url, tmp_path, monkeypatch):
    """It takes connections and says nothing, as behind a firewall: each read waits for half a minute."""
    here = ClaimStore(tmp_path / RUN, 1, url)
    claims = [here.check_in(make_trajectory(3, index)) for index in range(40)]
    connections = list[asyncio.StreamWriter]()

    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setitem(RETRIES, "max_retries", 0)
    store = ClaimStore(tmp_path / "elsewhere")
    reading = [asyncio.create_task(resolved(store, claim)) for claim in claims]
    await wait_until(lambda: len(connections) == NUM_THREADS)
    async with asyncio.timeout(20):
        await asyncio.to_thread(os.getpid)
        await asyncio.get_running_loop().getaddrinfo("localhost", 80)
    assert not any(task.done() for task in reading)
    for task in reading:
        task.cancel()
    for writer in connections:
        writer.close()
    server.close()


@contextlib.contextmanager
def refusing_store(status: int, code: str, objects: dict[str, bytes] | None = None) -> Iterator[str]:
    """The address of a store that has these objects, by the ends of their names, and answers everything else
    with a status and a code."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            payload = (objects or {}).get(self.path.rpartition("/")[2])
            body = f"<Error><Code>{code}</Code></Error>".encode() if payload is None else payload
            self.send_response(status if payload is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            self.send_header("ETag", '"1"')
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_PUT = do_GET
        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "code"), [(400, "ExpiredToken"), (400, "InvalidToken"), (401, ""), (403, "AccessDenied")]
)
def test_keys_that_the_store_refuses_are_named_with_status_and_setting(
    url, tmp_path, monkeypatch, status, code
):
    sample = make_trajectory(3, 1)
    claim = ClaimStore(tmp_path / RUN, 1, url).check_in(sample)
    with refusing_store(status, code) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        store = ClaimStore(tmp_path / RUN, 1, url)
        for call in (lambda: store.resolve(claim), lambda: store.check_in(sample), lambda: store.settled(9)):
            with pytest.raises(RefusedError) as refused:
                call()
            assert f"status {status}" in str(refused.value)
            assert "AWS_" in str(refused.value) and "streams.claim_check_url" in str(refused.value)
        with pytest.raises(WeightsError, match=f"status {status}"):
            open_remote(url, RUN).read_all("manifest.json")


def test_a_picture_is_stored_once_and_read_as_it_was_or_is_missing(url, tmp_path):
    png = noise_png(0)
    store = ImageStore(tmp_path / RUN, url)
    image = image_of(png, 0, 4)
    assert store.put(png) == image.digest
    assert not (tmp_path / RUN).exists(), "nothing is in the run's folder"
    of_another_process = ImageStore(tmp_path / RUN, url)
    assert of_another_process.has(image.digest) and of_another_process.read(image) == png
    missing = image_of(noise_png(1), 0, 4)
    with pytest.raises(BrokenImageError, match=f"{missing.digest}.png is missing"):
        store.read(missing)
    with pytest.raises(BrokenImageError, match="does not match its digest"):
        store.read(image.model_copy(update={"num_bytes": 3}))


def test_the_door_makes_again_what_its_notes_have_and_the_store_has_not(url, tmp_path):
    """The run's folder was copied to be continued with another store."""
    source = ImageSource(content=noise_png(0))
    notes = tmp_path / RUN / "images"
    for address in (url, f"{url}/elsewhere"):
        store = ImageStore(tmp_path / RUN, address)
        (picture,) = ImageDoor(ImagesConfig(), store, notes).take([source])
        assert ImageStore(tmp_path / RUN, address).has(picture.digest)
    assert (notes / NOTES_FILE).is_file()


@pytest.mark.parametrize(
    ("status", "code", "kind"), [(403, "AccessDenied", ConfigError), (500, "", StoreError)]
)
async def test_a_store_of_pictures_that_is_away_or_refuses_the_keys_is_no_pictures_fault(
    url, tmp_path, monkeypatch, status, code, kind
):
    png = noise_png(0)
    ImageStore(tmp_path / RUN, url).put(png)
    monkeypatch.setattr(claims, "REFUSED_S", 0.0)
    monkeypatch.setitem(RETRIES, "max_retries", 0)
    with refusing_store(status, code) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        store = ImageStore(tmp_path / RUN, url)
        with pytest.raises(StoreError):
            store.read(image_of(png, 0, 4))
        if kind is ConfigError:
            with pytest.raises(ConfigError, match="status 403"):
                await read_images(store, [image_of(png, 0, 4)])
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read_images(store, [image_of(png, 0, 4)]), 2.0)


def test_a_request_that_the_store_cannot_read_says_nothing_of_the_keys(url, tmp_path, monkeypatch):
    sample = make_trajectory(3, 1)
    claim = ClaimStore(tmp_path / RUN, 1, url).check_in(sample)
    with refusing_store(400, "MalformedXML") as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        with pytest.raises(StoreError, match="400") as failed:
            ClaimStore(tmp_path / RUN, 1, url).resolve(claim)
    assert not isinstance(failed.value, RefusedError)


@pytest.mark.parametrize(
    ("code", "kind"), [("AccessDenied", UnreadableError), ("ExpiredToken", RefusedError)]
)
def test_an_object_that_is_missing_to_keys_that_may_not_list_is_one_failed_sample(
    url, tmp_path, monkeypatch, code, kind
):
    """S3 answers 403 for it, as for keys that may not read; but these have read another one."""
    samples = [make_trajectory(3, index) for index in range(2)]
    first, missing = map(ClaimStore(tmp_path / RUN, 1, url).check_in, samples)
    name = first.claim.pointer.rpartition("/")[2]
    with refusing_store(403, code, {name: codec.encode_payload(samples[0])}) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        store = ClaimStore(tmp_path / RUN, 1, url)
        with pytest.raises(RefusedError, match="s3:ListBucket"):
            store.resolve(missing)
        assert store.resolve(first).text == samples[0].text
        with pytest.raises(kind, match="status 403"):
            store.resolve(missing)


def test_keys_that_may_read_no_more_are_refused_and_no_sample_fails(url, tmp_path, monkeypatch):
    """Their rights were taken away, or a clock is wrong: with one failed sample after another, nobody would
    see it."""
    samples = [make_trajectory(3, index) for index in range(2)]
    first, second = map(ClaimStore(tmp_path / RUN, 1, url).check_in, samples)
    objects = {first.claim.pointer.rpartition("/")[2]: codec.encode_payload(samples[0])}
    with refusing_store(403, "AccessDenied", objects) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        store = ClaimStore(tmp_path / RUN, 1, url)
        assert store.resolve(first).text == samples[0].text
        objects.clear()
        with pytest.raises(RefusedError, match="status 403"):
            store.resolve(second)


@pytest.mark.parametrize(
    ("address", "variables", "reason"),
    [
        ("nowhere://bucket/run", {}, "nowhere"),
        ("s3://bucket/run", {"AWS_ALLOW_HTTP": "perhaps"}, "AWS_..."),
    ],
    ids=["unknown scheme", "a variable with a wrong value"],
)
async def test_a_claim_to_a_store_that_cannot_be_opened_is_one_failed_sample(
    url, tmp_path, monkeypatch, address, variables, reason
):
    sent = ClaimStore(tmp_path, 1).check_in(make_trajectory(3, 1))
    assert sent.claim is not None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    there = sent.claim.model_copy(update={"pointer": f"{address}/claims/{sent.claim.pointer}"})
    async with asyncio.timeout(60):
        failed = await resolved(ClaimStore(tmp_path), sent.model_copy(update={"claim": there}))
    assert address in fault_of(failed) and reason in fault_of(failed)


async def test_a_run_through_the_store_goes_by_deltas_and_claims(server: str, tmp_path: Path) -> None:
    """bfloat16 weights of which a step changes few; workers see nothing of the trainer's folder."""
    config = simulated_config(
        tmp_path, model__dtype="bfloat16", rollout__engine="transformers",
        rollout__sampling={"max_tokens": 8}, trainer__policy="transformers", trainer__optimizer={"lr": 1e-6},
        trainer__steps=3, weights__url="s3://bucket/run", streams__claim_check_bytes=1,
        streams__claim_check_url="s3://bucket/run",
    )  # fmt: skip
    async with ServiceRun(tmp_path, config) as run:
        path = {"PYTHONPATH": os.pathsep.join([str(REPO), str(CLIENT)])}
        run.variables["trainer"] = variables(server) | path
        run.variables["rollout"] = run.variables["trainer"] | {
            "TIDEMILL_RUNS_DIR": str(tmp_path / "nothing here"),
            "TIDEMILL_CACHE_DIR": str(tmp_path / "cache"),
        }
        run.variables["reward"] = run.variables["rollout"]
        run.start_all()
        assert await run.wait("trainer") == 0, run.log_of("trainer") + run.log_of("rollout")
        await assert_nothing_lost(run.broker, run.keys, 3 * 4)
        entries = await read_raw(run.broker, run.keys.trajectories())
        claims = [codec.decode(fields, Trajectory).claim for _, fields in entries]
        pointers = [claim.pointer for claim in claims if claim]
        assert len(pointers) == len(entries) > 0
        assert all(pointer.startswith(f"s3://bucket/run/{run.keys.run_id}/claims/") for pointer in pointers)
        assert not (run.run_dir / "claims").exists()
        scores = History(run.keys.run_id, None, run.broker).messages(StreamName.SCORES, Score)
        assert [score.error async for score in scores if score.error] == []
    cached = list((tmp_path / "cache").glob("*/weights/v*/delta-*"))
    assert len({path.parent for path in cached}) == 3, "every version after the first was a delta"
    assert "weights downloaded" in run.log_of("rollout")
    assert "other weights" not in run.log_of("rollout")
