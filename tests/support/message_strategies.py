"""Every kind of message with any values that it may have, as hypothesis strategies."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

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
from tidemill.common.wire.segments import Segment, Session, Turn

small = st.integers(0, 2**40)
texts = st.text(max_size=40)
floats = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
extras = st.dictionaries(texts, plain, max_size=3)
keys = st.tuples(small, st.integers(0, 4095))
outcomes = st.tuples(texts, small, small, small)
hex_digest = st.text("0123456789abcdef", min_size=32, max_size=32)


def arrays(dtype: str, size: int | None = None) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Arrays of any bits, drawn as bytes: lists of numbers would take most of a test's time."""
    sizes = st.integers(0, 50) if size is None else st.just(size)
    raw = sizes.flatmap(lambda count: st.binary(min_size=4 * count, max_size=4 * count))
    return raw.map(lambda data: np.frombuffer(data, dtype))


def without_nan(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(np.isnan(values), np.float32(0.0), values)


tickets = st.builds(
    Ticket,
    prompt_ids=arrays("<i4"),
    data_source=texts,
    ground_truth=plain,
    extra=extras,
    prompt_text=texts,
    ticket=small,
    step=small,
    min_version=small,
    group_size=st.integers(1, 4096),
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 9),
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(0, 9),
        min_p=st.floats(0, 1, exclude_max=True),
        stop=st.lists(texts, max_size=2).map(tuple),
    ),
    row=st.integers(-1, 99),
    replaces=st.integers(-1, 99),
    source=texts,
    outcome=st.none() | outcomes,
)


@st.composite
def segments(draw: st.DrawFn, num_tokens: int | None = None) -> Segment:
    if num_tokens is None:
        num_tokens = draw(st.integers(0, 20))
    mask = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)
    num_made = draw(st.integers(0, num_tokens))
    turn = st.builds(
        Turn, first=st.just(num_tokens - num_made), num_tokens=st.just(num_made), reward=st.none() | floats,
        num_cached_tokens=st.integers(-1, 99), engine_s=st.floats(0, 1e9),
    )  # fmt: skip
    return Segment(
        prompt_ids=draw(arrays("<i4")),
        completion_ids=draw(arrays("<i4", num_tokens)),
        logprobs=draw(arrays("<f4", num_tokens).map(without_nan)),
        loss_mask=draw(st.none() | mask.map(lambda bits: np.array(bits, dtype=np.bool_))),
        spans=((draw(small), 0),),
        turns=(draw(turn),),
    )


@st.composite
def sessions(draw: st.DrawFn, num_tokens: int) -> Session:
    """Sessions of trajectories with `num_tokens` tokens."""
    return Session(
        environment=draw(texts),
        turns=draw(segments(num_tokens)).turns,
        forks=tuple(draw(st.lists(segments(), max_size=2))),
        messages=tuple(draw(st.lists(extras, max_size=2))),
        end=draw(st.sampled_from(["done", "max_turns", "max_tokens", "timeout"])),
        late=draw(st.sampled_from(["", "session", "call", "reward", "program"])),
        reward=draw(st.none() | floats),
        metrics=draw(st.dictionaries(texts, floats, max_size=2)),
        histories={"clean": draw(small)},
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    num_tokens = draw(st.integers(0, 40))
    firsts = sorted(draw(st.sets(st.integers(1, num_tokens - 1), max_size=3))) if num_tokens > 1 else []
    mask = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)
    return Trajectory(
        prompt_ids=draw(arrays("<i4")),
        ground_truth=draw(plain),
        extra=draw(extras),
        ticket=draw(small),
        index=draw(st.integers(0, 7)),
        step=draw(small),
        group_size=8,
        completion_ids=draw(arrays("<i4", num_tokens)),
        logprobs=draw(arrays("<f4", num_tokens).map(without_nan)),
        loss_mask=draw(st.none() | mask.map(lambda bits: np.array(bits, dtype=np.bool_))),
        spans=tuple((version, first) for version, first in enumerate([0, *firsts])),
        finish=draw(st.sampled_from(["stop", "length"])),
        text=draw(texts),
        started_at=draw(floats),
        session=draw(st.none() | sessions(num_tokens)),
    )


scores = st.builds(
    Score,
    ticket=small,
    index=small,
    status=st.just(ScoreStatus.OK),
    value=floats,
    components=st.dictionaries(texts, st.none() | floats, max_size=3),
    detail=extras,
    attempts=st.integers(1, 9),
) | st.builds(Score, ticket=small, index=small, status=st.just(ScoreStatus.TIMEOUT), error=texts)
manifests = st.builds(
    WeightManifest,
    version=small,
    folder=st.just("v00000012"),
    files=st.lists(
        st.builds(WeightFile, name=st.just("model.safetensors"), num_bytes=small, checksum=hex_digest),
        max_size=2,
    ).map(tuple),
    digest=hex_digest,
)
commits = st.builds(
    Commit,
    step=small,
    version=st.integers(1, 99),
    mini_batches=st.lists(
        st.lists(st.lists(keys, max_size=3).map(tuple), max_size=2).map(tuple), max_size=2
    ).map(tuple),
    groups=st.lists(small, max_size=3).map(tuple),
    dropped=st.lists(st.tuples(small, st.integers(-1, 9), texts), max_size=2).map(tuple),
    advantages=st.dictionaries(texts, st.lists(floats, max_size=3), max_size=2),
    outcomes=st.lists(outcomes, max_size=2).map(tuple),
    sizes=st.dictionaries(texts, small, max_size=2),
    metrics=st.dictionaries(texts, floats, max_size=3),
)
letters = st.builds(
    DeadLetter,
    origin=texts,
    entry_id=texts,
    fields=st.dictionaries(texts, st.binary(max_size=30), max_size=3),
    error=texts,
    attempts=st.integers(0, 9),
)
messages = st.one_of(tickets, trajectories(), scores, manifests, commits, letters)
