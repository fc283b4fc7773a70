"""Functions written for verl and TRL, called as those systems call them."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from tests.support.samples import make_sample
from tidemill.common.config import NamedRewardConfig
from tidemill.common.errors import ConfigError
from tidemill.services.reward.functions.request import Request, run_through
from tidemill.services.reward.functions.reward_function import RewardFunction, load_function
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.rewards.reward import check_reward
from tidemill.services.reward.sample import RewardSample

CHAT = [{"role": "user", "content": "1+1?"}]


def sample(text: str = "2", index: int = 0, **fields: Any) -> RewardSample:
    values: dict[str, Any] = {
        "data_source": "src", "ground_truth": "truth", "extra_info": {}, "prompt_text": "<user>1+1?",
        "completion_ids": np.array([5, 6], dtype=np.int32), "step": 7,
    }  # fmt: skip
    return make_sample((3, index), False, solution_str=text, **(values | fields))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a module and load one of its functions."""

    def load(source: str, name: str = "reward", style: str = "auto", **kwargs: Any) -> RewardFunction:
        path = tmp_path / f"rewards{len(list(tmp_path.iterdir()))}.py"
        path.write_text(dedent(source))
        return load_function(f"{path}:{name}", kwargs, style)

    return load


def call(function: RewardFunction, *samples: RewardSample, **given: Any) -> list[RewardOutcome]:
    return run_through(function.call(Request(list(samples), given)))


def test_verls_own_functions_need_not_take_a_data_source(load: Any) -> None:
    function = load(
        "def reward(solution_str, ground_truth, method='strict', score=1.0): return score", score=0.5
    )
    assert call(function, sample())[0].value == 0.5


async def test_router_and_tokenizer_reach_a_function_that_takes_them(load: Any) -> None:
    function = load("""
        async def reward(data_source, solution_str, ground_truth, extra_info, reward_router_address,
                         reward_model_tokenizer):
            return {"score": 1, "seen": [reward_router_address, reward_model_tokenizer]}
    """)
    request = Request([sample()], {"reward_router_address": "host:1"})
    assert (await function.call(request))[0].detail["seen"] == ["host:1", None]


def test_a_function_that_insists_on_a_router_needs_one_in_the_config(load: Any) -> None:
    function = load("def reward(solution_str, reward_router_address): return 1.0")
    with pytest.raises(ConfigError, match="say with `router`"):
        check_reward("mine", NamedRewardConfig(function=function.name), {})
    check_reward("mine", NamedRewardConfig(function=function.name, router="judge"), {})


def test_a_function_sees_whether_it_scores_training_or_evaluation(load: Any) -> None:
    by_name = load("def reward(solution_str, is_evaluation): return float(is_evaluation)")
    by_info = load(
        "def reward(solution_str, extra_info): return float(extra_info['is_evaluation'])", "reward"
    )
    evaluated = make_sample((0, 0), True, "", "text", None)
    for function in (by_name, by_info):
        assert [call(function, s)[0].value for s in (sample(), evaluated)] == [0.0, 1.0]
    listed = load("def reward(completions, is_evaluation): return [float(bool(is_evaluation))]", "reward")
    assert [call(listed, s)[0].value for s in (sample(), evaluated)] == [0.0, 1.0]


SEEN = """
    def reward(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **columns):
        log_metric("share", 0.25)
        log_extra("note", ["n" + str(i) for i in range(len(prompts))])
        SEEN.append((prompts, completions, completion_ids, answer, trainer_state.global_step, columns))
        return [None] * len(prompts)
    SEEN = []
"""


def test_trl_functions_get_lists_and_the_columns_of_the_dataset(load: Any) -> None:
    function = load(SEEN)
    rows = [sample("a", 0, extra_info={"answer": 1, "level": "x"}), sample("b", 1, extra_info={"answer": 2})]
    first, second = call(function, *rows)
    (seen,) = function.function.__globals__["SEEN"]
    prompts, completions, completion_ids, answer, step, columns = seen
    assert (prompts, completions) == (["<user>1+1?"] * 2, ["a", "b"])
    assert (completion_ids, answer, step) == ([[5, 6], [5, 6]], [1, 2], 7)
    assert columns == {"data_source": ["src"] * 2, "ground_truth": ["truth"] * 2, "level": ["x", None]}
    assert (first.value, first.components, first.detail) == (None, {"share": 0.25}, {"note": "n0"})
    assert second.detail == {"note": "n1"}


