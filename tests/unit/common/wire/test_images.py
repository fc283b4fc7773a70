"""Images on the wire: left out where there are none, and never overlooked where there are some."""

from typing import Any

import numpy as np
import pytest

from tidemill.common.errors import CodecError
from tidemill.common.store import ClaimStore
from tidemill.common.wire import codec
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import SamplingParams, Ticket, Trajectory

IMAGE = Image(digest="0123456789abcdef" * 2, num_bytes=9, width=8, height=7, first=1, num_tokens=2)
IDS = np.array([5, 9, 9, 6], np.int32)


def ticket(**fields: Any) -> Ticket:
    about = {"ticket": 1, "step": 0, "min_version": 0, "group_size": 2, "issued_at": 1.0}
    return Ticket(prompt_ids=IDS, sampling=SamplingParams(max_tokens=4), **about, **fields)


def trajectory(**fields: Any) -> Trajectory:
    about: dict[str, Any] = {"ticket": 1, "index": 0, "step": 0, "group_size": 2, "spans": ((0, 0),)}
    completion = {"completion_ids": np.array([3], np.int32), "logprobs": np.array([-1.0], np.float32)}
    return Trajectory(prompt_ids=IDS, **completion, **about, **fields)


@pytest.mark.parametrize("make", [ticket, trajectory])
def test_images_survive_the_wire_and_are_not_there_where_there_are_none(make):
    message = make(images=(IMAGE,))
    assert codec.decode(codec.encode(message), type(message)) == message
    assert codec.schema_of(message) == codec.SCHEMA_WITH_NEEDS
    plain = make()
    assert b"images" not in codec.encode_payload(plain)
    assert codec.schema_of(plain) == codec.SCHEMA
    assert codec.decode(codec.encode(plain), type(plain)).images == ()


@pytest.mark.parametrize("make", [ticket, trajectory])
def test_a_reader_that_does_not_know_images_refuses_them(make, monkeypatch):
    message = make(images=(IMAGE,))
    fields = codec.encode(message)
    monkeypatch.setattr(type(message), "changes_meaning", frozenset())
    with pytest.raises(CodecError, match="needs"):
        codec.decode(fields, type(message))


@pytest.mark.parametrize(
    "changes", [{"first": 3}, {"digest": "0" * 31}, {"num_tokens": 0}, {"width": 0}, {"first": -1}]
)
def test_images_outside_of_the_prompt_or_without_tokens_are_refused(changes):
    wrong = IMAGE.model_copy(update=changes)
    message = ticket(images=(IMAGE,)).model_copy(update={"images": (wrong,)})
    with pytest.raises(CodecError, match="ticket"):
        codec.decode(codec.encode(message), Ticket)


def test_the_digest_of_tokens_tells_pictures_apart():
    unlike = IMAGE.model_copy(update={"digest": "f" * 32})
    digests = {trajectory().tokens_digest, trajectory(images=(IMAGE,)).tokens_digest}
    assert len(digests | {trajectory(images=(unlike,)).tokens_digest}) == 3
    copied = trajectory(images=(IMAGE.model_copy(update={"width": 9}),))
    assert copied.tokens_digest in digests, "the bytes are what counts"


def test_a_claimed_trajectory_has_its_images_behind_the_claim(tmp_path):
    store = ClaimStore(tmp_path, least_bytes=1)
    sample = trajectory(images=(IMAGE,))
    claimed = store.check_in(sample)
    assert claimed.claim is not None and not claimed.images
    sent = codec.decode(codec.encode(claimed), Trajectory)
    assert store.resolve(sent) == sample
