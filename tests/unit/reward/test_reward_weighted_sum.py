"""Attempts, and several rewards: their weighted sum, what does not apply, and what each failure means."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.rewards import make_sample, scorer_of, together
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.config import NamedRewardConfig, RewardConfig, parse_config
from tidemill.common.errors import ConfigError
from tidemill.common.store import ClaimStore
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Lane, Score, ScoreStatus
from tidemill.services.reward.outcome import MAX_TRY_CHARS, AttemptError, RewardOutcome
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.rewards.weighted_sum import NONE_APPLIES, make_weighted_sum, score_of
from tidemill.services.reward.sample import RewardSample


class Scripted:
    """Gives one answer after another, the last one for ever: an outcome, a value, or an error to raise."""

    slots = None

    def __init__(self, *answers: RewardOutcome | BaseException | float | None, **components: float) -> None:
        self.answers = list(answers)
        self.components = components
        self.calls = 0

    async def score(self, sample: RewardSample) -> RewardOutcome:
        self.calls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, RewardOutcome) else RewardOutcome(answer, dict(self.components))

    async def close(self) -> None: ...


async def score(reward: Any, lane: Lane = Lane.TRAIN, **config: Any) -> Score:
    """What a worker that has this reward alone makes of a sample."""
    scorer = scorer_of(reward, RewardConfig(**({"backoff_s": 0.0} | config)))
    return await scorer.score(make_trajectory(3, 2), lane)


LATE = AttemptError("too late", is_timeout=True)


async def total(source: str = "", **rewards: tuple[Any, dict[str, Any]]) -> RewardOutcome:
    total = together(rewards)
    sample = make_sample((0, 0), False, "gsm8k", "text", "truth", source=source)
    return total.sum_up(await total.score(sample))


async def test_the_reward_is_the_weighted_sum_and_each_part_is_kept() -> None:
    outcome = await total(
        rule=(Scripted(1.0, digits=3.0), {"weight": 2.0}), judge=(Scripted(0.5), {"weight": -1.0})
    )
    assert (outcome.status, outcome.value) == (ScoreStatus.OK, 1.5)
    assert outcome.components == {"rule": 1.0, "judge": 0.5, "rule/digits": 3.0}


async def test_what_does_not_apply_is_left_out_of_the_sum() -> None:
    outcome = await total(
        rule=(Scripted(None), {"weight": 5.0}),
        other=(Scripted(9.0), {"applies_to": ["math"]}),
        judge=(Scripted(0.5), {"applies_to": ["gsm8k"]}),
    )
    assert (outcome.status, outcome.value) == (ScoreStatus.OK, 0.5)
    assert outcome.components == {"rule": None, "other": None, "judge": 0.5}


@pytest.mark.parametrize(("source", "value"), [("math", 1.0), ("code", 0.5), ("chat", 4.5)])
async def test_each_source_has_the_rewards_that_name_it_and_those_that_name_none(source, value):
    outcome = await total(
        source,
        answer=(Scripted(1.0), {"sources": ["math"]}),
        tests=(Scripted(0.5), {"sources": ["code", "chat"]}),
        taste=(Scripted(4.0), {"sources": ["chat"], "applies_to": ["gsm8k"]}),
        style=(Scripted(9.0), {"sources": ["math", "code"], "applies_to": ["other"]}),
    )
    assert (outcome.status, outcome.value) == (ScoreStatus.OK, value)


async def test_where_nothing_applies_the_score_has_failed_and_is_no_zero() -> None:
    outcome = await total(rule=(Scripted(None), {}), judge=(Scripted(None), {}))
    assert (outcome.status, outcome.value, outcome.error) == (ScoreStatus.FAILED, None, NONE_APPLIES)


@pytest.mark.parametrize("policy", ["drop_sample", "drop_group"])
async def test_a_failed_part_fails_the_score_with_its_own_policy(policy: str) -> None:
    outcome = await total(
        rule=(Scripted(1.0), {}), judge=(Scripted(LATE), {"on_failure": policy, "max_attempts": 2})
    )
    assert (outcome.status, outcome.value, outcome.on_failure) == (ScoreStatus.TIMEOUT, None, policy)
    assert (outcome.error, len(outcome.tries)) == ("judge: too late", 2)
    assert outcome.components == {"rule": 1.0, "judge": None}


async def test_the_strictest_policy_of_several_failures_wins() -> None:
    outcome = await total(
        one=(Scripted(ValueError("broken")), {"max_attempts": 1}),
        two=(Scripted(LATE), {"max_attempts": 1, "on_failure": "drop_group"}),
    )
    assert outcome.on_failure == "drop_group"
    assert "one: ValueError: broken" in outcome.error and "two: too late" in outcome.error


async def test_a_failure_with_a_value_goes_into_the_sum_and_is_told() -> None:
    fixed = {"on_failure": -1.0, "max_attempts": 1, "weight": 2.0}
    outcome = await total(rule=(Scripted(1.0), {}), judge=(Scripted(LATE), fixed))
    assert (outcome.status, outcome.value, outcome.components["judge"]) == (ScoreStatus.OK, -1.0, -1.0)
    assert outcome.detail["failures"] == {"judge": "too late"}


async def test_each_reward_has_its_own_attempts_and_counts_its_own_failures() -> None:
    patient = Scripted(LATE)
    hasty = Scripted(AttemptError("no", kind="http_500"))
    total = together({"patient": (patient, {"max_attempts": 4}), "hasty": (hasty, {"max_attempts": 1})})
    await total.score(make_sample((0, 0), False, "", "", ""))
    assert (patient.calls, hasty.calls) == (4, 1)
    assert total.failures() == {"patient:timeout": 1, "hasty:http_500": 1}


async def test_what_a_server_asks_for_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def note(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(asyncio, "sleep", note)
    await total(judge=(Scripted(AttemptError("busy", retry_after_s=17.0)), {"max_attempts": 2}))
    assert pauses == [17.0]


async def test_evaluation_never_waits_for_places_that_training_holds() -> None:
    gate = asyncio.Event()
    started = list[bool]()

    class Gated(Scripted):
        async def score(self, sample: RewardSample) -> RewardOutcome:
            started.append(sample.is_evaluation)
            if not sample.is_evaluation:
                await gate.wait()
            return RewardOutcome(1.0)

    total = together({"judge": (Gated(1.0), {"max_concurrent": 2})})
    training = [asyncio.create_task(total.score(make_sample((t, 0), False, "", "", ""))) for t in range(5)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert started == [False, False]
    evaluated = await asyncio.wait_for(total.score(make_sample((9, 0), True, "", "", "")), 10)
    assert evaluated["judge"].value == 1.0
    gate.set()
    await asyncio.gather(*training)
    assert len(started) == 6


def test_limits_of_the_section_hold_for_rewards_that_have_none_of_their_own() -> None:
    config = RewardConfig.model_validate(
        {
            "timeout_s": 5.0, "on_failure": 0.5,
            "rewards": {
                "a": {"function": "math"},
                "b": {"function": "gsm8k", "timeout_s": 9, "on_failure": "drop_group"},
            },
        }
    )  # fmt: skip
    a = config.named["a"]
    b = config.named["b"]
    assert (a.timeout_s, a.on_failure, a.failure_value) == (5.0, 0.5, 0.5)
    assert (b.timeout_s, b.on_failure, b.failure_value) == (9.0, "drop_group", None)
    assert RewardConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (
            {"function": "math", "rewards": {"a": {"function": "math"}}},
            "either function, for one reward, or rewards",
        ),
        (
            {"rewards": {"a": {}}},
            "exactly one of function, judge, model, sandbox, environment, teacher; got none",
        ),
        ({"rewards": {"a b": {"function": "math"}}}, "reward.rewards"),
        ({"kwargs": {"x": 1}, "rewards": {"a": {"function": "math"}}}, "rewards.<name>.kwargs"),
        ({"group_kwargs": {"x": 1}}, "no group function"),
    ],
)
def test_a_section_that_contradicts_itself_is_refused(reward: dict[str, Any], expected: str) -> None:
    tree = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": reward}
    with pytest.raises(ConfigError, match=expected):
        parse_config(tree, "test")


def test_one_function_is_a_reward_named_after_itself() -> None:
    (name, named), *_ = RewardConfig(function="a.py:format_reward", timeout_s=3.0, style="trl").named.items()
    assert (name, named.timeout_s, named.style, named.kind) == ("format_reward", 3.0, "trl", "function")
    assert list(RewardConfig().named) == ["gsm8k"]
    assert NamedRewardConfig(function="gsm8k").is_cached is False


async def test_a_reward_of_one_lane_is_left_out_of_the_other() -> None:
    """One reward for training and another for validation, as verl users have them."""
    dense = (Scripted(0.3), {"lanes": ["train"]})
    exact = (Scripted(1.0), {"lanes": ["eval"]})
    rewards = together({"dense": dense, "exact": exact, "both": (Scripted(5.0), {})})
    for is_evaluation, value, left_out in ((False, 5.3, "exact"), (True, 6.0, "dense")):
        total = rewards.sum_up(await rewards.score(make_sample((0, 0), is_evaluation, "", "", None)))
        assert total.value == pytest.approx(value)
        assert total.components[left_out] is None


@pytest.mark.parametrize(
    ("lanes", "said"), [(["eval"], "training"), (["train"], "evaluation"), ([], "lanes")]
)
def test_each_lane_needs_a_reward(lanes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config(reward={"rewards": {"only": {"function": "gsm8k", "lanes": lanes}}})


async def test_a_sum_that_no_float_can_hold_is_a_failure_and_ends_no_worker() -> None:
    outcome = await total(rule=(Scripted(1e308), {"weight": 100.0}))
    score = score_of(outcome, make_sample((0, 0), False, "", "", ""), "w", 0.0)
    assert (score.status, score.value) == (ScoreStatus.FAILED, None) and "inf" in score.error


async def test_a_sample_whose_payload_cannot_be_had_has_failed_and_no_reward_is_asked(tmp_path: Path) -> None:
    store = ClaimStore(tmp_path, 1)
    reward = Scripted()
    claim = store.check_in(make_trajectory(3, 2))
    next(store.folder.iterdir()).unlink()
    result = await scorer_of(reward, RewardConfig()).score(store.resolve(claim), Lane.TRAIN)
    assert (result.key, result.status, result.value) == ((3, 2), ScoreStatus.FAILED, None)
    assert "cannot be had: No such file" in result.error and not reward.calls


async def test_a_score_carries_value_components_and_who_made_it() -> None:
    result = await score(Scripted(RewardOutcome(0.5, {"fluency": 1.0, "judge": None}, {"verdict": "good"})))
    assert (result.key, result.status, result.value, result.attempts) == ((3, 2), ScoreStatus.OK, 0.5, 1)
    assert (result.components, result.detail) == ({"fluency": 1.0, "judge": None}, {"verdict": "good"})
    assert (result.worker, result.error) == ("w1", "")
    assert result.latency_s > 0


async def test_a_failed_attempt_is_repeated_and_all_of_several_are_on_record() -> None:
    result = await score(Scripted(AttemptError("once"), ValueError("twice"), RewardOutcome(1.0)))
    assert (result.status, result.value, result.attempts, result.error) == (ScoreStatus.OK, 1.0, 3, "")
    names, took_s, paused_s, errors = zip(*result.tries, strict=True)
    assert len(set(names)) == 1 and errors[0] == "once" and "twice" in errors[1] and errors[2] == ""
    assert paused_s[0] == 0.0 and min(*took_s, *paused_s) >= 0.0
    assert (await score(Scripted(RewardOutcome(1.0)))).tries == ()
    lost = await score(Scripted(AttemptError("no")), max_attempts=2)
    assert [error for *_, error in lost.tries] == ["no", "no"]


@pytest.mark.parametrize(
    ("error", "status", "attempts"),
    [
        (AttemptError("no"), ScoreStatus.FAILED, 2),
        (AttemptError("late", is_timeout=True), ScoreStatus.TIMEOUT, 2),
        (AttemptError("never", is_final=True), ScoreStatus.FAILED, 1),
    ],
)
async def test_after_the_last_attempt_the_score_has_a_status_and_no_value(error, status, attempts):
    reward = Scripted(error)
    result = await score(reward, max_attempts=2)
    assert (result.status, result.value) == (status, None)
    assert (result.attempts, result.error) == (attempts, str(error))
    assert reward.calls == attempts


async def test_cancelling_ends_the_work_at_once() -> None:
    with pytest.raises(asyncio.CancelledError):
        await score(Scripted(asyncio.CancelledError(), RewardOutcome(1.0)))


async def test_the_delay_of_benchmarks_depends_on_the_trajectory_alone(monkeypatch):
    slept: list[float] = []

    async def note(delay_s: float) -> None:
        slept.append(delay_s)

    monkeypatch.setattr("tidemill.services.reward.worker.asyncio.sleep", note)
    for worker in ("one", "two"):
        reward = Scripted(1.0)
        scorer = scorer_of(reward, RewardConfig(delay_s=(1.0, 40.0)), worker, seed=7)
        for index in range(3):
            await scorer.score(make_trajectory(5, index), Lane.TRAIN)
    assert slept[:3] == slept[3:]
    assert len(set(slept)) == 3
    assert all(1.0 <= delay_s <= 40.0 for delay_s in slept)


def test_kept_results_of_a_function_are_of_what_the_servers_of_its_router_serve() -> None:
    def version_with(model: str) -> str:
        rewards = {"asks": {"function": "exact_match", "router": "grader", "cache": True}}
        servers = {"grader": {"base_urls": ["http://127.0.0.1:1/v1"], "model": model}}
        config = make_config(reward={"rewards": rewards}, servers=servers)
        redis: Any = None
        dependencies = RewardDependencies(config, redis, Keys("run"), "reward-0")
        (named,) = make_weighted_sum(config.reward, dependencies).rewards
        return named.version

    assert version_with("a") == version_with("a")
    assert version_with("a") != version_with("b")


def test_a_worker_names_the_field_of_the_reward_that_it_cannot_load() -> None:
    redis: Any = None
    for reward, field in (
        (
            {"rewards": {"asks": {"function": "exact_match", "kwargs": {"mood": 1}}}},
            "reward.rewards.asks.kwargs ",
        ),
        ({"function": "exact_match", "kwargs": {"mood": 1}}, "reward.kwargs "),
        (
            {"rewards": {"asks": {"function": "my.reward.function:score"}}},
            "reward.rewards.asks.function my.reward.function:score",
        ),
    ):
        config = make_config(reward=reward)
        dependencies = RewardDependencies(config, redis, Keys("run"), "reward-0")
        with pytest.raises(ConfigError) as caught:
            make_weighted_sum(config.reward, dependencies)
        assert str(caught.value).startswith(field)


async def test_the_reason_of_each_of_several_attempts_keeps_its_line() -> None:
    failure = AttemptError(f"ValueError: {'no digit ' * 99}(mine.py, line 4)")
    result = await score(Scripted(failure, 1.0), max_attempts=2)
    reasons = [reason for *_, reason in result.tries]
    assert reasons[0].endswith("(mine.py, line 4)") and len(reasons[0]) == MAX_TRY_CHARS
    assert reasons[1:] == [""]