def test_a_dataset_of_chats_gives_trl_functions_chats(load: Any) -> None:
    function = load(SEEN)
    call(function, sample("hello", extra_info={"prompt": CHAT, "answer": 1}))
    (seen,) = function.function.__globals__["SEEN"]
    assert seen[0] == [CHAT]
    assert seen[1] == [[{"role": "assistant", "content": "hello"}]]
    assert "prompt" not in seen[5]


def test_a_column_that_the_dataset_lacks_is_named_and_not_tried_again(load: Any) -> None:
    function = load("def reward(completions, solution): return [1.0]")
    with pytest.raises(
        AttemptError, match=r"takes solution, which is no column.*data_source, ground_truth"
    ) as caught:
        call(function, sample())
    assert caught.value.is_final


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("1.0", "returned a float; expected a list of 1"),
        ("'good'", "returned the text 'good'; expected a list"),
        ("[1.0, 2.0]", "returned 2 rewards; expected 1"),
        ("['good']", "element 0 is the text 'good'"),
        ("[float('nan')]", "element 0 is nan"),
    ],
)
def test_a_trl_function_that_returns_something_else_has_failed(
    load: Any, returned: str, expected: str
) -> None:
    with pytest.raises(AttemptError, match=expected):
        call(load(f"def reward(completions, **kwargs): return {returned}"), sample())


def test_the_style_can_be_said_where_the_signature_does_not_tell(load: Any) -> None:
    function = load("def reward(**kwargs): return [float(len(kwargs['completions']))]", style="trl")
    assert call(function, sample())[0].value == 1.0
    with pytest.raises(ConfigError, match="has no compute_score, which style: class needs"):
        load("def reward(**kwargs): return 1.0", style="class")


def test_trls_own_rewards_run_unchanged() -> None:
    chat = {"prompt": CHAT, "solution": r"$\frac{1}{2}$"}
    accuracy = load_function("trl.rewards:accuracy_reward", {})
    assert [
        call(accuracy, sample(text, extra_info=chat))[0].value for text in (r"$\boxed{0.5}$", r"$\boxed{2}$")
    ] == [1.0, 0.0]
    unreadable = sample(r"$\boxed{0.5}$", extra_info={**chat, "solution": "no formula"})
    assert call(accuracy, unreadable)[0].value is None
    think = load_function("trl.rewards:think_format_reward", {})
    texts = "<think>\nso\n</think>\n2", "2"
    assert [call(think, sample(text, extra_info=chat))[0].value for text in texts] == [1.0, 0.0]


def test_per_group_is_for_functions_that_take_lists(load: Any) -> None:
    verl = load("def reward(solution_str): return 1.0")
    with pytest.raises(ConfigError, match="per: group needs a function in TRL's style"):
        check_reward("mine", NamedRewardConfig(function=verl.name, per="group"), {})


def test_a_class_is_made_with_its_kwargs_and_its_tuples_are_read(load: Any) -> None:
    source = """
        class Agent:
            def __init__(self, value): self.value = value
            def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
                return self.value, solution_str, "because"
            def post_process_scores(self, scores): return [score + 1 for score in scores]
    """
    agent = load(source, "Agent", value=0.5)
    (outcome,) = call(agent, sample("text"))
    assert (outcome.value, outcome.detail) == (0.5, {"notes": ["text", "because"]})
    changed = run_through(agent.call(Request([sample()] * 3, scores=[1.0, None, 2.0])))
    assert [outcome.value for outcome in changed] == [2.0, None, 3.0]
    with pytest.raises(ConfigError, match="does not fit the constructor"):
        load(source, "Agent", valu=1)


