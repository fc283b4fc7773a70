"""The simulated reward: a number that follows from the completion, which some do not have."""

import asyncio
from collections.abc import Iterable
from typing import Any

import xxhash

from tidemill.services.reward.outcome import AttemptError, Reward, RewardOutcome
from tidemill.services.reward.sample import RewardSample

FAILING = 40
"""One completion in this many has no reward, at any attempt."""
LONGEST_S = 0.8


class SimulatedReward(Reward):
    """Stands also for a function that is given whole groups."""

    async def score_group(self, samples: list[RewardSample]) -> list[RewardOutcome]:
        await asyncio.sleep(LONGEST_S)
        return [RewardOutcome(value_of(text_of_tokens(sample.last.completion_ids))) for sample in samples]

    async def score(self, sample: Any) -> RewardOutcome:
        text = text_of_tokens(sample.last.completion_ids)
        number = fate_of(text)
        await asyncio.sleep(LONGEST_S * (number % 97) / 97)
        value = value_of(text)
        if value is None:
            raise AttemptError("this completion has no reward", is_final=True)
        return RewardOutcome(value)

    async def close(self) -> None:
        """Nothing to free."""


def fate_of(text: str) -> int:
    """A number that follows from the completion alone."""
    return int(xxhash.xxh3_64_intdigest(text.encode()))


def value_of(text: str) -> float | None:
    """The reward of a completion; None where there is none."""
    number = fate_of(text)
    return None if number % FAILING == 0 else float(number % 5) / 4


def text_of_tokens(ids: Iterable[int]) -> str:
    """The text of tokens, as the simulated engine decodes them."""
    return " ".join(f"t{token}" for token in ids)


def make_reward(*_: Any, **__: Any) -> SimulatedReward:
    """In place of the factory of rewards."""
    return SimulatedReward()
