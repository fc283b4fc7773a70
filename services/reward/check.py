"""`python -m tidemill.services.reward.check REQUEST`: can the rewards of a run be loaded?

The request has the run's `config`, a `row` of the dataset or null, `columns`, the names of columns that
training rows have, and `calls`. With a row, the answer says
what judges and reward models would read of it, which functions get text or chats, and in `columns` which
columns each reward needs; with `calls` too, those that are functions are called with it, and `faults` says
which of them compare a number with text. What is wrong with one reward hides no mistake of another. It runs
in a process of its own (`common/process/checks.py`): an import of a user's module runs code.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.common.config import NamedRewardConfig, RunConfig
from tidemill.common.data.dataset import PROMPT
from tidemill.common.data.image_columns import text_of
from tidemill.common.errors import ConfigError, ConfigErrors, MachineFaultError
from tidemill.common.process.checks import Answer, answer_check
from tidemill.common.process.programs import run_main
from tidemill.common.wire.messages import Trajectory
from tidemill.services.reward.functions.reward_function import (
    OF_EVERY_ROW,
    THOUGHT,
    RewardFunction,
    load_group_function,
    required_columns,
)
from tidemill.services.reward.functions.signature import Style
from tidemill.services.reward.number_truths import find_number_faults
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.rewards.reward import (
    FunctionReward,
    check_reward,
    kind_of,
    load_checked,
    naming_fields,
)
from tidemill.services.reward.sample import RewardSample

COMPLETION = "(the completion)"
GROUP = "reward.group"
"""Its name among the problems, beside those of rewards."""
HINT_AT_THOUGHTS = (
    " What the model thought is passed where the run parts it from the answer: model.special_tokens: parted."
)
TEMPLATED = "(the prompt in the policy's chat template)"


def check(request: Any) -> Answer:
    """Check every reward of the run's config, and show or call it for the row, if one is given."""
    run = RunConfig.model_validate(request["config"])
    row = request["row"]
    config = run.reward
    problems = Problems(run)
    for name, reward in config.named.items():
        with problems.collecting(name):
            check_reward(name, reward, run.servers, run.images is not None)
            _check_tokenizer(name, reward)
    if config.group:
        with problems.collecting(GROUP):
            load_group_function(config.group, config.group_kwargs, run.images is not None)
    answer: Answer = {"reads": {}, "gets": [], "called": [], "faults": [], "columns": {}}
    if row is not None:
        _check_columns(run, row, request["columns"], problems)
        answer["reads"] = readings(run, row, problems)
        answer["columns"] = needed_columns(run, problems)
        answer["gets"] = _forms(run, row, problems)
        if request["calls"]:
            answer["called"] = run_main(_call_functions(run, row, problems))
    problems.raise_all()
    if row is not None and request["calls"]:
        answer["faults"] = run_main(find_number_faults(run, _sample_of(run, row)))
    return answer


class Problems:
    """What is wrong with the rewards of a run; one that failed in one check takes no part in the next."""

    def __init__(self, run: RunConfig) -> None:
        self._is_named = bool(run.reward.rewards)
        self._by_name: dict[str, str] = {}

    @contextlib.contextmanager
    def collecting(self, name: str) -> Iterator[None]:
        """Keep an error of the block, which checks the reward `name`."""
        try:
            with naming_fields(name, self._is_named and name != GROUP):
                yield
        except ConfigError as error:
            self._by_name[name] = str(error)

    def has(self, name: str) -> bool:
        return name in self._by_name

    def raise_all(self) -> None:
        """Raises ConfigError: there is a mistake; a `ConfigErrors` of several."""
        problems = [" ".join(problem.splitlines()) for problem in self._by_name.values()]
        if len(problems) > 1:
            raise ConfigErrors(problems)
        if problems:
            raise ConfigError(problems[0])


def _check_tokenizer(name: str, reward: NamedRewardConfig) -> None:
    """Raises ConfigError: the folder of a function's tokenizer does not exist."""
    if reward.tokenizer.startswith(("/", "~", ".")) and not Path(reward.tokenizer).exists():
        raise ConfigError(
            f"reward {name}: the tokenizer {reward.tokenizer} does not exist on this machine; give the "
            "folder of a tokenizer, or its name on the hub"
        )


