"""What a group takes in: the first entry of a key wins, and a score counts for its own tokens only."""

from itertools import permutations
from typing import Any

import numpy as np

from tests.support.training import make_score
from tests.support.trajectories import make_trajectory
from tidemill.common.streams import Entry
from tidemill.common.wire.messages import Score, Trajectory
from tidemill.services.trainer.groups.group_filter import PendingGroup


def made(text: str, index: int = 0) -> tuple[Trajectory, Score]:
    """A sample whose tokens are its text, and a score of them: 0.25 for `lost`, 0.75 for others."""
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    logprobs = np.full(len(ids), -0.5, np.float32)
    sample = make_trajectory(0, index, text, group_size=2, completion_ids=ids, logprobs=logprobs)
    value = 0.25 if text == "lost" else 0.75
    return sample, make_score(0, index, value, tokens_digest=sample.tokens_digest)


def group_of(*messages: Any) -> tuple[PendingGroup, list[str]]:
    """A group of two that was given these messages, and the ids (from 1 on) of those that do not count."""
    group = PendingGroup(0, 0, group_size=2)
    entries = [Entry(f"{number}-0", message) for number, message in enumerate(messages, 1)]
    return group, [refused.entry_id for entry in entries for refused in group.take(entry)]


def values(group: PendingGroup) -> dict[int, float | None]:
    return {index: score.value for index, score in sorted(group.scores.items())}


def test_the_first_entry_of_a_key_wins_and_no_other_index_counts() -> None:
    texts = [make_trajectory(0, index, text, group_size=9) for index, text in ((0, "a"), (0, "b"), (8, "c"))]
    group, refused = group_of(*texts, make_score(0, 0, 0.25), make_score(0, 0, 0.75), make_score(0, 8))
    assert refused == ["2-0", "3-0", "5-0", "6-0"]
    assert ([sample.text for sample in group.trajectories.values()], values(group)) == (["a"], {0: 0.25})
    assert (group.trajectory_ids, group.score_ids) == ({0: "1-0"}, {0: "4-0"})


def test_scores_of_other_tokens_are_refused_and_those_of_its_own_are_taken() -> None:
    """A key has come twice: `lost` was generated before Redis lost its tail, `again` after it."""
    (_, old), (sample, own) = made("lost"), made("again")
    for in_order in permutations((sample, old, own)):
        group, refused = group_of(*in_order)
        assert values(group) == {0: 0.75} and not group.other_scores
        is_never_first = in_order[0] is own and in_order[2] is sample
        assert refused == ([] if is_never_first else [f"{in_order.index(old) + 1}-0"])


def test_scores_of_other_tokens_do_not_complete_a_group() -> None:
    (_, old), (again, _), (other, its) = made("lost"), made("again"), made("again", 1)
    for in_order in ((old, other, its, again), (again, other, its, old)):
        group, _ = group_of(*in_order)
        assert not group.is_complete and list(group.scores) == [1]


def test_a_score_of_an_older_release_names_no_tokens_and_is_taken() -> None:
    assert values(group_of(made("again")[0], make_score(0, 0, 0.5))[0]) == {0: 0.5}


def test_scores_that_wait_for_their_trajectory_are_bounded() -> None:
    group, refused = group_of(*(made(text)[1] for text in ("lost", "one", "two", "three", "four")))
    assert [entry.entry_id for entry in group.other_scores] == ["2-0", "3-0"]
    assert refused == ["4-0", "5-0"]
