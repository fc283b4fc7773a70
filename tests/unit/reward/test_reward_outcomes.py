"""What counts as a reward, and what is said about everything else."""

import asyncio
import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from tidemill.common.wire.codec import decode_payload, encode_payload
from tidemill.common.wire.messages import Score, ScoreStatus
from tidemill.services.reward.outcome import (
    MAX_DETAIL_CHARS,
    AttemptError,
    RewardOutcome,
    contained,
    interpret,
    interpret_list,
    users_own,
)
from tidemill.services.reward.rewards.groups import GroupResult


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (1, 1.0),
        (0, 0.0),
        (-2.5, -2.5),
        (True, 1.0),
        (False, 0.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (Decimal("0.25"), 0.25),
        ((0.5, "note"), 0.5),  # of a tuple the first element, as verl takes it
        ((True, False, "18"), 1.0),
    ],
)
def test_a_finite_number_is_the_reward(returned: Any, value: float) -> None:
    outcome = interpret(returned)
    assert outcome.value == value
    assert type(outcome.value) is float


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (math.nan, "returned nan"),
        (math.inf, "returned inf"),
        (-math.inf, "returned -inf"),
        (10**400, "returned inf"),
        (np.float32("nan"), "returned nan"),
        (np.ma.array([1.0], mask=[True]).mean(), "returned nan"),  # its item is 0
        (None, "returned None"),
        ("1.0", "returned the text '1.0'"),
        (np.array([0.5]), r"returned an array of shape \(1,\)"),
        (np.array([0.5, 1.0]), r"returned an array of shape \(2,\)"),
        ([1.0], "returned a list"),
        (("note", 1.0), "the first element is the text 'note'"),
        ((), "returned a tuple"),
        (Decimal("NaN"), "returned nan"),
        (Decimal("sNaN"), "returned nan"),
        (1j, "returned a complex"),
        (object(), "returned an object"),
        ({}, "without 'score'"),
        ({"reward": 1.0}, "without 'score' \\('reward'\\)"),
        ({"score": None}, "'score' is None"),
        ({"score": math.nan}, "'score' is nan"),
        ({"score": "1"}, "'score' is the text '1'"),
        ({"score": {"score": 1.0}}, "'score' is a dict"),
    ],
)
def test_anything_else_is_a_failure_with_its_reason(returned: Any, reason: str) -> None:
    with pytest.raises(AttemptError, match=f"{reason}.*expected a finite number") as caught:
        interpret(returned)
    assert not caught.value.is_timeout


def test_a_coroutine_is_to_be_awaited_in_an_async_function() -> None:
    """It may be one already, and have forgotten `await`."""

    async def score() -> float:
        return 1.0

    coroutine = score()
    with pytest.raises(AttemptError, match=r"a coroutine.*`async def`.*`return await \.\.\.`"):
        interpret(coroutine)
    with pytest.raises(AttemptError, match=r"element 0 is a coroutine.*asyncio\.gather"):
        interpret_list([coroutine], 1)
    coroutine.close()


def test_further_numbers_become_components_and_the_rest_detail() -> None:
    outcome = interpret(
        {
            "score": 0.5,
            "fluency": 1,
            "is_short": True,
            "judge": None,
            "broken": math.nan,
            "share": Decimal("0.5"),
            "verdict": "good",
            7: [1],
        }
    )
    assert outcome.value == 0.5
    assert outcome.components == {
        "fluency": 1.0, "is_short": 1.0, "judge": None, "broken": None, "share": 0.5,
    }  # fmt: skip
    assert outcome.detail == {"verdict": "good", "7": [1]}


def test_detail_can_always_be_sent_and_stays_bounded() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    outcome = interpret(
        {
            "score": 1.0,
            "loop": loop,
            "object": object(),
            "text": "x" * (MAX_DETAIL_CHARS + 1),
            "surrogate": "\ud800",
            "list": [2**70, {1: {2}}],
        }
    )
    assert len(msgpack.packb(outcome.detail)) < 2 * MAX_DETAIL_CHARS
    assert len(outcome.detail["text"]) == MAX_DETAIL_CHARS
    assert outcome.detail["list"] == [str(2**70), {"1": "{2}"}]
    json.dumps(outcome.detail)


def test_detail_holds_no_more_than_readers_take_of_a_message() -> None:
    rows = [[0.5] * 200 for _ in range(100)]
    deep = [rows for _ in range(100)]
    outcome = interpret({"score": 1.0, "deep": deep, "wide": {n: deep for n in range(100)}, "last": "word"})
    payload = encode_payload(Score(ticket=0, index=0, status="ok", value=1.0, detail=outcome.detail))
    assert decode_payload(payload, Score).detail["deep"][0] == [[0.5] * 200] * 100


