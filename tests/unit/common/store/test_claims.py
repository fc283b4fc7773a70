"""A large trajectory lies beside the stream; what comes back is the same, or says what is wrong."""

import asyncio
import errno
import os
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest
import xxhash

from tests.support.sessions import played
from tests.support.training import make_score, trainer_config
from tests.support.trajectories import make_trajectory
from tidemill.common.errors import ConfigError, RefusedError, StoreError, UnreadableError
from tidemill.common.files import StorageError
from tidemill.common.store import ClaimStore, claims, resolved
from tidemill.common.store.claims import with_choices_in
from tidemill.common.wire import codec
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.messages import Choices, ScoreStatus, Trajectory, fault_of
from tidemill.common.wire.segments import check_tokens
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.group_filter import ENVIRONMENT_FAULT, NO_PAYLOAD, GroupFilter


def large(ticket: int = 3, index: int = 1, num_tokens: int = 5000) -> Trajectory:
    ids = np.arange(num_tokens, dtype=np.int32)
    logprobs = np.full(num_tokens, -0.25, np.float32)
    return make_trajectory(ticket, index, group_size=4, completion_ids=ids, logprobs=logprobs, text="x" * 99)


def sent(message: Trajectory) -> Trajectory:
    """Through the stream."""
    return codec.decode_payload(codec.encode_payload(message), Trajectory)


def test_a_claim_is_pointer_size_and_digest_and_its_file_the_bytes_of_the_entry(tmp_path):
    store = ClaimStore(tmp_path, 1000)
    whole = played(large())
    payload = codec.encode_payload(whole)
    claim = store.check_in(whole)
    digest = xxhash.xxh3_128(payload).hexdigest()
    wire = msgpack.unpackb(codec.encode_payload(claim))
    assert wire["claim"] == {"pointer": f"3-1-{digest}", "num_bytes": len(payload), "digest": digest}
    assert (wire["ticket"], wire["index"], wire["completion_ids"]) == (3, 1, b"")
    assert len(codec.encode_payload(claim)) < 400
    assert (tmp_path / "claims" / f"3-1-{digest}").read_bytes() == payload
    assert codec.encode_payload(store.resolve(sent(claim))) == payload


def test_a_release_that_knows_no_claims_takes_none_for_an_empty_completion(tmp_path):
    """It checks what a claim leaves over, and later ones what the payload says that it needs."""
    claim = ClaimStore(tmp_path, 1).check_in(large())
    with pytest.raises(ValueError, match="spans"):
        check_tokens(claim.completion_ids, claim.logprobs, claim.loss_mask, claim.spans)
    assert msgpack.unpackb(codec.encode_payload(claim))["needs"] == ["claim"]
    assert codec.encode(claim)[b"v"] == b"1.1"
    assert "needs" not in msgpack.unpackb(codec.encode_payload(large()))
    assert claim.min_version == large().min_version


def test_what_is_small_goes_through_the_stream_as_it_always_did(tmp_path):
    sample = make_trajectory()
    limit = len(codec.encode_payload(make_trajectory()))
    assert ClaimStore(tmp_path).check_in(sample) is sample
    assert ClaimStore(tmp_path, limit + 1).check_in(sample) is sample
    assert not (tmp_path / "claims").exists() and b"claim" not in codec.encode_payload(sample)
    assert ClaimStore(tmp_path, limit).check_in(sample).claim is not None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "instead of"),
        (lambda path: path.write_bytes(bytes(len(path.read_bytes()))), "does not match its digest"),
        (lambda path: None, "is of sample (3, 1), claimed for (4, 1)"),
    ],
    ids=["missing", "half-written", "wrong digest", "of another sample"],
)
def test_a_missing_or_wrong_payload_is_a_fault_of_its_sample_that_says_why(tmp_path, damage, said):
    store = ClaimStore(tmp_path, 1000)
    claim = store.check_in(large())
    damage(next((tmp_path / "claims").iterdir()))
    if "claimed for" in said:
        claim = claim.model_copy(update={"ticket": 4})
    broken = store.resolve(sent(claim))
    assert broken.key == claim.key and broken.num_tokens == 0
    assert said in fault_of(broken) and "claims" in fault_of(broken)


def test_a_payload_above_the_limit_is_a_fault_before_it_is_read(tmp_path, monkeypatch):
    claim = ClaimStore(tmp_path, 1000).check_in(large())
    num_bytes = len(codec.encode_payload(large()))
    whole = ClaimStore(tmp_path, max_bytes=num_bytes).resolve(claim)
    assert codec.encode_payload(whole) == codec.encode_payload(large())
    monkeypatch.delattr(os, "open")
    assert str(num_bytes) in fault_of(ClaimStore(tmp_path, max_bytes=num_bytes - 1).resolve(claim))


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("away"))


def replaced_by_a_file(folder: Path) -> None:
    moved(folder)
    folder.write_text("what somebody left here")


def replaced_by_a_link_to_nowhere(folder: Path) -> None:
    moved(folder)
    folder.symlink_to("nowhere")


AWAY = [moved, replaced_by_a_file, replaced_by_a_link_to_nowhere]


