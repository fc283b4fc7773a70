"""Rows of choices: what is on the wire, and what is refused."""

import msgpack
import numpy as np
import pytest

from tests.support.trajectories import make_trajectory
from tidemill.common.errors import CodecError
from tidemill.common.store import ClaimStore
from tidemill.common.wire import codec
from tidemill.common.wire.choices import ROUTES_FAULT, Rows
from tidemill.common.wire.messages import ChoiceRows, Choices, Trajectory, fault_of
from tidemill.common.wire.routes import Routing, find_routes_fault

KEPT = Rows.of_lists([[4, 7], [], [9]])
ROUTES = Rows(np.arange(6 * 2 * 2, dtype=np.uint8).reshape(6, 2, 2))
"""Of four prompt tokens and three of the completion, two layers, two experts."""


def chosen(**fields):
    return make_trajectory(3, 1, choices=Choices(rows={"kept": KEPT, "routes": ROUTES}), **fields)


def test_rows_are_cut_and_joined():
    assert len(KEPT) == 3 and len(ROUTES) == 6
    assert KEPT[1:] == Rows.of_lists([[], [9]]) and KEPT[3:] == Rows.nothing(0)
    assert Rows.joined([KEPT[:1], Rows.nothing(1), KEPT[2:]]) == KEPT
    assert Rows.joined([ROUTES[:2], ROUTES[2:]]) == ROUTES


def test_rows_come_back_from_the_wire():
    sent = ChoiceRows(ticket=3, index=1, tokens_digest="ab", rows={"kept": KEPT, "routes": ROUTES})
    payload = codec.encode_payload(sent)
    plain = msgpack.unpackb(payload)["rows"]
    assert plain["kept"] == {
        "version": 1,
        "dtype": "int32",
        "shape": [3],
        "values": np.array([4, 7, 9], "<i4").tobytes(),
        "offsets": np.array([0, 2, 2, 3], "<i4").tobytes(),
    }
    assert plain["routes"]["shape"] == [6, 2, 2] and plain["routes"]["dtype"] == "uint8"
    assert codec.decode_payload(payload, ChoiceRows) == sent


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": 2}, "version"),
        ({"dtype": "object"}, "dtype"),
        ({"shape": [-1]}, "shape"),
        ({"shape": [4]}, "rows"),
        ({"shape": 4}, "choices"),
        ({"values": None}, "choices"),
        ({"offsets": np.array([0, 2, 1, 3], "<i4").tobytes()}, "offsets"),
        ({"offsets": np.array([0, 2], "<i4").tobytes()}, "rows"),
    ],
)
def test_rows_that_are_not_what_they_say_are_refused(change, field):
    sent = ChoiceRows(ticket=3, index=1, tokens_digest="ab", rows={"kept": KEPT})
    tree = msgpack.unpackb(codec.encode_payload(sent))
    tree["rows"]["kept"] |= change
    with pytest.raises(CodecError, match=field):
        codec.decode_payload(msgpack.packb(tree), ChoiceRows)


def test_what_is_no_map_is_no_row():
    sent = ChoiceRows(ticket=3, index=1, tokens_digest="ab", rows={})
    tree = msgpack.unpackb(codec.encode_payload(sent)) | {"rows": {"kept": [1, 2]}}
    with pytest.raises(CodecError, match="rows"):
        codec.decode_payload(msgpack.packb(tree), ChoiceRows)


@pytest.mark.parametrize("rows", [{"kept": KEPT[:2]}, {"routes": ROUTES[:5]}, {"pixels": KEPT}])
def test_rows_of_other_tokens_are_refused(rows):
    with pytest.raises(ValueError, match=next(iter(rows))):
        make_trajectory(3, 1, choices=Choices(rows=rows))


def test_the_entry_has_pointer_size_and_digest_and_only_who_asks_reads_the_rows(tmp_path):
    store = ClaimStore(tmp_path)
    whole = chosen()
    with pytest.raises(AssertionError):
        codec.payload_of(whole, None)
    sent = codec.decode_payload(codec.payload_of(store.check_in_choices(whole), None), Trajectory)
    entry = msgpack.unpackb(codec.encode_payload(sent))
    assert entry["needs"] == ["choices"] and entry["choices"]["rows"] == {}
    claim = entry["choices"]["claim"]
    assert (tmp_path / "claims" / claim["pointer"]).stat().st_size == claim["num_bytes"]
    assert store.is_whole(sent) and store.resolve(sent) is sent
    store.reads_choices = True
    assert not store.is_whole(sent)
    read = store.resolve(sent)
    assert read.choices.rows == whole.choices.rows and read.choices.claim.digest == claim["digest"]
    assert store.is_whole(read) and read.tokens_digest == whole.tokens_digest


