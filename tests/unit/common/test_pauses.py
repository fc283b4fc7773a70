"""Pauses before something is tried again: each has a longer bound than the one before, up to a longest one,
and is random below it. Many processes fail at the same moment, and must not come back at the same moment."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from redis import exceptions as redis_errors

from tests.support.models import run_config
from tests.support.trajectories import make_trajectory
from tidemill.common.config.reward import RewardLimits
from tidemill.common.errors import EnvironmentFaultError, StoreError
from tidemill.common.redis.broker import Broker
from tidemill.common.store.claims import resolved, with_choices_in
from tidemill.common.threads import BoundedThreads
from tidemill.services.reward import adapters
from tidemill.services.reward.attempts import attempt
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.rollout.sessions.player import Player

NUM_FAILURES = 12
NUM_CALLERS = 60
THREADS = BoundedThreads("claims", 1)


class AwayError(Exception):
    """Ends a caller after its last failure."""


class Away:
    """Fails so often, then ends its caller."""

    def __init__(self, failure: Callable[[], Exception]) -> None:
        self.failure = failure
        self.num_calls = 0

    def fail(self, *_: Any, **__: Any) -> NoReturn:
        self.num_calls += 1
        raise AwayError if self.num_calls > NUM_FAILURES else self.failure()

    async def fail_later(self, *_: Any, **__: Any) -> NoReturn:
        self.fail()


async def ask_redis() -> None:
    away = Away(lambda: redis_errors.ConnectionError("refused"))
    redis: Any = SimpleNamespace(execute_command=away.fail_later)
    await Broker(redis).execute("GET", "a")


async def read_payload() -> None:
    claims: Any = SimpleNamespace(resolve=Away(lambda: StoreError("away")).fail, threads=THREADS)
    await resolved(claims, make_trajectory(1))


async def write_choices() -> None:
    claims: Any = SimpleNamespace(check_in_choices=Away(lambda: StoreError("away")).fail, threads=THREADS)
    await with_choices_in(claims, make_trajectory(1))


async def play_again() -> None:
    config = run_config("m", rollout={"environment": {"use": "a.py:A", "attempts": NUM_FAILURES + 1}})
    player = Player(config, lambda ids: "", lambda: pytest.fail("no chat is needed"))
    away = Away(lambda: EnvironmentFaultError("its server is away", "start"))
    player.play_once = away.fail_later  # type: ignore[method-assign]
    ticket: Any = None
    ask: Any = None
    await player.play(ticket, "train-1-0", ask)


async def score_again() -> None:
    limits = RewardLimits(max_attempts=NUM_FAILURES + 1, backoff_s=0.5)
    await attempt("judge", limits, Away(lambda: AttemptError("failed", "away")).fail_later)


async def send_again() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "_post", Away(lambda: OSError("refused")).fail_later)
        await adapters.scores_of([])


def doubled(first_s: float, longest_s: float) -> list[float]:
    return [min(longest_s, first_s * 2.0**number) for number in range(NUM_FAILURES)]


@contextlib.asynccontextmanager
async def noted_pauses() -> AsyncIterator[list[float]]:
    """The pauses of the block, none of which takes time."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(pause_s: float, result: Any = None) -> Any:
        pauses.append(pause_s)
        return await sleep(0, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", note)
        yield pauses


async def pauses_of(call: Callable[[], Awaitable[None]]) -> list[float]:
    """The pauses of one caller."""
    async with noted_pauses() as pauses:
        with contextlib.suppress(AwayError, AttemptError):
            await call()
    return pauses


# Redis is asked again at once after the first failure: one lost connection is no outage.
AT_ONCE = [0.0]


@pytest.mark.parametrize(
    ("call", "lower", "upper"),
    [
        (ask_redis, [0.0] * NUM_FAILURES, [*AT_ONCE, *doubled(0.05, 3.0)[:-1]]),
        (read_payload, doubled(0.25, 5.0), doubled(0.5, 10.0)),
        (write_choices, doubled(0.25, 5.0), doubled(0.5, 10.0)),
        (play_again, doubled(0.1, 5.0), doubled(0.2, 10.0)),
        (score_again, doubled(0.5, 60.0), [bound + 0.25 for bound in doubled(0.5, 60.0)]),
        (send_again, doubled(0.1, 2.5), doubled(0.2, 5.0)),
    ],
    ids=["redis", "payloads", "choices", "environments", "rewards", "adapters"],
)
async def test_pauses_grow_up_to_a_longest_one_and_are_random(
    call: Callable[[], Awaitable[None]], lower: list[float], upper: list[float]
) -> None:
    callers = [await pauses_of(call) for _ in range(NUM_CALLERS)]
    bounds = [(low, high) for low, high in zip(lower, upper, strict=True) if high > 0.0]
    assert {len(pauses) for pauses in callers} == {len(bounds)}
    for number, (low, high) in enumerate(bounds):
        pauses = [caller[number] for caller in callers]
        assert low <= min(pauses) and max(pauses) <= high
        middle = low + (high - low) / 2
        assert min(pauses) < middle < max(pauses), "all callers come back at the same moment"
