"""What a message says survives the wire, and no bytes whatever do more harm than a CodecError."""

import math
import pickle
import re
import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from tests.support.message_strategies import messages, plain, trajectories
from tests.support.trajectories import make_trajectory
from tidemill.common.errors import CodecError
from tidemill.common.process.programs import ROOT
from tidemill.common.wire import codec
from tidemill.common.wire.arrays import MAX_TOKENS, BitArray, Float32Array, Int32Array, pack_bits
from tidemill.common.wire.codec import pack, sendable
from tidemill.common.wire.messages import (
    Commit,
    DeadLetter,
    SamplingParams,
    Score,
    ScoreStatus,
    Ticket,
    Trajectory,
    WeightFile,
    WeightManifest,
)

TYPES = (Ticket, Trajectory, Score, WeightManifest, Commit, DeadLetter)


@given(messages)
@settings(max_examples=150, deadline=None)
def test_every_message_survives_the_wire(message):
    decoded = codec.decode(codec.encode(message), type(message))
    assert decoded == message


def test_messages_with_equal_arrays_are_equal_and_others_are_not():
    assert make_trajectory() == make_trajectory()
    assert make_trajectory() != make_trajectory(prompt_ids=np.arange(1, 5))
    assert make_trajectory() != make_trajectory(loss_mask=np.ones(3, dtype=np.bool_))


def test_empty_and_false_values_that_are_not_the_default_are_kept():
    values: list[Any] = [[], {}, "", 0, False]
    for ground_truth in values:
        sent = make_trajectory(ground_truth=ground_truth)
        assert codec.decode(codec.encode(sent), Trajectory).ground_truth == ground_truth


@pytest.mark.parametrize(("share", "said"), [(0.0, set()), (0.5, {"min_p"})])
def test_a_ticket_says_of_min_p_only_where_it_is_on(share, said):
    sampling = SamplingParams(max_tokens=4, min_p=share)
    fields = {"ticket": 0, "step": 0, "min_version": 0, "group_size": 1, "sampling": sampling}
    ticket = Ticket(prompt_ids=np.ones(1, np.int32), **fields)
    written = msgpack.unpackb(codec.encode_payload(ticket))["sampling"]
    assert set(written) == {"max_tokens", "temperature", "top_p", "top_k"} | said
    assert codec.decode(codec.encode(ticket), Ticket) == ticket


def test_on_the_wire_are_little_endian_bytes_and_no_defaults():
    ids = np.array([1, 7, -2, 7, 3])[::2]  # what a strided array shows
    sent = make_trajectory(completion_ids=ids, logprobs=np.array([-0.5, -1.0, 0.0]), text="")
    written = msgpack.unpackb(codec.encode_payload(sent))
    assert written["completion_ids"] == struct.pack("<3i", 1, -2, 3)
    assert written["logprobs"] == struct.pack("<3f", -0.5, -1.0, 0.0)
    assert {"text", "loss_mask", "extra", "finish", "worker"}.isdisjoint(written)


def test_decoded_arrays_are_read_only_views_on_the_bytes_received():
    message = codec.decode(codec.encode(make_trajectory()), Trajectory)
    for array in (message.prompt_ids, message.completion_ids, message.logprobs):
        assert type(array.base) is bytes
        assert not array.flags.writeable


@pytest.mark.parametrize("more", [{"nested": {"a": [1]}}, {"needs": ["claim"]}])
def test_fields_of_a_newer_minor_schema_are_ignored_where_they_are_not_needed(more):
    tree = msgpack.unpackb(codec.encode_payload(make_trajectory())) | {"colour": "blue"} | more
    decoded = codec.decode({b"v": b"1.7", b"p": msgpack.packb(tree), b"extra": b"x"}, Trajectory)
    assert decoded == make_trajectory()


@pytest.mark.parametrize("needs", [["colour"], ["claim", "colour"], [["claim"]], "claim", 7, {"claim": 1}])
def test_a_message_that_needs_what_nobody_here_understands_is_refused(needs):
    tree = msgpack.unpackb(codec.encode_payload(make_trajectory())) | {"colour": "blue", "needs": needs}
    with pytest.raises(CodecError, match="update the older side"):
        codec.decode({b"v": b"1.9", b"p": msgpack.packb(tree)}, Trajectory)


SCHEMAS = [b"", b"1", b"one.two", b"-1.0", b"1.0.0", b"9" * 1000, b"\xff.\xff"]


@pytest.mark.parametrize("schema", [b"2.0", *SCHEMAS])
def test_a_malformed_or_newer_major_schema_is_refused(schema):
    words = r"schema 2\.0 .* reads 1\.x; update the older side" if schema == b"2.0" else r"major\.minor"
    with pytest.raises(CodecError, match=words):
        codec.decode({**codec.encode(make_trajectory()), b"v": schema}, Trajectory)


