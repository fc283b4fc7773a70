"""A program's main task: its result is returned and never put into words."""

import asyncio

import pytest

from common.process.programs import run_main


class Large:
    """Stands for the records of a run, whose words take minutes and gigabytes. Counts who asks for them."""

    num_asked = 0

    def __repr__(self) -> str:
        self.num_asked += 1
        return "words"


def test_a_result_is_returned_without_being_put_into_words() -> None:
    result = Large()

    async def work() -> Large:
        await asyncio.sleep(0)
        return result

    assert run_main(work()) is result
    assert result.num_asked == 0


def test_an_error_is_raised_as_it_is() -> None:
    async def work() -> None:
        raise KeyError("as it is")

    with pytest.raises(KeyError, match="as it is"):
        run_main(work())
