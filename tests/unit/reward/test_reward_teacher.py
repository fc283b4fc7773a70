"""A teacher as a reward: what it is asked, what is read from its answer, and how its logprobs travel."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tests.support.rewards import dependencies_of, together
from tests.support.sessions import make_segment, make_session
from tests.support.trajectories import make_trajectory
from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.reward_kinds import TeacherConfig
from tidemill.common.config.servers import ServersConfig
from tidemill.common.errors import ConfigError
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Lane, Score, ScoreStatus
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.remote.teacher import TeacherPrompt, TeacherReward, TeacherRow, read_logprobs
from tidemill.services.reward.rewards.cache import _digest
from tidemill.services.reward.rewards.reward import check_reward
from tidemill.services.reward.rewards.weighted_sum import score_of
from tidemill.services.reward.sample import RewardSample

LOGPROBS = np.array([-0.25, -2.0, -0.125], np.float32)
SAMPLE = RewardSample(make_trajectory(), Lane.TRAIN)


class Told:
    """A teacher without a server, or another reward."""

    slots = None

    def __init__(self, outcome: RewardOutcome | Exception) -> None:
        self.outcome = outcome

    async def score(self, sample: RewardSample) -> RewardOutcome:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def close(self) -> None: ...


TEACHER = Told(RewardOutcome(None, {"logprob": -1.0}, teacher_logprobs=LOGPROBS.tobytes()))


async def scored(**rewards: tuple[Any, dict[str, Any]]) -> Score:
    total = together(rewards)
    return score_of(total.sum_up(await total.score(SAMPLE)), SAMPLE, "w", 0.1)


async def test_a_teacher_adds_nothing_to_the_sum_and_its_logprobs_stand_beside_it() -> None:
    score = await scored(wise=(TEACHER, {"weight": 3.0}), rule=(Told(RewardOutcome(0.5)), {"weight": 2.0}))
    assert (score.status, score.value) == (ScoreStatus.OK, 1.0)
    assert score.components == {"wise": None, "rule": 0.5, "wise/logprob": -1.0}
    np.testing.assert_array_equal(score.teacher_logprobs, LOGPROBS)


async def test_alone_the_score_is_a_zero_that_says_what_it_is() -> None:
    score = await scored(wise=(TEACHER, {}))
    assert (score.status, score.value) == (ScoreStatus.OK, 0.0) and score.teacher_logprobs is not None


@pytest.mark.parametrize("failing", ["wise", "rule"])
async def test_a_failed_teacher_or_companion_is_a_failed_score(failing: str) -> None:
    broken = Told(AttemptError("no answer")), {"on_failure": "drop_group"}
    score = await scored(**{"wise": (TEACHER, {}), "rule": (Told(RewardOutcome(1.0)), {}), failing: broken})
    assert (score.status, score.value, score.on_failure) == (ScoreStatus.FAILED, None, "drop_group")
    assert f"{failing}: no answer" in score.error and score.teacher_logprobs is None


def score_with(**fields: Any) -> Score:
    values = {"ticket": 1, "index": 2, "status": "ok", "value": 0.5, "scored_at": 7.0}
    return Score(**(values | fields))


def test_scores_without_a_teacher_are_the_bytes_that_they_were():
    # Written by the release before teachers.
    before = codec.pack({"ticket": 1, "index": 2, "status": "ok", "scored_at": 7.0, "value": 0.5})
    assert codec.encode_payload(score_with()) == before
    assert codec.decode_payload(before, Score).teacher_logprobs is None


@pytest.mark.parametrize("logprobs", [LOGPROBS, np.zeros(0, np.float32), None])
def test_logprobs_come_through_the_wire_bit_by_bit(logprobs: Any) -> None:
    score = score_with(teacher_logprobs=logprobs)
    fields = codec.encode(score)
    assert codec.decode(fields, Score) == score


def test_logprobs_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValidationError, match="must be finite"):
        score_with(teacher_logprobs=np.array([np.nan], np.float32))


def test_a_part_goes_into_the_cache_and_comes_back() -> None:
    outcome = TEACHER.outcome
    assert RewardOutcome(**codec.unpack(codec.pack(asdict(outcome)))) == outcome


class TestRows:
    def test_a_row_ends_with_the_last_sampled_token(self) -> None:
        row = TeacherRow([1, 2], [3, 4, 5, 6], [True, False, True, False])
        assert (row.ids, row.places) == ([1, 2, 3, 4, 5], [2, 4])

    def test_nothing_sampled_is_nothing_to_ask(self) -> None:
        assert TeacherRow([1, 2], [3], [False]).places == [] and TeacherRow([1], [], []).places == []


def answer(*rows: list[Any]) -> dict[str, Any]:
    """One choice for each row, last row first."""
    choices = [{"index": i, "prompt_logprobs": row} for i, row in enumerate(rows)]
    return {"choices": choices[::-1]}


def entry(token: int, logprob: Any, **others: Any) -> dict[str, Any]:
    return {str(token): {"logprob": logprob, "rank": 1}} | others


ROWS = [TeacherRow([1, 2], [3, 4, 5], [True, False, True]), TeacherRow([7], [8], [True])]
GOOD = [None, entry(2, -9.0), entry(3, -0.5), entry(4, -9.0), entry(5, -0.75, **{"9": {"logprob": -0.1}})]


def test_logprobs_are_read_at_the_sampled_tokens_whatever_the_order_of_choices() -> None:
    logprobs = read_logprobs(answer(GOOD, [None, entry(8, -0.1)]), ROWS)
    assert logprobs.dtype == np.float32
    np.testing.assert_array_equal(logprobs, np.array([-0.5, -0.75, -0.1], np.float32))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([GOOD], "1 choices for 2"),
        ([GOOD[:-1], [None, entry(8, -0.1)]], "4 prompt_logprobs for 5"),
        ([GOOD, None], "no prompt_logprobs"),
        ([GOOD, [None, None]], "no logprob for token 1"),
        ([GOOD, [None, entry(9, -0.1)]], "8"),
        ([GOOD, [None, entry(8, float("nan"))]], "nan"),
        ([GOOD, [None, entry(8, 0.5)]], "0.5"),
    ],
)
def test_an_answer_that_lacks_a_logprob_is_no_answer(rows: Any, said: str) -> None:
    with pytest.raises((ValueError, LookupError), match=said):
        read_logprobs(answer(*rows), ROWS)


class TestOwnPrompt:
    def of(self, sample: RewardSample, **fields: Any) -> Any:
        teacher = TeacherConfig(servers="s", **fields)
        return TeacherPrompt("wise", NamedRewardConfig(teacher=teacher)).of(sample)

    def sample(self, **extra: Any) -> RewardSample:
        return RewardSample(make_trajectory(extra=extra), Lane.TRAIN)

    def test_is_text_or_messages_of_a_column(self) -> None:
        chat = [{"role": "user", "content": "2+2? It is 4."}]
        sample = self.sample(hint="2+2=4. 2+2=", chat=chat)
        assert self.of(sample, prompt_column="hint") == "2+2=4. 2+2="
        assert self.of(sample, prompt_column="chat") == chat
        as_chat = self.of(sample, prompt_column="hint", chat=True)
        assert as_chat == [{"role": "user", "content": "2+2=4. 2+2="}]

    def test_is_made_by_a_template(self) -> None:
        prompt = self.of(self.sample(hint="add"), template="{{ extra.hint }}, {{ ground_truth }}")
        assert prompt == "add, 1"

    @pytest.mark.parametrize(
        ("extra", "said"), [({}, "is not there"), ({"hint": ""}, "is empty"), ({"hint": 3}, "is no")]
    )
    def test_that_is_missing_fails_the_sample_and_names_the_columns(self, extra: Any, said: str) -> None:
        with pytest.raises(AttemptError, match=said) as caught:
            self.of(self.sample(other=1, **extra), prompt_column="hint")
        assert caught.value.is_final and "other" in str(caught.value)

    async def test_stands_where_the_rows_prompt_stood_in_whatever_order_segments_are(self) -> None:
        class Teacher(TeacherReward):
            async def _ids(self, prompt: Any, sample: RewardSample) -> list[int]:
                return [90, 91]

        config = NamedRewardConfig(teacher=TeacherConfig(servers="s", prompt_column="hint"))
        teacher = Teacher("wise", config, dependencies_of(None))
        branch = make_segment((3, 4, 5, 6), (7,))
        main = make_segment((3, 4), (5,), (8,), (9,))
        session = make_session(0, 1, branch, main, extra={"hint": "a"})
        rows = await teacher._rows(RewardSample(session, Lane.TRAIN))
        assert [row.ids for row in rows] == [[90, 91, 5, 6, 7], [90, 91, 5, 8, 9]]

    def test_a_template_that_cannot_be_filled_in_is_final(self) -> None:
        with pytest.raises(AttemptError, match=r"teacher\.template cannot be filled in") as caught:
            self.of(self.sample(), template="{{ extra.hint.deep }}")
        assert caught.value.is_final


def test_what_is_no_template_is_found_before_the_run() -> None:
    reward = NamedRewardConfig(teacher=TeacherConfig(servers="s", template="{{ a"))
    with pytest.raises(ConfigError, match=r"wise.teacher.template is no Jinja template"):
        check_reward("wise", reward, {"s": ServersConfig()})


def test_the_cache_tells_sessions_apart_by_their_first_segments() -> None:
    last = make_segment((14, 15, 16), (17, 18), (19,))
    digests = set()
    for ids in ((3, 4), (3, 5)):
        session = make_session(0, 1, make_segment(ids, (6,), (8,), (11,)), last)
        digests.add(_digest("v", RewardSample(session, Lane.TRAIN)))
    assert len(digests) == 2
