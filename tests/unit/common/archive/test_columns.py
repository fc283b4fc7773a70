"""Messages as columns: what is read back is what was written, byte for byte."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.consumers import make_ticket
from tests.support.message_strategies import messages, plain
from tests.support.recorded_sessions import as_session
from tests.support.trajectories import make_trajectory
from tidemill.common.archive import columns
from tidemill.common.archive.columns import ORIGINAL, columns_of, records_of, table_of, widen
from tidemill.common.streams import Entry, Garbled, decoded
from tidemill.common.wire import codec
from tidemill.common.wire.messages import (
    Commit,
    DeadLetter,
    Message,
    SamplingParams,
    Score,
    Ticket,
    Trajectory,
    WeightManifest,
)

TYPES: tuple[type[Message], ...] = (Ticket, Trajectory, Score, WeightManifest, Commit, DeadLetter)


def through_parquet(table: pa.Table) -> pa.Table:
    file = pa.BufferOutputStream()
    pq.write_table(table, file, compression="zstd")
    return pq.read_table(pa.BufferReader(file.getvalue()))


def written(message: Message, **fields: Any) -> bytes:
    """The payload with some fields set as they never come from this release."""
    return bytes(msgpack.packb(msgpack.unpackb(codec.encode_payload(message)) | fields))


def newer_session() -> bytes:
    made = codec.encode_payload(as_session(make_trajectory()))
    return written(as_session(make_trajectory()), session=msgpack.unpackb(made)["session"] | {"mood": 1})


@given(st.lists(messages, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_every_message_survives_the_archive(several: list[Message]) -> None:
    kind = type(several[0])
    same = [message for message in several if type(message) is kind]
    raw = [(f"{2**63 + n}-{n}", codec.encode(message)) for n, message in enumerate(same)]
    table, _ = table_of(raw, kind)
    found = list(records_of(through_parquet(table), kind))
    assert found == [Entry(entry_id, message) for (entry_id, _), message in zip(raw, same, strict=True)]
    assert [codec.encode(record.message) for record in found] == [fields for _, fields in raw]


def test_what_this_release_writes_needs_no_original_beside_its_columns() -> None:
    logprobs = np.array([-0.0, math.nan, -math.inf], dtype=np.float32)
    made = [make_trajectory(extra={"a": [1, 1.0, None, "ä\0"]}), make_trajectory(logprobs=logprobs)]
    made.append(as_session(make_trajectory()))
    table, _ = table_of([(f"{n}-0", codec.encode(m)) for n, m in enumerate(made, 1)], Trajectory)
    assert table[ORIGINAL].null_count == 3
    back = [record.message for record in records_of(through_parquet(table), Trajectory)]
    assert [codec.encode(m) for m in back] == [codec.encode(m) for m in made]


@pytest.fixture
def without_min_p(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An archive that has not heard of one of the fields of a ticket's sampling."""
    known = [("max_tokens", pa.int64()), ("temperature", pa.float64()), ("top_p", pa.float64())]
    column = replace(columns._BY_NAME["sampling"], type=pa.struct([*known, ("top_k", pa.int64())]))
    monkeypatch.setitem(columns._BY_NAME, "sampling", column)
    columns_of.cache_clear()
    yield
    columns_of.cache_clear()


def test_a_field_that_its_column_does_not_know_is_not_lost(without_min_p: None) -> None:
    sampling = [SamplingParams(max_tokens=4, min_p=min_p) for min_p in (0.0, 0.05)]
    tickets = [make_ticket(n).model_copy(update={"sampling": one}) for n, one in enumerate(sampling)]
    table, _ = table_of([(f"{n}-0", codec.encode(m)) for n, m in enumerate(tickets, 1)], Ticket)
    assert table[ORIGINAL].is_valid().to_pylist() == [False, True]
    found = records_of(through_parquet(table), Ticket)
    assert [record.message for record in found if isinstance(record, Entry)] == tickets