def _check_columns(run: RunConfig, row: dict[str, Any], columns: list[str], problems: Problems) -> None:
    """Check that the training rows have the columns that functions in TRL's style require; not each row."""
    sample = _sample_of(run, row)
    names = sorted({*columns, *row["extra"]})
    for name, reward in run.reward.named.items():
        if reward.function is None or not _scores(reward, sample) or problems.has(name):
            continue
        unknown = [column for column in _required_columns(name, run) if column not in names]
        if unknown:
            listed = ", ".join([*OF_EVERY_ROW, *names])
            hint = HINT_AT_THOUGHTS if THOUGHT in unknown else ""
            with problems.collecting(name):
                raise ConfigError(
                    f"reward {name}: {reward.function} takes {', '.join(unknown)}, which is no column of the "
                    f"dataset; it has {listed}. Add the column, give the argument in kwargs, or a default in "
                    f"the function.{hint}"
                )


def _scores(reward: NamedRewardConfig, sample: RewardSample) -> bool:
    """Whether the reward scores this sample in training."""
    trajectory = sample.trajectory
    return "train" in reward.lanes and reward.scores_source(trajectory.data_source, trajectory.source)


def needed_columns(run: RunConfig, problems: Problems) -> dict[str, list[str]]:
    """Name of the reward -> the columns without which it gives no score: what a function in TRL's style
    requires, and the column of a teacher's prompt. What others read of a row is not known."""
    columns: dict[str, list[str]] = {}
    for name, reward in run.reward.named.items():
        if reward.teacher is not None and reward.teacher.prompt_column:
            columns[name] = [reward.teacher.prompt_column]
        if reward.function is not None and not problems.has(name):
            columns[name] = _required_columns(name, run)
    return {name: required for name, required in columns.items() if required}


def _required_columns(name: str, run: RunConfig) -> list[str]:
    """The dataset's columns that a reward's function in TRL's style requires; of others none is known."""
    reward = run.reward.named[name]
    function = load_checked(name, reward, run.images is not None)
    if function.how.style is not Style.TRL:
        return []
    required = required_columns(function.how, {} if function.is_made else reward.kwargs)
    return [column for column in required if column != THOUGHT or not _parts_thoughts(run)]


def _parts_thoughts(run: RunConfig) -> bool:
    """Whether rewards get the model's thoughts. It is still `auto` where the model is not on this machine."""
    return run.model.special_tokens in ("auto", "parted")


def _forms(run: RunConfig, row: dict[str, Any], problems: Problems) -> list[str]:
    """A line on each function that gets text or chats, as the row's prompt is."""
    sample = _sample_of(run, row)
    lines = []
    for name, reward in run.reward.named.items():
        if reward.function is None or not _scores(reward, sample) or problems.has(name):
            continue
        form = form_of_completions(load_checked(name, reward, run.images is not None), sample)
        if form:
            lines.append(f"{form}: reward {name}")
    return lines


def form_of_completions(function: RewardFunction, sample: RewardSample) -> str:
    """In which form a function gets the completions of this row; empty where it always gets text."""
    name = {Style.TRL: "completions", Style.VERIFIERS: "completion"}.get(function.how.style)
    if name is None:
        return ""
    if sample.messages is None:
        return f"{name}: text (because prompt is text)"
    chats = "chats" if function.how.style is Style.TRL else "a chat"
    message = "[{'role': 'assistant', 'content': ...}]"
    return f"{name}: {chats}, {message} (because prompt is a list of messages)"


