"""Texts to stop at are found wherever tokens divide them, and however many tokens come at once."""

import pytest

from tidemill.services.rollout.engines.engine import StopTexts


def decode(token_ids: list[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize("num_at_once", [1, 3, 1000])
@pytest.mark.parametrize("text", ["x" * 500 + "\nObs: y", "\nObs", "é" * 300 + "\nObs" + "é" * 40])
def test_a_text_is_reached_once_with_the_tokens_that_complete_it(text: str, num_at_once: int) -> None:
    ids = list(text.encode())
    stops = StopTexts(["never", "\nObs"], decode)
    ends = [*range(num_at_once, len(ids), num_at_once), len(ids)]
    reached = [end for end in ends if stops.reach(ids[:end])]
    whole = len(text[: text.index("\nObs")].encode()) + 4
    assert reached == [next(end for end in ends if end >= whole)] and stops.is_reached


def test_without_texts_nothing_is_decoded() -> None:
    assert not StopTexts([], pytest.fail).reach([1, 2, 3])
