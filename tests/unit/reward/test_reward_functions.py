"""Functions that a config can name: called as verl, TRL and verifiers call them, or refused with a reason."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.support.rewards import make_sample
from tidemill.common.config import NamedRewardConfig
from tidemill.common.errors import ConfigError
from tidemill.services.reward.builtin import BUILTINS
from tidemill.services.reward.functions.request import Request, run_through
from tidemill.services.reward.functions.reward_function import (
    RewardFunction,
    load_function,
    load_group_function,
)
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.rewards.reward import check_reward
from tidemill.services.reward.sample import RewardSample

CHAT = [{"role": "user", "content": "1+1?"}]


def sample(text: str = "2", index: int = 0, **fields: Any) -> RewardSample:
    values: dict[str, Any] = {
        "data_source": "src", "ground_truth": "truth", "extra_info": {}, "prompt_text": "<user>1+1?",
        "completion_ids": np.array([5, 6], dtype=np.int32), "step": 7,
    }  # fmt: skip
    return make_sample((3, index), solution_str=text, **(values | fields))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a module and load one of its functions."""

    def load(source: str, name: str = "reward", style: str = "auto", **kwargs: Any) -> RewardFunction:
        path = tmp_path / f"rewards{len(list(tmp_path.iterdir()))}.py"
        path.write_text(dedent(source))
        return load_function(f"{path}:{name}", kwargs, style)

    return load


def call(function: RewardFunction, *samples: RewardSample, **arguments: Any) -> list[RewardOutcome]:
    return run_through(function.call(Request(list(samples), arguments)))


OBJECTS = """
    import functools
    async def judge(data_source, solution_str, ground_truth, strictness):
        return strictness
    class Rule:
        async def __call__(self, data_source, solution_str, ground_truth):
            return 0.5
    class Penalty:
        def __init__(self, limit): self.limit = limit
        def __call__(self, completion_ids, **kwargs):
            return [float(len(ids) > self.limit) for ids in completion_ids]
    rule, strict = Rule(), functools.partial(judge, strictness=0.9)
"""
RUBRIC = """
    async def reward(completion, answer, info, state, **kwargs):
        said = completion if isinstance(completion, str) else completion[-1]["content"]
        return float(said == answer and state["answer"] == answer and info["level"] == 2)
"""


@pytest.mark.parametrize(("source", "name", "kwargs", "fields", "value"), [
    ("def reward(solution_str, ground_truth, data_source): return 0.25", "reward", {}, {}, 0.25),
    ("def reward(solution_str, truth=None, score=1.0): return score", "reward", {"score": 0.5}, {}, 0.5),
    ("async def reward(data_source, solution_str, ground_truth, extra_info): return 0.75", "reward", {},
     {}, 0.75),
    ("def reward(predict_str, ground_truth, **kwargs): return len(predict_str)", "reward", {}, {}, 1.0),
    ("def reward(model_output, ground_truth): return len(model_output)", "reward", {}, {}, 1.0),
    ("from json import loads\ndef reward(solution_str): return loads('2')", "reward", {}, {}, 2.0),
    ("def reward(completion, answer): return completion == answer", "reward", {}, {"text": "truth"}, 1.0),
    (RUBRIC, "reward", {}, {"text": "truth", "extra_info": {"level": 2}}, 1.0),
    (RUBRIC, "reward", {}, {"text": "truth", "extra_info": {"level": 2, "prompt": CHAT}}, 1.0),
    (OBJECTS, "rule", {}, {}, 0.5),
    (OBJECTS, "strict", {}, {}, 0.9),
    (OBJECTS, "Penalty", {"limit": 1}, {}, 1.0),
])  # fmt: skip
async def test_functions_are_called_by_keyword_with_what_they_take(load, source, name, kwargs, fields, value):
    function = load(source, name, **kwargs)
    (outcome,) = await function.call(Request([sample(**fields)]))
    assert outcome.value == value
    assert function.is_async == ("async" in source and name != "Penalty")


def test_a_function_gets_the_sample_and_cannot_change_it_for_the_next(load: Any) -> None:
    function = load(
        """
        def reward(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
            seen = [data_source, solution_str, ground_truth, dict(extra_info), kwargs]
            extra_info["row"] = 4
            return {"score": 1.0, "seen": seen}
        """,
        threshold=0.5,
    )
    shared = sample(extra_info={"row": 3})
    seen = ["src", "2", "truth", {"row": 3, "is_evaluation": False}, {"threshold": 0.5}]
    for _ in range(2):
        assert call(function, shared)[0].detail["seen"] == seen