@pytest.mark.parametrize("missing", [b"v", b"p"])
def test_an_entry_without_one_of_its_fields_is_refused(missing):
    fields = codec.encode(make_trajectory())
    del fields[missing]
    with pytest.raises(CodecError, match="expected fields v and p"):
        codec.decode(fields, Trajectory)


def test_a_payload_above_the_limit_is_refused_before_it_is_unpacked():
    with pytest.raises(CodecError, match="exceed the limit of 100"):
        codec.decode({b"v": b"1.0", b"p": b"\xc1" * 101}, Trajectory, max_bytes=100)


@pytest.mark.parametrize("inner", [b"\x90", b"\x80", b"\xc0"], ids=["lists", "maps", "values"])
def test_lists_in_lists_cannot_hold_more_than_one_list_may(inner):
    many = b"\xdc\xff\xff" + inner * 0xFFFF
    with pytest.raises(CodecError):
        codec.unpack(b"\xdc\x00\x11" + many * 17)
    assert len(codec.unpack(b"\xdc\x00\x02" + many * 2)) == 2


def test_without_a_limit_a_message_may_be_as_large_as_its_payload():
    """Who sets `streams.max_message_mb` above 64 means it."""
    large = make_trajectory(text="x" * (65 << 20))
    assert codec.decode(codec.encode(large), Trajectory).text == large.text


