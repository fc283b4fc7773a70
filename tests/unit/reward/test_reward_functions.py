"""Which reward functions can be named in a config, and what is said about those that cannot."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.support.samples import make_sample
from tidemill.common.errors import ConfigError
from tidemill.services.reward.builtin import BUILTINS
from tidemill.services.reward.functions.request import Request, run_through
from tidemill.services.reward.functions.reward_function import RewardFunction, load_function
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.sample import RewardSample


def sample(**fields: Any) -> RewardSample:
    values: dict[str, Any] = {"data_source": "src", "solution_str": "text", "ground_truth": "truth"}
    return make_sample((0, 0), False, **(values | fields))


def score(function: RewardFunction, *samples: RewardSample) -> RewardOutcome:
    (outcome,) = run_through(function.call(Request(list(samples))))
    return outcome


async def score_async(function: RewardFunction, *samples: RewardSample) -> RewardOutcome:
    (outcome,) = await function.call(Request(list(samples)))
    return outcome


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Write a module; returns `path:compute_score`."""

    def write(source: str, name: str = "compute_score") -> str:
        path = tmp_path / "reward.py"
        path.write_text(dedent(source))
        return f"{path}:{name}"

    return write


def test_a_function_in_a_file_gets_the_sample_by_keyword(write: Any) -> None:
    reference = write("""
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
            return {"score": 1.0, "seen": [data_source, solution_str, ground_truth, extra_info, kwargs]}
    """)
    function = load_function(reference, {"threshold": 0.5})
    outcome = score(function, sample(extra_info={"row": 3}))
    assert not function.is_async
    assert outcome.detail["seen"] == [
        "src",
        "text",
        "truth",
        {"row": 3, "is_evaluation": False},
        {"threshold": 0.5},
    ]


def test_extra_info_may_be_left_out(write: Any) -> None:
    reference = write("def compute_score(solution_str, ground_truth, data_source): return 0.25")
    assert score(load_function(reference, {}), sample()).value == 0.25


async def test_an_async_function_is_recognised(write: Any) -> None:
    reference = write(
        "async def compute_score(data_source, solution_str, ground_truth, extra_info): return 0.75"
    )
    function = load_function(reference, {})
    assert function.is_async
    assert (await score_async(function, sample())).value == 0.75


async def test_partials_and_objects_that_are_called_count_as_functions(write: Any) -> None:
    source = """
        import functools

        async def judge(data_source, solution_str, ground_truth, strictness):
            return strictness

        class Rule:
            async def __call__(self, data_source, solution_str, ground_truth):
                return 0.5

        rule, strict = Rule(), functools.partial(judge, strictness=0.9)
    """
    for name, value in (("rule", 0.5), ("strict", 0.9)):
        function = load_function(write(source, name), {})
        assert function.is_async
        assert (await score_async(function, sample())).value == value


def test_a_function_of_an_installed_module_can_be_named() -> None:
    function = load_function(
        "tidemill.services.reward.builtin.exact_match:compute_score", {"ignore_case": True}
    )
    assert score(function, sample(solution_str="TRUTH")).value == 1.0


def test_a_file_may_import_what_lies_beside_it(write: Any, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 0.5\n")
    reference = write("""
        from neighbour_of_reward import VALUE
        def compute_score(data_source, solution_str, ground_truth): return VALUE
    """)
    assert score(load_function(reference, {}), sample()).value == 0.5


def test_one_sample_cannot_change_the_next(write: Any) -> None:
    reference = write("""
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            extra_info["calls"] = extra_info.get("calls", 0) + 1
            return extra_info["calls"]
    """)
    function, shared = load_function(reference, {}), sample(extra_info={})
    assert [score(function, shared).value for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "import nowhere_to_be_found",
            "importing it failed: ModuleNotFoundError: .*nowhere_to_be_found.*reward.py, line 1",
        ),
        ("\n\ndef compute_score(:", r"SyntaxError.*\(reward.py, line 3\)"),
        ("raise ValueError('not today')", "ValueError: not today"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("def compute_scores(): ...", "has no 'compute_score'; did you mean 'compute_scores'"),
        ("", "its functions: none"),
        ("compute_score = 3", "is a value of type int, not a function"),
        ("class compute_score: ...", "is a class without compute_score; expected a class with that"),
        ("class compute_score:\n    def compute_score(self, text): ...", "names matter"),
        ("def compute_score(): return 1", r"takes \(\); expected compute_score\(data_source"),
        ("def compute_score(text, truth): return 1", r"takes \(text, truth\).*names matter"),
        ("def compute_score(data_source, solution_str, ground_truth, /): ...", "passed by keyword"),
        ("def compute_score(prompts, completions, /): ...", r"expected .* as in TRL"),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info, router): ...",
            "nothing gives router; .*reward.kwargs",
        ),
        ("def compute_score(data_source, solution_str, ground_truth): yield 1", "yields"),
        ("async def compute_score(data_source, solution_str, ground_truth): yield 1", "yields"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_in_plain_words(
    write: Any, source: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        load_function(write(source), {})
    assert "reward.py:compute_score" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("gsm8", "is no built-in reward; did you mean 'gsm8k'.*path/to/file.py:name"),
        ("nonsense", "is no built-in reward; expected one of gsm8k, math, exact_match"),
        ("/nowhere/reward.py", "names no function.*reward.py:compute_score"),
        ("/nowhere/reward.py:compute_score", "/nowhere/reward.py does not exist"),
        ("reward.py:", "is incomplete"),
        ("no_such_package.rewards:score", "no_such_package.rewards:score: importing it failed"),
        ("json:dump_all", "has no 'dump_all'; did you mean 'dump"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(reference: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_function(reference, {})


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"methud": "strict"}, "'methud', which gsm8k does not take; did you mean 'method'"),
        ({"zzz": 1}, "it takes method, format_score"),
        ({"ground_truth": 1}, "must not set ground_truth"),
    ],
)
def test_further_arguments_must_be_taken_by_the_function(kwargs: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_function("gsm8k", kwargs)


@pytest.mark.parametrize("name", sorted(BUILTINS))
def test_every_built_in_can_be_loaded(name: str) -> None:
    assert score(load_function(name, {}), sample(solution_str="#### 18", ground_truth="18")).value in (
        0.0,
        1.0,
    )


def test_what_a_function_raises_is_an_attempt_that_failed(write: Any) -> None:
    reference = write("def compute_score(data_source, solution_str, ground_truth): return 1 / 0")
    with pytest.raises(AttemptError, match=r"ZeroDivisionError: division by zero \(reward.py, line 1\)"):
        score(load_function(reference, {}), sample())