@pytest.mark.parametrize("go_away", AWAY)
async def test_while_the_folder_is_away_nothing_is_said_of_any_payload(tmp_path, go_away):
    """And a new one is not made in its place: what it holds would pass for missing."""
    store = ClaimStore(tmp_path, 1000)
    folder = tmp_path / "claims"
    claim = store.check_in(large())
    go_away(folder)
    with pytest.raises(StoreError):
        store.resolve(sent(claim))
    assert fault_of(await resolved(store, claim, is_patient=False)), "a person does not wait"
    with pytest.raises(StorageError):
        store.check_in(large(2))
    assert not folder.is_dir()
    folder.unlink(missing_ok=True)
    folder.with_name("away").rename(folder)
    assert codec.encode_payload(store.resolve(sent(claim))) == codec.encode_payload(large())


def test_a_folder_that_comes_back_during_a_look_says_nothing_of_its_payloads(tmp_path, monkeypatch):
    store = ClaimStore(tmp_path, 1000)
    folder = tmp_path / "claims"
    real_open = os.open
    claim = store.check_in(large())
    moved(folder)

    def open_late(*arguments, **options):
        try:
            return real_open(*arguments, **options)
        finally:
            if not folder.exists():
                folder.with_name("away").rename(folder)

    monkeypatch.setattr(os, "open", open_late)
    with pytest.raises(StoreError) as caught:
        store.resolve(claim)
    assert not isinstance(caught.value, UnreadableError)
    assert fault_of(store.resolve(claim)) == ""


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
def test_a_file_that_cannot_be_read_just_now_is_not_missing(tmp_path, monkeypatch, number):
    store = ClaimStore(tmp_path, 1000)
    claim = store.check_in(large())

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StoreError):
        store.resolve(sent(claim))