def routes_of(*rows):
    """Rows of tokens, each with the experts of its layers."""
    return Rows(np.array(rows, dtype=np.uint8))


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (ROUTES, ""),
        (routes_of([[0, 1], [3, 2]], [[1, 0], [2, 0]]), ""),
        # What vLLM returned: zeros for all that it did not record.
        (
            routes_of([[0, 0], [0, 0]], [[0, 0], [0, 0]]),
            "at 2 of 2 tokens (first: token 0, layer 0, experts [0, 0])",
        ),
        (
            routes_of([[0, 1], [3, 2]], [[0, 0], [0, 0]]),
            "at 1 of 2 tokens (first: token 1, layer 0, experts [0, 0])",
        ),
        (
            routes_of([[0, 1], [3, 2]], [[1, 0], [2, 2]]),
            "at 1 of 2 tokens (first: token 1, layer 1, experts [2, 2])",
        ),
        (routes_of([[4, 1, 4]]), "layer 0, experts [4, 1, 4]"),
        # A layer that is zero throughout has no router, as the first ones of DeepSeek's.
        (routes_of([[0, 0], [3, 2]], [[0, 0], [1, 2]]), ""),
        (routes_of([[0, 0], [3, 2]], [[0, 0], [1, 1]]), "token 1, layer 1"),
        # One expert a token: nothing can be seen.
        (routes_of([[0], [0]], [[0], [0]]), ""),
        (Rows(np.zeros((0, 2, 2), np.uint8)), ""),
        (Rows(np.array([[[300, 5]], [[300, 300]]], dtype=np.uint16)), "token 1, layer 0, experts [300, 300]"),
    ],
)
def test_routes_that_name_an_expert_twice_are_no_routers_choice(routes, words):
    fault = find_routes_fault(routes)
    assert words in fault and bool(fault) == bool(words)
    assert not fault or (fault.startswith(ROUTES_FAULT) and "rollout.record_routes" in fault)


@pytest.mark.parametrize(
    ("layers", "num_experts", "words"),
    [
        ((0, 1), 4, ""),
        ((1,), 4, ""),
        ((0, 5, 9), 4, "have 2 layers, and the model has a router in layer 9"),
        ((0, 1), 3, "name expert 3, and the model has 3 a layer"),
    ],
)
def test_routes_fit_the_routers_of_the_model(layers, num_experts, words):
    routes = routes_of([[1, 2], [3, 2]], [[1, 0], [2, 0]])
    fault = find_routes_fault(routes, Routing(layers, num_experts))
    assert words in fault and bool(fault) == bool(words)


def test_with_the_models_routers_a_layer_of_zeros_is_no_exception():
    routes = routes_of([[0, 0], [3, 2]], [[0, 0], [1, 2]])
    assert "token 0, layer 0" in find_routes_fault(routes, Routing((0, 1), 4))
    assert not find_routes_fault(routes, Routing((1,), 4)), "its first layer has no router"


def test_a_large_trajectory_and_its_choices_are_two_claims(tmp_path):
    store = ClaimStore(tmp_path, 1)
    claimed = store.check_in(store.check_in_choices(chosen()))
    assert claimed.claim and claimed.choices.claim and len(list((tmp_path / "claims").iterdir())) == 2
    assert store.resolve(claimed).choices == claimed.choices
    store.reads_choices = True
    assert store.resolve(claimed).choices.rows == chosen().choices.rows


def test_choices_that_are_missing_wrong_or_of_another_sample_are_a_fault(tmp_path):
    store = ClaimStore(tmp_path)
    store.reads_choices = True
    sent = store.check_in_choices(chosen(completion_ids=np.arange(3)))
    of_another = store.check_in_choices(chosen(completion_ids=np.arange(1, 4)))
    strange = sent.model_copy(update={"choices": of_another.choices})
    assert "claimed for (3, 1)" in fault_of(store.resolve(strange))
    path = tmp_path / "claims" / sent.choices.claim.pointer
    path.write_bytes(path.read_bytes()[:-1])
    assert "bytes instead of" in fault_of(store.resolve(sent))
    path.unlink()
    assert path.name in fault_of(store.resolve(sent)) and store.resolve(sent).lacks_choices
