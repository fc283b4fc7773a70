"""Environments of users, as their files have them: played by tests, also in other processes."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any, ClassVar

THIS = str(Path(__file__).resolve())


class Guess:
    """Tidemill's interface: text in, (observation, reward, done) out."""

    def reset(self, row: dict[str, Any]) -> str:
        self.number = int(row["ground_truth"])
        return " 1 to 9."

    def step(self, text: str) -> tuple[str | None, float, bool]:
        if text.strip() == str(self.number):
            return None, 1.0, True
        return "higher", 0.25, False

    def get_metrics(self) -> dict[str, Any]:
        return {"number": self.number, "note": "no number", "bad": float("nan")}


class RepeatableGuess(Guess):
    """Gives the same answers to the same turns, unless its options change."""

    repeatable = True

    def __init__(self, says: str = "higher") -> None:
        self.says = says

    def step(self, text: str) -> tuple[str | None, float, bool]:
        observation, *others = super().step(text)
        return observation and self.says, *others


class ResumableGuess(Guess):
    """Has a state that can be saved and restored."""

    resumable = True

    def __init__(self, faults: list[str] | None = None) -> None:
        """Each item of `faults` fails once: `restore`, or an answer of the model."""
        self.faults = faults if faults is not None else []

    def step(self, text: str) -> tuple[str | None, float, bool]:
        self._fail(text.strip())
        return super().step(text)

    def mark(self) -> dict[str, int]:
        return {"number": self.number}

    def restore(self, mark: dict[str, int]) -> None:
        self._fail("restore")
        self.number = mark["number"]

    def _fail(self, at: str) -> None:
        if at in self.faults:
            self.faults.remove(at)
            raise ConnectionError(f"away at {at}")


class HalfResumable(Guess):
    resumable = True

    def mark(self) -> int:
        return 0


class ResumableBox:
    """A class whose public methods are tools."""

    resumable = True

    def reset(self) -> None:
        self.things = 0

    def put(self, count: int) -> str:
        """
        Put things into the box.

        Args:
            count: How many.
        """
        self.things += count
        return str(self.things)

    def mark(self) -> int:
        return self.things

    def restore(self, mark: int) -> None:
        self.things = mark


class Slow:
    """Blocks in each step, so that it runs in a process of its own."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def reset(self, row: dict[str, Any]) -> None:
        pass

    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(self.step_s)
        return " more", float(len(text) % 2), False


class MuteError(RuntimeError):
    """Its text fails."""

    def __str__(self) -> str:
        raise ValueError("no words")


class AsyncGuess:
    """Like `Guess`, but asynchronous; `closed` has the numbers of those that were closed."""

    closed: ClassVar[list[int]] = []

    async def reset(self, row: dict[str, Any]) -> None:
        self.number = int(row["ground_truth"])

    async def step(self, text: str) -> dict[str, Any]:
        if text == "hang":
            await asyncio.sleep(3600)
        if text == "raise":
            raise RuntimeError("the board is broken")
        if text == "mute":
            raise MuteError
        if text == "nonsense":
            return 3  # type: ignore[return-value]
        return {"observation": "higher", "reward": None, "done": text == str(self.number)}

    async def close(self) -> None:
        self.closed.append(self.number)


class Endless:
    """What the model says, or the row, decides which of its calls never ends."""

    async def reset(self, row: dict[str, Any]) -> None:
        self.said: list[str] = [row["ground_truth"]]
        await self._end()

    async def step(self, text: str) -> tuple[str | None, float, bool]:
        self.said.append(text)
        await self._end()
        return (None if text == "score" else "more"), 0.25 if text != "score" else 0.0, text == "score"

    async def get_reward(self) -> None:
        await asyncio.sleep(3600 if "score" in self.said else 0)

    async def _end(self) -> None:
        await asyncio.sleep(3600 if self.said[-1] == "loop" else 0)


class Counter:
    def reset(self, ground_truth: int, **row: Any) -> str:
        self.goal = ground_truth
        self.count = 0
        return " Count."

    def add(self, amount: int) -> str:
        """
        Add to the counter.

        Args:
            amount: How much to add.
        """
        if self.count >= 10:
            raise ValueError("Game over.")
        self.count += amount
        return f"now {self.count}"

    def get_reward(self) -> float:
        return float(self.count == self.goal)

    def _hidden(self) -> None:
        raise AssertionError


class Skyrl:
    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        self.goal = extras["reward_spec"]["ground_truth"]
        self.hint = env_config.hint

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return [*prompt, {"role": "user", "content": self.hint}], {}

    def step(self, action: str) -> dict[str, Any]:
        is_right = action == self.goal
        said = [] if is_right else [{"role": "user", "content": "again"}]
        return {"observations": said, "reward": float(is_right), "done": is_right, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"hints": 1}


class NoStep:
    def reset(self) -> None: ...
    def step(self) -> None: ...


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def repeat(count: int) -> str:
    """
    Say it over and over.

    Args:
        count: How often.
    """
    return "ha " * count


def nest(depth: int) -> list[Any]:
    """
    Put lists into each other.

    Args:
        depth: How many.
    """
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


def hang(seconds: int) -> str:
    """
    Do nothing for a while.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "done"


def die(code: int) -> str:
    """
    End this process.

    Args:
        code: Its exit code.
    """
    os._exit(code)


def undescribed(query):  # type: ignore[no-untyped-def]
    return query