@pytest.mark.parametrize("damage", [Path.mkdir, lambda path: path.symlink_to(path.name)])
async def test_a_payload_that_alone_cannot_be_read_is_a_fault_after_some_looks(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(claims, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(claims, "LAST_PAUSE_S", 0.02)
    store = ClaimStore(tmp_path, 1000)
    claim = store.check_in(large())
    readable = store.check_in(large(4))
    path = tmp_path / "claims" / claim.claim.pointer
    path.unlink()
    damage(path)
    with pytest.raises(UnreadableError):
        store.resolve(sent(claim))
    failed = await resolved(store, sent(claim))
    assert str(path) in failed.fault and failed.key == claim.key
    assert (await resolved(store, sent(readable))).fault == ""


async def test_reads_that_hang_leave_the_threads_that_everybody_shares(tmp_path):
    """Files that block whoever opens them, as a shared file system does whose server is away."""
    store = ClaimStore(tmp_path, 1000)
    samples = [large(ticket) for ticket in range(40)]
    sent_claims = [store.check_in(sample) for sample in samples]
    paths = [tmp_path / "claims" / claim.claim.pointer for claim in sent_claims]
    payloads = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
        os.mkfifo(path)
    reading = [asyncio.create_task(resolved(store, claim)) for claim in sent_claims]
    try:
        async with asyncio.timeout(60):
            await asyncio.sleep(0)  # all have begun
            await asyncio.to_thread(os.getpid)
            await asyncio.get_running_loop().getaddrinfo("localhost", 80)
            assert not any(task.done() for task in reading)
            for path, payload in zip(paths, payloads, strict=True):
                await asyncio.to_thread(path.write_bytes, payload)
            wholes = await asyncio.gather(*reading)
    finally:
        for task in reading:
            task.cancel()
        for path in paths:  # releases a thread that still waits
            os.close(os.open(path, os.O_RDWR))
    assert list(map(codec.encode_payload, wholes)) == payloads


async def test_a_payload_in_a_store_that_this_process_cannot_open_is_a_fault_with_the_remedy(
    tmp_path, monkeypatch
):
    """Waiting does not install a library."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    claim = ClaimStore(tmp_path, 1000).check_in(large())
    there = claim.claim.model_copy(update={"pointer": "s3://bucket/run/claims/" + claim.claim.pointer})
    async with asyncio.timeout(60):
        failed = await resolved(ClaimStore(tmp_path), claim.model_copy(update={"claim": there}))
    assert there.pointer in fault_of(failed) and "tidemill[objects]" in fault_of(failed)


def test_a_worker_that_does_not_see_the_runs_folder_makes_none(tmp_path):
    with pytest.raises(StorageError):
        ClaimStore(tmp_path / "not mounted", 1000).check_in(large())
    assert not list(tmp_path.iterdir())


def test_half_a_file_never_has_a_name_that_a_claim_could_give(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tidemill.common.files.os.fsync", fail)
    with pytest.raises(StorageError, match="free some space"):
        ClaimStore(tmp_path, 1000).check_in(large())
    assert not list((tmp_path / "claims").iterdir())


def test_a_file_goes_only_when_its_ticket_is_settled_and_no_entry_claims_it(tmp_path):
    store = ClaimStore(tmp_path, 1000)
    claims = {ticket: store.check_in(large(ticket)).claim for ticket in (1, 2, 3, 10)}
    (tmp_path / "claims" / ".aside").write_text("of a writer at work")
    pointers = {ticket: claim.pointer for ticket, claim in claims.items() if claim}
    assert store.settled(3) == {pointers[1], pointers[2]}
    for ticket in (1, 3):  # what killed writers left goes with its ticket
        (tmp_path / "claims" / f".{pointers[ticket]}.0123abcd.aside").write_text("half")
    store.remove(store.settled(3) - {pointers[2]})
    names = {path.name for path in (tmp_path / "claims").iterdir()}
    assert names == {".aside", pointers[2], pointers[3], pointers[10], f".{pointers[3]}.0123abcd.aside"}


def faulty_group(tmp_path, statuses: dict[int, ScoreStatus]) -> Group:
    """Four samples; the second one's payload is gone."""
    store = ClaimStore(tmp_path, 1000)
    samples = {index: make_trajectory(0, index, group_size=4) for index in range(4)}
    claim = store.check_in(large(0, 1))
    next((tmp_path / "claims").iterdir()).unlink()
    samples[1] = store.resolve(claim)
    scores = {i: make_score(0, i, float(i) if s is ScoreStatus.OK else None) for i, s in statuses.items()}
    return Group(0, 0, samples, scores)


@pytest.mark.parametrize("status", [ScoreStatus.OK, ScoreStatus.FAILED])
@pytest.mark.parametrize(("policy", "fault"), [({}, ""), ({"reward__on_failure": 0.5}, ""), ({}, "it broke")])
def test_a_sample_without_its_payload_or_environment_is_left_out_whatever_its_score(
    tmp_path, status, policy, fault
):
    """It may have been scored while its file was there."""
    group = faulty_group(tmp_path, dict.fromkeys(range(4), ScoreStatus.OK) | {1: status})
    if fault:
        group.trajectories[1] = sent(make_trajectory(0, 1, group_size=4, fault=fault))
    refusal = GroupFilter(trainer_config(**policy, group_size=4)).apply(group, 0)
    assert refusal is None
    assert group.left_out == [(1, ENVIRONMENT_FAULT if fault else NO_PAYLOAD)]
    assert [sample.key[1] for sample in group.samples] == [0, 2, 3]
    assert [sample.index for sample in group.sampled] == [0, 2, 3], "an empty one is not short"


def test_a_group_that_failures_drop_says_what_is_missing(tmp_path):
    statuses = dict.fromkeys(range(4), ScoreStatus.OK)
    config = trainer_config(reward__on_failure="drop_group", group_size=4)
    refusal = GroupFilter(config).apply(faulty_group(tmp_path, statuses), 0)
    assert refusal is not None and "cannot be had" in refusal.detail


class RefusingObjects:
    """A store that answers 403 to everything, `num_refusals` times."""

    def __init__(self, num_refusals: int, payload: bytes = b"") -> None:
        self.num_refusals = num_refusals
        self.payload = payload

    def read_all(self, name: str) -> bytes:
        self._refuse()
        return self.payload

    def write(self, name: str, payload: bytes) -> None:
        self._refuse()

    def _refuse(self) -> None:
        self.num_refusals -= 1
        if self.num_refusals >= 0:
            raise RefusedError("it refuses this process's keys (status 403)")


def refusing_store(path: Path, monkeypatch: pytest.MonkeyPatch, objects: RefusingObjects) -> ClaimStore:
    monkeypatch.setattr(ClaimStore, "_objects", lambda _, url: objects)
    monkeypatch.setattr(claims, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(claims, "LONGEST_PAUSE_S", 0.01)
    return ClaimStore(path, 1, "s3://bucket/run")


async def test_a_store_that_refuses_the_keys_ends_its_readers_and_writers_with_the_reason(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(claims, "REFUSED_S", 0.05)
    claim = ClaimStore(tmp_path, 1).check_in(make_trajectory(3, 1))
    there = claim.model_copy(
        update={"claim": claim.claim.model_copy(update={"pointer": f"s3://bucket/run/{claim.claim.pointer}"})}
    )
    store = refusing_store(tmp_path, monkeypatch, RefusingObjects(10**6))
    with pytest.raises(ConfigError, match="status 403"):
        await resolved(store, sent(there))
    choices = make_trajectory(choices=Choices(rows={"kept": Rows.of_lists([[0, 9], [1], [2]])}))
    with pytest.raises(ConfigError, match="status 403"):
        await with_choices_in(store, choices)
    assert "status 403" in fault_of(await resolved(store, sent(there), is_patient=False)), "a person"


async def test_rights_that_come_late_are_waited_for(tmp_path, monkeypatch):
    whole = make_trajectory(3, 1)
    claim = ClaimStore(tmp_path, 1).check_in(whole)
    there = claim.model_copy(
        update={"claim": claim.claim.model_copy(update={"pointer": f"s3://bucket/run/{claim.claim.pointer}"})}
    )
    objects = RefusingObjects(3, codec.encode_payload(whole))
    read = await resolved(refusing_store(tmp_path, monkeypatch, objects), sent(there))
    assert codec.encode_payload(read) == codec.encode_payload(whole)
