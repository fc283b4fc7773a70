"""What a session's environment is asked and given where its recorded answers come first."""

from dataclasses import asdict
from typing import Any

import pytest

from tidemill.services.rollout.environments.environment import Act, Environment, Opening
from tidemill.services.rollout.environments.recorded import DifferentAnswerError, RecordedEnvironment
from tidemill.services.rollout.sessions.parts import PLAY_BYTES, Part, RecordedPlay, Recording


class Marked(Environment):
    """Keeps the marks that it gets, and answers with the next one."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    async def restore(self, mark: Any) -> None:
        self.marks.append(mark)

    async def step(self, text: str) -> Act:
        return Act(mark=self.marks[-1] + 1)


def restored(*answers: dict[str, Any]) -> tuple[Marked, RecordedEnvironment]:
    play = RecordedPlay(b"0" * PLAY_BYTES, (Part(answers=answers),))
    inner = Marked()
    return inner, RecordedEnvironment(inner, Recording(pytest.fail, play), "restore")


async def test_one_that_is_restored_gets_its_last_mark_alone_and_answers_what_comes_next() -> None:
    inner, environment = restored(asdict(Opening(mark=1)), asdict(Act(mark=2)))
    assert await environment.reset({}) == Opening(mark=1)
    assert inner.marks == []
    assert await environment.step("3") == Act(mark=2)
    assert inner.marks == [2]
    assert await environment.step("9") == Act(mark=3)
    assert inner.marks == [2]


async def test_an_answer_with_fields_that_this_release_does_not_know_begins_the_session_again() -> None:
    inner, environment = restored({**asdict(Opening(mark=1)), "of_another_release": True})
    with pytest.raises(DifferentAnswerError, match="of_another_release"):
        await environment.reset({})
    assert inner.marks == []