def test_a_file_may_import_what_lies_beside_it(load: Any, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 0.5\n")
    function = load("from neighbour_of_reward import VALUE\ndef reward(solution_str): return VALUE")
    assert call(function, sample())[0].value == 0.5


def test_a_function_of_an_installed_module_can_be_named() -> None:
    name = "tidemill.services.reward.builtin.exact_match:compute_score"
    assert call(load_function(name, {"ignore_case": True}), sample("TRUTH"))[0].value == 1.0


@pytest.mark.parametrize("name", sorted(BUILTINS))
def test_every_built_in_can_be_loaded(name: str) -> None:
    assert call(load_function(name, {}), sample("#### 18", ground_truth="18"))[0].value in (0.0, 1.0)


async def test_router_and_tokenizer_reach_a_function_that_takes_them(load: Any) -> None:
    function = load("""
        async def reward(data_source, solution_str, ground_truth, extra_info, reward_router_address,
                         reward_model_tokenizer):
            return {"score": 1, "seen": [reward_router_address, reward_model_tokenizer]}
    """)
    request = Request([sample()], {"reward_router_address": "host:1"})
    assert (await function.call(request))[0].detail["seen"] == ["host:1", None]
    with pytest.raises(ConfigError, match="say with `router`"):
        check_reward("mine", NamedRewardConfig(function=function.name), {})
    check_reward("mine", NamedRewardConfig(function=function.name, router="judge"), {})


@pytest.mark.parametrize("source", [
    "def reward(solution_str, reward_model_tokenizer): return reward_model_tokenizer.vocab_size",
    "class reward:\n    def compute_score(self, solution_str, reward_model_tokenizer):\n"
    "        return reward_model_tokenizer.vocab_size",
])  # fmt: skip
def test_functions_and_classes_get_the_tokenizer_that_is_configured(tmp_path: Path, source: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "mine.py").write_text(source)
    function = load_function(f"{tmp_path}/mine.py:reward", {}, tokenizer=str(folder))
    spec = {name: value for name, value in function.spec().items() if name != "maker"}
    (outcome,) = call(load_function(**spec), sample())  # as in the function's process
    assert outcome.value == 2.0


@pytest.mark.parametrize(
    "source",
    [
        "def reward(solution_str, is_evaluation): return float(is_evaluation)",
        "def reward(solution_str, extra_info): return float(extra_info['is_evaluation'])",
        "def reward(completions, is_evaluation): return [float(bool(is_evaluation))]",
    ],
)
def test_a_function_sees_whether_it_scores_training_or_evaluation(load: Any, source: str) -> None:
    evaluated = make_sample((0, 0), True, "", "text", None)
    assert [call(load(source), each)[0].value for each in (sample(), evaluated)] == [0.0, 1.0]


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
    assert (first.value, first.components, first.detail) == (None, {"share": 0.25}, {"note": "n0"})
    assert second.detail == {"note": "n1"}
    call(function, sample("hello", extra_info={"prompt": CHAT, "answer": 1}))
    seen, of_chat = function.function.__globals__["SEEN"]
    prompts, completions, completion_ids, answer, step, columns = seen
    assert (prompts, completions) == (["<user>1+1?"] * 2, ["a", "b"])
    assert (completion_ids, answer, step) == ([[5, 6], [5, 6]], [1, 2], 7)
    assert columns == {"data_source": ["src"] * 2, "ground_truth": ["truth"] * 2, "level": ["x", None]}
    assert of_chat[:2] == ([CHAT], [[{"role": "assistant", "content": "hello"}]])
    assert "prompt" not in of_chat[5]


@pytest.mark.parametrize(
    ("source", "said", "is_final"),
    [
        ("completions, solution): return [1.0]", "takes solution, which is no column of its row", True),
        ("completions, **kwargs): return 1.0", "returned a float; expected a list of 1", False),
        ("completions, **kwargs): return [1.0, 2.0]", "returned 2 rewards; expected 1", False),
        ("completions, **kwargs): return ['good']", "element 0 is the text 'good'", False),
        ("completions, **kwargs): return [float('nan')]", "element 0 is nan", False),
        (
            "completions, log_extra, **kwargs): log_extra('note', None); return [1.0]",
            r"logged None by log_extra\('note', ...\); expected a list .* \(rewards0.py, line 1\)",
            False,
        ),
        (
            "completions, log_extra, **kwargs): log_extra('note', 'abc'); return [1.0]",
            "logged the text 'abc'",
            False,
        ),
        (
            "completions, log_extra, **kwargs): log_extra('note', {1: 2}); return [1.0]",
            "logged a dict",
            False,
        ),
        ("solution_strs): return []", "returned 0 rewards; expected 1", False),
        ("solution_str): return 1 / 0", r"ZeroDivisionError: .* \(rewards0.py, line 1\)", False),
    ],
)
def test_what_a_function_does_wrong_is_an_attempt_that_failed(load, source, said, is_final):
    with pytest.raises(AttemptError, match=said) as caught:
        call(load(f"def reward({source}"), sample())
    assert caught.value.is_final is is_final


def test_the_style_can_be_said_where_the_signature_does_not_tell(load: Any) -> None:
    function = load("def reward(**kwargs): return [float(len(kwargs['completions']))]", style="trl")
    assert call(function, sample())[0].value == 1.0
    with pytest.raises(ConfigError, match="has no compute_score, which style: class needs"):
        load("def reward(**kwargs): return 1.0", style="class")


def test_trls_own_rewards_run_unchanged() -> None:
    chat = {"prompt": CHAT, "solution": r"$\frac{1}{2}$"}
    for name, text, more, value in (
        ("accuracy_reward", r"$\boxed{0.5}$", {}, 1.0),
        ("accuracy_reward", r"$\boxed{2}$", {}, 0.0),
        ("accuracy_reward", r"$\boxed{0.5}$", {"solution": "no formula"}, None),
        ("think_format_reward", "<think>\nso\n</think>\n2", {}, 1.0),
        ("think_format_reward", "2", {}, 0.0),
    ):
        function = load_function(f"trl.rewards:{name}", {})
        assert call(function, sample(text, extra_info=chat | more))[0].value == value, (name, text)


def test_trls_overlong_penalty_takes_no_completions_and_runs_as_it_is(load: Any) -> None:
    source = """
        from trl.rewards import get_soft_overlong_punishment
        penalty = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=5)
    """
    sizes = {"max_completion_len": 10, "soft_punish_cache": 5}
    by_its_maker = load_function("trl.rewards:get_soft_overlong_punishment", sizes)
    spec = {name: value for name, value in by_its_maker.spec().items() if name != "maker"}
    for function in (load(source, "penalty"), by_its_maker, load_function(**spec)):
        values = [call(function, sample(completion_ids=list(range(n))))[0].value for n in (5, 8, 11)]
        assert values == [0.0, pytest.approx(-0.6), -1.0]


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


@pytest.mark.parametrize("returned", ["1.0", "scores[1:]", "['no number'] * len(scores)"])
def test_what_post_processing_returns_wrongly_is_an_error_of_its_line(load: Any, returned: str) -> None:
    """As with the function itself: a run all of whose groups fail so has to end."""
    source = f"""
        class Agent:
            def compute_score(self, solution_str): return 1.0
            def post_process_scores(self, scores): return {returned}
    """
    agent = load(source, "Agent")
    for scores in ([1.0, 2.0], [1.0, None]):
        with pytest.raises(AttemptError, match=r"\(rewards0\.py, line 4\)") as caught:
            run_through(agent.call(Request([sample()] * 2, scores=scores)))
        assert caught.value.is_code_error


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
    single = load("def reward(solution_str): return 1.0")
    with pytest.raises(ConfigError, match="per: group needs a function in TRL's style"):
        check_reward("mine", NamedRewardConfig(function=single.name, per="group"), {})


@pytest.mark.parametrize(("source", "expected"), [
    ("import nowhere_to_be_found", "ModuleNotFoundError: .*nowhere_to_be_found.*rewards0.py, line 1"),
    ("\n\ndef reward(:", r"SyntaxError.*\(rewards0.py, line 3\)"),
    ("raise ValueError('not today')", "ValueError: not today"),
    ("import json\nTABLE = json.loads('{')", r"JSONDecodeError: .*\(rewards0.py, line 2\)"),
    ("import sys; sys.exit(0)", "SystemExit"),
    ("def rewards(): ...", "has no 'reward'; did you mean 'rewards'"),
    ("", "its functions: none"),
    ("reward = 3", "is a value of type int, not a function"),
    ("class reward: ...", "is a class without compute_score; expected a class with that"),
    ("class reward:\n    def compute_score(self, text): ...", "names matter"),
    ("def reward(): return 1", r"takes \(\); expected compute_score\(data_source"),
    ("def reward(*args): return 1", r"takes \(\*args\); expected"),
    ("def reward(text, truth): return 1", r"takes \(text, truth\).*names matter"),
    ("def reward(text, truth): ...", r"def compute_score\(solution_str, ground_truth, \*\*_\): "
     r"return reward\(solution_str, ground_truth\)"),
    ("def reward(parser, completion, answer): ...", r"def compute_score\(completion, answer, \*\*_\): "
     r"return reward\(parser=parser, completion=completion, answer=answer\)"),
    ("def reward(data_source, solution_str, ground_truth, /): ...", "passed by keyword"),
    ("def reward(prompts, completions, /): ...", r"expected .* as in TRL"),
    ("def reward(solution_str, extra_info, router): ...", "nothing gives router; .*reward.kwargs"),
    ("def reward(data_source, solution_str, ground_truth): yield 1", "yields"),
    ("async def reward(data_source, solution_str, ground_truth): yield 1", "yields"),
    ("class reward:\n    async def run_single(self, data): ...", "is a reward manager"),
    ("class reward:\n    def __call__(self, data, return_dict=False): ...", "is a reward manager"),
])  # fmt: skip
def test_a_function_that_cannot_be_used_is_refused_in_plain_words(load, source, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        load(source)
    assert "rewards0.py:reward" in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "kwargs", "expected"),
    [
        ("gsm8", {}, "is no built-in function; did you mean 'gsm8k'.*path/to/file.py:name"),
        ("nonsense", {}, "is no built-in function; expected one of gsm8k, math, exact_match"),
        ("/nowhere/reward.py", {}, "names no function.*reward.py:compute_score"),
        ("/nowhere/reward.py:compute_score", {}, "/nowhere/reward.py does not exist"),
        ("reward.py:", {}, "is incomplete"),
        ("no_such_package.rewards:score", {}, r"importing it failed: .* 'no_such_package'\. It must"),
        ("{folder}/null.py:score", {}, r"SyntaxError: source code .*null bytes\. It must"),
        (
            "{folder}/broken.py:score",
            {},
            r"failed: SyntaxError: expected ':' \(broken\.py, line 1\)\. It must",
        ),
        ("{folder}/evaluates.py:score", {}, r"SyntaxError: invalid syntax \(evaluates\.py, line 2\)"),
        ("{folder}/mute.py:score", {}, r"Mute: its text cannot be read \(mute\.py, line 3\)"),
        ("{folder}/imports.py:score", {}, r"SyntaxError: expected ':' \(broken\.py, line 1\)"),
        ("{folder}/brokem.py:score", {}, r"does not exist on this machine\. Did you mean .*/broken\.py\?"),
        ("json:dump_all", {}, "has no 'dump_all'; did you mean 'dump"),
        ("gsm8k", {"methud": "strict"}, "'methud', which gsm8k does not take; did you mean 'method'"),
        ("gsm8k", {"zzz": 1}, "it takes method, format_score"),
        ("gsm8k", {"ground_truth": 1}, "must not set ground_truth"),
    ],
)
def test_a_name_or_arguments_that_lead_nowhere_are_refused(tmp_path, reference, kwargs, expected):
    (tmp_path / "broken.py").write_text("def score(a, b)\n    return 1\n")
    (tmp_path / "evaluates.py").write_text("text = '1 +'\nnumber = eval(text)\n")
    (tmp_path / "imports.py").write_text("\n\nimport broken\n")
    (tmp_path / "null.py").write_bytes(b"\0")
    (tmp_path / "mute.py").write_text(
        "class Mute(RuntimeError):\n    def __str__(self): return None.words\nraise Mute\n"
    )
    with pytest.raises(ConfigError, match=expected):
        load_function(reference.format(folder=tmp_path), kwargs)


@pytest.mark.parametrize(
    "reference", ["builtins:max", "builtins:print", "rnk", "/nowhere/mine.py", "mine.py:", "builtins:dict"]
)
def test_what_is_wrong_with_a_function_of_groups_is_said_of_its_own_field(reference):
    with pytest.raises(ConfigError, match=r"^reward\.group ") as caught:
        load_group_function(reference, {})
    assert "compute_score" not in str(caught.value)
