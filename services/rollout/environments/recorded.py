"""Gives a session's recorded answers before its environment's own: a worker has died, another one goes on.

How the environment comes to where it was (`Resumes` in `environment.py`):

* `restore`: it is not asked. The last recorded answer has a mark, the environment's state, which it gets.
* `repeat`: it is asked again from the beginning, and has to give the recorded answers.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import xxhash

from tidemill.common.wire.codec import pack
from tidemill.services.rollout.environments.environment import (
    Act,
    Closing,
    Environment,
    Opening,
    Resumes,
    Row,
)
from tidemill.services.rollout.sessions.parts import Recording

Answer = TypeVar("Answer", Opening, Act)


class DifferentAnswerError(Exception):
    """The environment's answer differs from the recorded one: the session begins again."""


class RecordedEnvironment(Environment):
    """Gives the recorded answers, then those of the environment, which it records."""

    def __init__(self, inner: Environment, recording: Recording, resumes: Resumes) -> None:
        self._inner = inner
        self._recording = recording
        self._resumes = resumes

    async def reset(self, row: Row) -> Opening:
        return await self._answer(Opening, lambda: self._inner.reset(row))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        return await self._answer(Act, lambda: self._inner.call(name, arguments))

    async def step(self, text: str) -> Act:
        return await self._answer(Act, lambda: self._inner.step(text))

    async def finish(self) -> Closing:
        return await self._inner.finish()

    async def close(self) -> None:
        await self._inner.close()

    async def _answer(self, kind: type[Answer], ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Raises DifferentAnswerError: what is recorded is another answer, or cannot be read."""
        if self._resumes == "restore" and self._recording.has_answer:
            return await self._restored_answer(kind)
        recorded = self._recording.next_answer() if self._recording.has_answer else None
        answer = await ask()
        plain: Any = asdict(answer)
        if self._resumes == "repeat":  # a hash is enough: the environment gives the answer again
            plain = xxhash.xxh3_64_hexdigest(pack(plain))
        if recorded is None:
            self._recording.add_answer(plain)
        elif recorded != plain:
            raise DifferentAnswerError(f"{kind.__name__} {answer}")
        return answer

    async def _restored_answer(self, kind: type[Answer]) -> Answer:
        try:
            answer = kind(**self._recording.next_answer())
        except TypeError as error:  # fields of another release
            raise DifferentAnswerError(str(error)) from None
        if not self._recording.has_answer:  # this was the last one
            await self._inner.restore(answer.mark)
        return answer