def test_sessions_are_found_by_what_all_their_segments_have() -> None:
    made = [make_trajectory(), as_session(make_trajectory())]
    table, messages = table_of([(f"{n}-0", codec.encode(m)) for n, m in enumerate(made, 1)], Trajectory)
    assert table["num_turns"].to_pylist() == [None, 3]
    assert table["max_version"].to_pylist() == [0, 3], "version 3 made the fork"
    bounds: dict[str, tuple[float, float]] = {}
    widen(bounds, messages)
    assert bounds["version"] == (0, 3)


ODD = {
    "an unknown newer field": {b"v": b"1.7", b"p": written(make_trajectory(), colour="blue")},
    "bytes where JSON has none": codec.encode(make_trajectory(extra={"raw": b"\xff"})),
    "a number that is not one": codec.encode(make_trajectory(ground_truth=math.nan)),
    "a ticket beyond 64 bits": codec.encode(make_trajectory(ticket=2**63 + 5)),
    "a version beyond 64 bits": codec.encode(make_trajectory(spans=((2**63 + 5, 0),))),
    "a float sent as an integer": {b"v": b"1.0", b"p": written(make_trajectory(), finished_at=3)},
    "a default that was sent": {b"v": b"1.0", b"p": written(make_trajectory(), worker="")},
    "a field beside the payload": {**codec.encode(make_trajectory()), b"x": b"y"},
    "a session with an unknown newer field": {b"v": b"1.0", b"p": newer_session()},
    "a newer major schema": {**codec.encode(make_trajectory()), b"v": b"2.0"},
    "no message at all": {b"v": b"1.0", b"p": b"\xc1"},
    "no payload": {b"whatever": b"\x00\xff"},
}


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD.keys())
def test_what_columns_cannot_say_keeps_its_bytes(fields: dict[bytes, bytes]) -> None:
    plain_entry = codec.encode(make_trajectory(7))
    raw = [("5-0", plain_entry), ("6-0", fields), ("7-1", plain_entry)]
    table, _ = table_of(raw, Trajectory)
    assert table[ORIGINAL].null_count == 2
    before, odd, after = records_of(through_parquet(table), Trajectory)
    assert [(r.entry_id, codec.encode(r.message)) for r in (before, after)] == [raw[0], raw[2]]
    expected = decoded(b"6-0", fields, Trajectory)
    assert type(odd) is type(expected)
    if isinstance(odd, Garbled):
        assert odd == expected
    else:
        assert codec.encode(odd.message) == codec.encode(expected.message)
    kept = table[ORIGINAL].to_pylist()[1]
    assert {item["name"]: item["value"] for item in kept} == fields


@given(tree=st.dictionaries(st.sampled_from([*sorted(Score.model_fields), "new"]), plain))
@settings(max_examples=40, deadline=None)
def test_no_payload_whatever_stops_the_archive(tree: dict[str, Any]) -> None:
    fields = {b"v": b"1.0", b"p": msgpack.packb(tree)}
    table, _ = table_of([("1-0", fields)], Score)
    (found,) = records_of(through_parquet(table), Score)
    assert found == decoded(b"1-0", fields, Score)


@pytest.mark.parametrize("kind", TYPES)
def test_every_field_of_a_message_has_a_column(kind: type[Message]) -> None:
    assert [column.name for column in columns_of(kind)] == list(kind.model_fields)


def test_files_of_an_older_release_lack_columns_and_can_be_read() -> None:
    table, _ = table_of([("1-0", codec.encode(make_trajectory()))], Trajectory)
    assert list(records_of(table.drop_columns(["text"]), Trajectory)) == [
        Entry("1-0", make_trajectory(text=""))
    ]


def test_programs_find_typed_columns() -> None:
    table, _ = table_of([("5-2", codec.encode(make_trajectory(3, 1, extra={"a": 1})))], Trajectory)
    (row,) = through_parquet(table).to_pylist()
    assert (row["id"], row["id_ms"], row["ticket"], row["index"]) == ("5-2", 5, 3, 1)
    assert row["completion_ids"] == [0, 1, 2] and row["logprobs"] == [-0.5, -0.5, -0.5]
    assert (row["text"], row["ground_truth"], row["extra"]) == ("#### 1", '"1"', '{"a": 1}')
    assert row["spans"] == [{"version": 0, "first_token": 0}] and row["loss_mask"] is None
