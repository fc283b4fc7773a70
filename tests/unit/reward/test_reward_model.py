"""What a reward model is asked, how its scores become one value, and how its server batches rows."""

import math
import random
from typing import Any

import pytest

from tests.support.rewards import make_sample
from tests.support.trajectories import make_trajectory
from tidemill.common.config.reward_kinds import RewardModelConfig
from tidemill.common.wire.messages import Lane
from tidemill.services.reward.model_server.batcher import QueuedRow, select_batch
from tidemill.services.reward.model_server.options import ServerOptions
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.remote.reward_model import make_body, normalise, reduce_scores
from tidemill.services.reward.sample import RewardSample

SAMPLE = make_sample((0, 0), False, "d", "the answer", "1", {}, "the prompt: ", (1, 2), (7, 8, 9))
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def config(**fields: Any) -> RewardModelConfig:
    return RewardModelConfig(servers="s", **fields)


def test_token_ids_are_sent_as_they_are() -> None:
    assert make_body(SAMPLE, config(input="ids"))["input"] == [1, 2, 7, 8, 9]


def test_a_chat_ends_with_the_completion() -> None:
    completion = {"role": "assistant", "content": "the answer"}
    alone = make_body(SAMPLE, config())["messages"]
    assert alone == [{"role": "user", "content": "the prompt: "}, completion]
    sample = make_sample((0, 0), False, "d", "the answer", "1", {"prompt": CHAT}, "<s>...")
    assert make_body(sample, config())["messages"] == [*CHAT, completion]


def test_raw_scores_are_asked_for() -> None:
    assert make_body(SAMPLE, config(input="text")) == {
        "input": "the prompt: the answer",
        "use_activation": False,
    }
    cut = make_body(SAMPLE, config(max_tokens=4, head="token"))
    assert (cut["truncate_prompt_tokens"], cut["truncation_side"]) == (4, "left")
    assert cut["task"] == "token_classify"


@pytest.mark.parametrize(
    ("reduce", "expected"), [("last", 5.0), ("mean", 4.0), ("min", 3.0), ("sum", 12.0), ("all_mean", 3.0)]
)
def test_scores_of_tokens_become_one(reduce: Any, expected: float) -> None:
    score = reduce_scores(
        [[1.0], [2.0], [3.0], [4.0], [5.0]], SAMPLE, config(head="token", input="ids", token_reward=reduce)
    )
    assert score == expected


def test_an_empty_completion_has_no_token_score_and_no_zero() -> None:
    empty = make_sample((0, 0), False, "d", "", "1", {}, "p", (1, 2), ())
    with pytest.raises(AttemptError, match="empty"):
        reduce_scores([[1.0], [2.0]], empty, config(head="token", input="ids", token_reward="sum"))


def test_one_of_several_labels_is_the_reward() -> None:
    assert reduce_scores([0.1, 0.7], SAMPLE, config(label=1)) == 0.7


def test_normalisation_is_what_it_says() -> None:
    assert normalise(1.5, config()) == 1.5
    assert normalise(0.0, config(normalise="sigmoid")) == 0.5
    assert normalise(-1e6, config(normalise="sigmoid")) == 0.0
    assert normalise(2.0, config(normalise="sigmoid")) == pytest.approx(1 / (1 + math.exp(-2)))
    assert normalise(7.0, config(normalise="standardise", mean=3.0, std=2.0)) == 2.0
    assert normalise(9.0, config(clip=(-5.0, 5.0))) == 5.0
    assert normalise(9.0, config(normalise="standardise", mean=3.0, std=2.0, clip=(-1.0, 1.0))) == 1.0


def test_a_row_of_text_is_asked_about_without_the_policys_template() -> None:
    sample = RewardSample(
        make_trajectory(text="2", prompt_text="<|user|>1+1?<|assistant|>", own_text="1+1?"), Lane.TRAIN
    )
    asked = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    assert make_body(sample, config())["messages"] == asked
    assert make_body(sample, config(input="text"))["input"] == "<|user|>1+1?<|assistant|>2"


def test_an_answer_that_the_prompt_began_is_one_message() -> None:
    begun = [CHAT[1], {"role": "assistant", "content": "It is "}]
    sample = make_sample((0, 0), False, "d", "2", "1", {"prompt": begun}, "<s>...")
    assert make_body(sample, config())["messages"] == [CHAT[1], {"role": "assistant", "content": "It is 2"}]


LIMITS = ServerOptions(model="m", max_batch_tokens=100, max_batch_rows=8, max_padding=0.3)


def queued(*lengths: int, priority: int = 0) -> list[QueuedRow]:
    return [QueuedRow([1] * length, priority) for length in lengths]


def lengths_of(batch: list[QueuedRow]) -> list[int]:
    return [len(row.token_ids) for row in batch]


@pytest.mark.parametrize(
    ("lengths", "urgent", "expected"),
    [
        ([], [], []),
        ([10, 90, 11, 88, 9], [], [9, 10, 11]),  # of like length
        ([95, 5, 5, 5, 5], [], [95]),  # the oldest row is always in
        ([500, 500, 5], [], [500]),  # above the budget it goes alone
        ([10, 10, 45], [50], [45, 50]),  # urgent queued go first, and take others along
        ([30, 30, 30], [30, 24], [24, 30, 30]),  # also before one that is nearer in length
    ],
)
def test_the_next_batch_by_hand(lengths: list[int], urgent: list[int], expected: list[int]) -> None:
    waiting = queued(*lengths) + queued(*urgent, priority=-1)
    assert lengths_of(select_batch(waiting, LIMITS)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_limits_hold_and_every_row_is_served_in_the_end(seed: int) -> None:
    chance = random.Random(seed)
    waiting = queued(*(chance.randint(1, 120) for _ in range(60)))
    rounds = 0
    while waiting:
        batch = select_batch(waiting, LIMITS)
        assert waiting[0] in batch
        padded = max(lengths_of(batch)) * len(batch)
        assert len(batch) == 1 or padded <= LIMITS.max_batch_tokens
        assert len(batch) <= LIMITS.max_batch_rows
        assert padded - sum(lengths_of(batch)) <= LIMITS.max_padding * padded
        waiting = [row for row in waiting if row not in batch]
        rounds += 1
    assert rounds < 60