async def _call_functions(run: RunConfig, row: dict[str, Any], problems: Problems) -> list[str]:
    """Call each reward function with what a model may write. Others are not called: they cost time and money,
    and need servers. Returns one line of text for each reward."""
    lines = []
    for name, reward in run.reward.named.items():
        if problems.has(name):
            continue
        if reward.function is None or reward.router:
            lines.append(f"{name} was not called: only functions without a judge are")
            continue
        if not _scores(reward, _sample_of(run, row)):
            lines.append(f"{name} was not called: it does not score the first training row")
            continue
        function = load_checked(name, reward, run.images is not None)
        if function.takes_pictures:
            lines.append(f"{name} was not called: it takes pictures, which are stored as a run starts")
            continue
        missing = [column for column in _required_columns(name, run) if column not in row["extra"]]
        if missing:
            lines.append(f"{name} was not called: the first training row has no {', '.join(missing)}")
            continue
        called = FunctionReward(function, reward.timeout_s, num_processes=1)
        with problems.collecting(name):
            try:
                values = [
                    await _value_for(name, called, run, row, *completion) for completion in _completions(row)
                ]
            finally:
                await called.close()
            lines.append(f"{name} gave {', '.join(values)}")
    return lines


def _completions(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Completions to try a reward function with, each with its name. On an empty one many functions return
    early, so that one which fails on every text of a model would pass."""
    prompt = row["prompt"]
    truth = row["ground_truth"]
    if not isinstance(prompt, str):
        prompt = text_of(prompt[-1].get("content", ""))
    completions = [("the first training row and an empty completion", "")]
    if truth not in (None, ""):
        completions.append(("its ground truth as completion", str(truth)))
    return [*completions, ("its prompt as completion", prompt)]


async def _value_for(
    name: str, called: FunctionReward, run: RunConfig, row: dict[str, Any], input_name: str, completion: str
) -> str:
    """The score of one completion, in words. Raises ConfigError: it gives none."""
    sample = _sample_of(run, row, completion)
    try:
        outcome = await called.score(sample)
    except (AttemptError, MachineFaultError) as error:
        form = form_of_completions(called.function, sample)
        hint = f". It gets {form}" if form else ""
        raise ConfigError(
            f"reward {name}: called with {input_name}, it gave no score: {error}{hint}"
        ) from None
    value = "None" if outcome.value is None else f"{outcome.value:g}"
    return f"{value} for {input_name}"


def readings(run: RunConfig, row: dict[str, Any], problems: Problems) -> dict[str, str]:
    """Name of the reward -> the text of its request for this row; rewards without servers are left out. That
    the template of a judge or teacher cannot be filled in for it is one of the problems."""
    prompt = row["prompt"]
    extra = {**row["extra"], PROMPT: prompt} if isinstance(prompt, list) else row["extra"]
    own_text = prompt if isinstance(prompt, str) else ""
    sample = _sample_of(run, {**row, "extra": extra}, COMPLETION, TEMPLATED, own_text)
    readings_by_name = {}
    for name, reward in run.reward.named.items():
        reading = kind_of(reward.kind).reading
        if reading is None or not reward.scores_source(
            sample.trajectory.data_source, sample.trajectory.source
        ):
            continue
        if problems.has(name):
            continue
        try:
            readings_by_name[name] = reading(name, reward, sample, run.servers[reward.servers])
        except AttemptError as error:
            if "train" in reward.lanes:
                with problems.collecting(name):
                    raise ConfigError(f"reward {name}: for the first training row, {error}") from None
            readings_by_name[name] = str(error)  # the rows of an evaluation may have other columns
    return readings_by_name


def _sample_of(
    run: RunConfig, row: dict[str, Any], completion: str = "", prompt_text: str = "", own_text: str = ""
) -> RewardSample:
    none: Any = np.empty(0, dtype=np.int32)
    return RewardSample(
        Trajectory(
            ticket=0,
            index=0,
            step=0,
            group_size=1,
            data_source=row["data_source"],
            ground_truth=row["ground_truth"],
            extra=row["extra"],
            source=row.get("source", ""),
            prompt_text=prompt_text,
            own_text=own_text,
            text=completion,
            thought="" if _parts_thoughts(run) else None,
            prompt_ids=none,
            completion_ids=none,
            logprobs=none.astype(np.float32),
            spans=((0, 0),),
        )
    )


if __name__ == "__main__":
    sys.exit(answer_check(check))
