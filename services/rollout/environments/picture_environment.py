"""A session's environment whose pictures are taken in as it shows them: its answers have references.

Between the environment and whatever records or reads its answers, so that pixels are in neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tidemill.common.errors import BrokenImageError, EnvironmentFaultError
from tidemill.services.rollout.environments.environment import (
    Act,
    Closing,
    Environment,
    Opening,
    Row,
)
from tidemill.services.rollout.environments.session_time import SessionTime
from tidemill.services.rollout.sessions.picture_parts import has_picture, references_in

if TYPE_CHECKING:
    from tidemill.services.rollout.sessions.pictures import SessionPictures

NO_SECTION = (
    "the environment shows a picture, and the run has no section `images`: add `images: {}` to train a model "
    "that sees, or let it answer in text"
)


class PictureEnvironment(Environment):
    """Raises EnvironmentFaultError where a picture is none that is taken, or the run has no pictures."""

    def __init__(
        self, inner: Environment, pictures: "SessionPictures | None", session_time: SessionTime
    ) -> None:
        self._inner = inner
        self._pictures = pictures
        self._time = session_time

    async def reset(self, row: Row) -> Opening:
        opening = await self._inner.reset(row)
        if opening.messages is None:
            return opening
        return replace(opening, messages=await self._taken(opening.messages, "reset"))

    async def restore(self, mark: Any) -> None:
        await self._inner.restore(mark)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        act = await self._inner.call(name, arguments)
        return replace(act, messages=await self._taken(act.messages, "step"))

    async def step(self, text: str) -> Act:
        act = await self._inner.step(text)
        return replace(act, messages=await self._taken(act.messages, "step"))

    async def finish(self) -> Closing:
        return await self._inner.finish()

    async def close(self) -> None:
        await self._inner.close()

    async def _taken(self, messages: Sequence[Mapping[str, Any]], kind: str) -> Sequence[Mapping[str, Any]]:
        if not any(has_picture(message.get("content")) for message in messages):
            return messages
        if self._pictures is None:
            raise EnvironmentFaultError(NO_SECTION, kind)
        try:
            with self._time.stopped():
                stored = [await self._pictures.take_message(message) for message in messages]
        except BrokenImageError as error:
            raise EnvironmentFaultError(f"a picture that the environment shows: {error}", kind) from error
        # Those of the row are for the first prompt alone.
        if kind != "reset" and any("digest" not in item for item in references_in(stored)):
            raise EnvironmentFaultError(
                "what the environment shows: a part of type image has no picture; give it one, under `image`",
                kind,
            )
        return stored