@given(payload=st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_random_bytes_are_only_ever_a_codec_error(payload):
    for message_type in TYPES:
        with pytest.raises(CodecError):
            codec.decode({b"v": b"1.0", b"p": payload}, message_type)


@given(tree=st.dictionaries(st.sampled_from([*sorted(Trajectory.model_fields), "status", "fields"]), plain))
@settings(max_examples=150, deadline=None)
def test_maps_with_fields_of_any_type_are_only_ever_a_codec_error(tree):
    tree.pop("sampling", None)
    for message_type in TYPES:
        try:
            codec.decode({b"v": b"1.0", b"p": msgpack.packb(tree)}, message_type)
        except CodecError:
            continue
        assert message_type is Score  # the only one whose required fields can be met by chance


@given(trajectories(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_message_is_decoded_or_a_codec_error(message, data):
    payload = bytearray(codec.encode_payload(message))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for damaged in (bytes(payload), bytes(payload[:cut])):
        try:
            decoded = codec.decode({b"v": b"1.0", b"p": damaged}, Trajectory)
        except CodecError:
            continue
        assert len(decoded.logprobs) == decoded.num_tokens


HOSTILE = {
    "a map that claims 4 billion entries": b"\xdf\xff\xff\xff\xff",
    "an array that claims 4 billion elements": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "bytes that claim 4 GB": b"\x81\xa1a\xc6\xff\xff\xff\xff",
    "text that claims 4 GB": b"\x81\xdb\xff\xff\xff\xff", "an extension type": b"\x81\xa1a\xc7\x04\x05abcd",
    "arrays nested a million deep": b"\x91" * 1_000_000,
    "arrays nested, each claiming 900 thousand elements": b"\xdd\x00\x0d\xbb\xa0" * 200_000,
    "maps nested a million deep": b"\x81\xa1a" * 1_000_000, "something after the message": b"\x80\x80",
    "a key that is a number": b"\x81\x01\x02", "a key that is bytes": b"\x81\xc4\x06ticket\x02",
    "text that is not UTF-8": b"\x81\xa1a\xa2\xff\xfe", "a list": b"\x93\x01\x02\x03", "a number": b"\x07",
    "nothing": b"", "a pickle": pickle.dumps({"ticket": 1}),
    "a pickle that runs a command": b"cposix\nsystem\n(S'false'\ntR.", "JSON": b'{"ticket": 1}',
}  # fmt: skip


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_payloads_are_only_ever_a_codec_error(payload):
    tracemalloc.start()
    try:
        with pytest.raises(CodecError) as caught:
            codec.decode({b"v": b"1.0", b"p": payload}, Trajectory)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    said = str(caught.value)
    assert len(said) < 500 and "\n" not in said and not said.endswith(": ")
    assert peak < 128 << 20


BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer logprobs than tokens": ({"logprobs": b"\0" * 8}, "3 completion ids but 2 logprobs"),
    "a mask of another length": ({"loss_mask": b"\x00\xff"}, "a loss mask of 8"),
    "no version spans": ({"spans": []}, "must start at token 0"),
    "spans that start late": ({"spans": [[0, 1]]}, "must start at token 0"),
    "spans beyond the tokens": ({"spans": [[0, 0], [1, 3]]}, "do not fit"),
    "spans that go back": ({"spans": [[0, 0], [1, 2], [2, 1]]}, "do not fit"),
    "a negative version": ({"spans": [[-1, 0]]}, "negative"),
    "an index outside its group": ({"index": 4096}, "outside a group"),
    "a negative ticket": ({"ticket": -1}, "ticket"),
    "a ticket as text": ({"ticket": "first"}, "ticket"),
    "an unknown finish": ({"finish": "crash"}, "finish"),
}


@pytest.mark.parametrize(("change", "says"), BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
def test_a_field_that_contradicts_the_others_is_named(change, says):
    tree = msgpack.unpackb(codec.encode_payload(make_trajectory())) | change
    with pytest.raises(CodecError, match=re.escape(says)):
        codec.decode({b"v": b"1.0", b"p": msgpack.packb(tree)}, Trajectory)


def test_what_cannot_be_sent_is_refused_by_the_sender():
    with pytest.raises(TypeError, match="object cannot be sent"):
        codec.encode(make_trajectory(extra={"thing": object()}))


BROKEN = "half \ud800 a pair"


def test_lost_characters_are_marked_and_the_rest_is_kept():
    tree = {"text": BROKEN, "list": ["\udfff", 1], BROKEN: None}
    marked = "half \ufffd a pair"
    assert msgpack.unpackb(pack(tree)) == {"text": marked, "list": ["\ufffd", 1], marked: None}
    assert sendable(BROKEN) == marked
    assert sendable("\U0001f600 whole") == "\U0001f600 whole"


def test_every_text_of_a_message_can_be_sent():
    texts: dict[str, Any] = {"error": BROKEN, "detail": {BROKEN: [BROKEN]}, "components": {BROKEN: 1.0}}
    score = Score(ticket=1, index=0, status=ScoreStatus.FAILED, **texts)
    again = codec.decode(codec.encode(score), Score)
    assert again.error == "half \ufffd a pair"
    assert again.detail == {"half \ufffd a pair": ["half \ufffd a pair"]}


UNSAFE = re.compile(
    r"^\s*(?:import|from)\s+(?:cloud)?(?:pickle|dill|marshal|shelve|joblib)\b"
    r"|\btorch\.load\(|allow_pickle|read_pickle|\byaml\.(?:unsafe_|full_)?load\("
    r"|trust_remote_code=True|PickleSerializer"
)


RUNS_TEXT = re.compile(r"(?<![.\w])(?:eval|exec)\(")
SANDBOX = "services/reward/sandbox/"
"""Where running untrusted code is the purpose."""
COMPILED = ("services/reward/sandbox/warm.py", "services/reward/sandbox/template.py")
"""Hand code that the worker has compiled to a jail, which trusts its worker. Nothing comes back that way."""


RQ = re.compile(r"^\s*(?:import rq\b|from rq\S* import .*\b(?:Queue|\w*Worker|Job|Repeat)\b)", re.MULTILINE)
"""RQ pickles its jobs unless it is given another serializer."""


OTHERS_WAY = ROOT / "benchmarks" / "transport.py"
"""It measures beside PipelineRL's streams, which hold pickles; it reads its own alone."""


def test_nothing_in_the_repository_unpickles_or_runs_what_it_reads():
    folders = ("common", "services", "tidemill", "benchmarks", "examples", "infra")
    paths = {path for folder in folders for path in (ROOT / folder).rglob("*.py")} - {OTHERS_WAY}
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    offenders = [
        f"{name}:{number}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if (UNSAFE.search(line) and not (name in COMPILED and line.strip() == "import marshal"))
        or (RUNS_TEXT.search(line) and not name.startswith(SANDBOX))
    ]
    offenders += [name for name, text in texts.items() if RQ.search(text) and "JSONSerializer" not in text]
    assert len(texts) > 100
    assert offenders == []


@pytest.mark.parametrize(
    "line", ["import pickle", "    from dill import loads", "torch.load(path, weights_only=True)",
             "np.load(path, allow_pickle=True)", "yaml.load(text)", "value = eval(text)"],
)  # fmt: skip
def test_what_would_unpickle_is_found(line):
    assert UNSAFE.search(line) or RUNS_TEXT.search(line)
    assert not UNSAFE.search("model.eval()") and not RUNS_TEXT.search("model.eval()")


def test_the_oldest_version_is_found_wherever_it_stands_and_an_absent_mask_trains_every_token():
    assert make_trajectory(spans=((5, 0), (4, 1))).min_version == 4
    assert make_trajectory().mask.tolist() == [True, True, True]
    masked = make_trajectory(loss_mask=np.array([True, False, True]))
    assert masked.mask.tolist() == [True, False, True]
    empty = make_trajectory(completion_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32))
    assert (empty.num_tokens, empty.min_version) == (0, 0), "an empty completion has one span"


def test_a_message_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        make_trajectory().ticket = 7


@pytest.mark.parametrize(
    ("status", "right", "wrong", "words"),
    [
        (ScoreStatus.FAILED, None, 0.0, "cannot have value"),
        (ScoreStatus.TIMEOUT, None, 0.0, "cannot have value"),
        (ScoreStatus.OK, 0.0, None, "cannot have value"),
        *((ScoreStatus.OK, 1.0, value, "finite") for value in (math.nan, math.inf, -math.inf)),
    ],
)
def test_a_success_has_a_finite_value_and_a_failure_has_none(status, right, wrong, words):
    assert Score(ticket=0, index=0, status=status, value=right).value == right
    with pytest.raises(ValidationError, match=words):
        Score(ticket=0, index=0, status=status, value=wrong)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", ".hidden", "", "x" * 201])
def test_a_weight_file_stays_inside_its_folder(name):
    with pytest.raises(ValidationError):
        WeightFile(name=name, num_bytes=1, checksum="0" * 32)


@pytest.mark.parametrize("folder", ["../v00000001", "v1", "v00000001/..", "v00000001\n", "/etc", "../.."])
def test_a_version_stays_inside_the_weights_folder(folder):
    with pytest.raises(ValidationError):
        WeightManifest(version=1, folder=folder, files=(), digest="0" * 32)


def test_a_commit_lists_what_it_trained_once_for_each_update():
    commit = Commit(
        step=0, version=1, groups=(4, 5), mini_batches=((((4, 0), (4, 1)), ((5, 0),)), (((4, 0),),))
    )
    assert commit.trained_keys == [(4, 0), (4, 1), (5, 0), (4, 0)]


class Fields(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    ids: Int32Array = np.zeros(0, dtype=np.int32)
    values: Float32Array = np.zeros(0, dtype=np.float32)
    bits: BitArray = np.zeros(0, dtype=np.bool_)


@given(st.lists(st.booleans(), max_size=70))
def test_bits_survive_packing_at_every_length(bits):
    packed = pack_bits(np.array(bits, dtype=np.bool_))
    assert len(packed) == 1 + (len(bits) + 7) // 8
    unpacked = Fields(bits=packed).bits
    assert unpacked.dtype == np.bool_
    assert unpacked.tolist() == bits


def test_bits_are_packed_first_bit_highest_behind_the_number_of_padding_bits():
    assert pack_bits(np.array([True, False, True])) == bytes([5, 0b10100000])
    assert pack_bits(np.zeros(0, dtype=np.bool_)) == b"\x00"


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview])
def test_bytes_are_viewed_and_not_copied(container):
    data = container(np.arange(5, dtype="<i4").tobytes())
    ids = Fields(ids=data).ids
    assert ids.tolist() == [0, 1, 2, 3, 4]
    assert np.shares_memory(ids, np.frombuffer(data, dtype=np.uint8))


def test_an_array_of_the_right_type_is_kept_as_it_is():
    ids = np.arange(5, dtype=np.int32)
    assert np.shares_memory(Fields(ids=ids).ids, ids)


def test_lists_and_wider_arrays_are_converted():
    fields = Fields(ids=[1, 2], values=np.array([0.5], dtype=np.float64))
    assert fields.ids.dtype == np.int32
    assert fields.values.dtype == np.float32
    assert Fields(ids=[]).ids.dtype == np.int32


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("ids", b"123", "3 bytes are not a whole number of int32 values"),
        ("ids", np.zeros((2, 2), dtype=np.int32), r"got shape \(2, 2\)"),
        ("ids", np.int32(3), r"got shape \(\)"),
        ("ids", [0.5], "expected int32, got dtype float64"),
        ("ids", [2**31], "do not fit int32"),
        ("values", [1, 2], "expected float32, got dtype int64"),
        ("ids", bytes(4 * (MAX_TOKENS + 1)), f"exceed the limit of {MAX_TOKENS}"),
        ("bits", b"\x00" + bytes(MAX_TOKENS // 8 + 1), "cannot have"),
        ("bits", b"\x08\xff\xff", "cannot have 8 padding bits"),
        ("bits", b"\x01", "cannot have 1 padding bits"),
        ("ids", ["a", "b"], "ids"),
        ("ids", {"a": 1}, "ids"),
        ("ids", None, "ids"),
        ("bits", "text", r"got shape \(\)"),
        ("bits", [0.0, 1.0], "expected a mask of booleans"),
        ("bits", [0, 2], "expected a mask of booleans"),
    ],
)
def test_what_is_not_such_an_array_is_refused(field, value, says):
    with pytest.raises(ValidationError, match=says):
        Fields(**{field: value})