@pytest.mark.parametrize("error", [ValueError("no\nluck"), SystemExit(3), RecursionError("deep")])
def test_whatever_a_function_raises_is_contained_with_its_place(error: BaseException) -> None:
    with (
        pytest.raises(
            AttemptError, match=rf"{type(error).__name__}: .*\(test_reward_outcomes.py, line \d+\)"
        ),
        contained(),
    ):
        raise error


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
def test_cancellation_and_ctrl_c_are_not_contained(error: type[BaseException]) -> None:
    with pytest.raises(error), contained():
        raise error


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class MuteRuntime(Mute, RuntimeError):
    """Of an error of this kind the text is looked at, too."""


class MuteImport(Mute, ImportError):
    pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt("stop"), "KeyboardInterrupt: stop"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError("odd"), "CancelledError: odd"),
        (Mute(), "Mute: its text cannot be read"),
        (MuteRuntime(), "MuteRuntime: its text cannot be read"),
        (MuteImport(), "MuteImport: its text cannot be read"),
        (ExceptionGroup("two", [ValueError("a"), Mute()]), r"two.*: ValueError: a; Mute: its text"),
    ],
)
def test_whatever_a_users_code_raises_is_an_outcome_in_words(error: BaseException, said: str) -> None:
    with pytest.raises(AttemptError, match=said), users_own():
        raise error


async def test_a_cancellation_that_was_asked_for_stays_one() -> None:
    async def waits() -> None:
        with users_own():
            await asyncio.sleep(3600)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_detail_that_cannot_be_shown_does_not_cost_the_score() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    outcome = interpret({"score": 0.5, "deep": deep, "mute": Mute()})
    assert outcome.value == 0.5
    assert "list, which cannot be shown" in str(outcome.detail["deep"])


class OwnError(Exception):
    """Of a user's module."""


@pytest.mark.parametrize(
    ("error", "is_codes"),
    [
        (KeyError("score"), True),
        (json.JSONDecodeError("", "", 0), True),
        (SystemExit("done"), True),
        (OwnError("mine"), True),
        (ExceptionGroup("both", [KeyError("score"), ValueError("x")]), True),
        (ConnectionRefusedError("the judge is away"), False),
        (TimeoutError("the judge is slow"), False),
        (OSError("no space left on device"), False),
        (MemoryError(), False),
        (RuntimeError("can't start new thread"), False),
        (httpx.HTTPStatusError("503", request=None, response=None), False),  # type: ignore[arg-type]
        (ExceptionGroup("both", [KeyError("score"), TimeoutError()]), False),
    ],
)
def test_an_error_of_the_code_is_told_from_an_outage(error: BaseException, is_codes: bool) -> None:
    with pytest.raises(AttemptError) as caught, users_own():
        raise error
    assert caught.value.is_code_error is is_codes


KEPT: dict[str, Any] = {
    "value": 0.5,
    "components": {"exact": 1.0, "format": None},
    "detail": {"verdict": "half right"},
    "teacher_logprobs": None,
    "status": "ok",
    "error": "",
    "kind": "",
    "tries": [],
    "on_failure": "",
    "is_code_error": False,
}
"""An outcome as releases write it that have no `to_wire`: all of their fields. Caches keep it for long."""
LATE = KEPT | {"value": None, "status": "timeout", "error": "no result within 30 s", "kind": "timeout"}


def test_an_outcome_that_an_older_release_has_kept_is_read() -> None:
    outcome = RewardOutcome.from_wire(msgpack.unpackb(msgpack.packb(KEPT)))
    assert outcome == RewardOutcome(0.5, {"exact": 1.0, "format": None}, {"verdict": "half right"})
    assert outcome.is_ok
    late = RewardOutcome.from_wire(msgpack.unpackb(msgpack.packb(LATE)))
    assert late.status is ScoreStatus.TIMEOUT
    assert str(late.to_error()) == "no result within 30 s"


def test_an_older_release_knows_the_fields_of_what_is_cached() -> None:
    """It refuses others. Only what succeeded is cached."""
    outcome = RewardOutcome(0.0, {"exact": 0.0}, {"verdict": "wrong"}, teacher_logprobs=b"\0\0\0\0")
    assert outcome.to_wire().keys() <= KEPT.keys()
    assert RewardOutcome.from_wire(outcome.to_wire()) == outcome


def test_workers_of_two_releases_read_each_others_results_of_a_group() -> None:
    older = msgpack.packb({"outcomes": {"gsm8k": KEPT, "judge": LATE}, "entry_id": "1-1"})
    outcomes = decode_payload(older, GroupResult).outcomes
    assert outcomes["gsm8k"].value == 0.5
    assert outcomes["judge"].status is ScoreStatus.TIMEOUT
    # What an older release does with `is_final`: it passes over fields that it does not know.
    newer = msgpack.packb({"outcomes": {"gsm8k": KEPT | {"of_a_later_release": True}}, "entry_id": "1-1"})
    assert decode_payload(newer, GroupResult).outcomes["gsm8k"] == outcomes["gsm8k"]