def test_trls_overlong_penalty_takes_no_completions_and_runs_as_it_is(load: Any) -> None:
    source = """
        from trl.rewards import get_soft_overlong_punishment
        penalty = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=5)
    """
    made_by_hand = load(source, "penalty")
    sizes = {"max_completion_len": 10, "soft_punish_cache": 5}
    by_its_maker = load_function("trl.rewards:get_soft_overlong_punishment", sizes)
    again = load_function(**by_its_maker.spec())  # as a process of its own loads it
    for function in (made_by_hand, by_its_maker, again):
        values = [call(function, sample(completion_ids=list(range(n))))[0].value for n in (5, 8, 11)]
        assert values == [0.0, pytest.approx(-0.6), -1.0]


def test_a_class_of_objects_that_are_called_is_made_with_its_kwargs(load: Any) -> None:
    source = """
        class Penalty:
            def __init__(self, limit): self.limit = limit
            def __call__(self, completion_ids, **kwargs):
                return [float(len(ids) > self.limit) for ids in completion_ids]
    """
    assert call(load(source, "Penalty", limit=1), sample())[0].value == 1.0
    with pytest.raises(ConfigError, match="does not fit the constructor"):
        load(source, "Penalty")


BATCH = """
    def reward(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
        assert len(data_sources) == len(ground_truths) == len(extra_infos) == len(solution_strs)
        return [{"score": len(s) + bonus, "first": s[0]} for s in solution_strs]
"""


def test_functions_of_verls_batch_manager_get_lists(load: Any) -> None:
    function = load(BATCH, bonus=0.5)
    (outcome,) = call(function, sample("abc"))
    assert (outcome.value, outcome.detail) == (3.5, {"first": "a"})
    assert [o.value for o in call(function, sample("a"), sample("bb", 1))] == [1.5, 2.5]
    check_reward("mine", NamedRewardConfig(function=function.name, per="group"), {})
    numbers = load("def reward(solution_strs, ground_truths): return (1, 0.5)")
    assert [o.value for o in call(numbers, sample(), sample("b", 1))] == [1.0, 0.5]
    short = load("def reward(solution_strs): return [1.0]")
    with pytest.raises(AttemptError, match="returned 1 rewards; expected 2"):
        call(short, sample(), sample("b", 1))


@pytest.mark.parametrize("name", ["predict_str", "model_output"])
def test_verls_other_names_of_the_completion_are_known(load: Any, name: str) -> None:
    function = load(f"def reward({name}, ground_truth, **kwargs): return len({name}), sorted(kwargs)")
    (outcome,) = call(function, sample("abcd"))
    assert outcome.value == 4.0
    assert outcome.detail["notes"] == [["data_source", "extra_info"]]


RUBRIC = """
    async def reward(completion, answer, info, state, **kwargs):
        said = completion if isinstance(completion, str) else completion[-1]["content"]
        return float(said == answer and state["answer"] == answer and info["level"] == 2)
"""


async def test_functions_of_a_verifiers_rubric_get_completion_and_answer(load: Any) -> None:
    function = load(RUBRIC)
    for extra in ({"level": 2}, {"level": 2, "prompt": CHAT}):
        (outcome,) = await function.call(Request([sample("truth", extra_info=extra)]))
        assert outcome.value == 1.0
    plain = load("def reward(completion, answer): return completion == answer")
    assert call(plain, sample("truth"))[0].value == 1.0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "def reward(text, truth): return 1.0",
            r"def compute_score\(solution_str, ground_truth, \*\*_\): "
            r"return reward\(solution_str, ground_truth\)",
        ),
        (
            "def reward(parser, completion, answer): return 1.0",
            r"def compute_score\(completion, answer, \*\*_\): "
            r"return reward\(parser=parser, completion=completion, answer=answer\)",
        ),
        (
            "class reward:\n    async def run_single(self, data): ...",
            "is a reward manager, as verl registers them.*compute_score",
        ),
        (
            "class reward:\n    def __call__(self, data, return_dict=False): ...",
            "is a reward manager, as verl registers them.*compute_score",
        ),
    ],
)
def test_what_cannot_be_called_as_it_is_is_told_the_line_to_write(load: Any, source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(source)
