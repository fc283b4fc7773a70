"""`python -m tidemill.services.reward.check REQUEST`: can the rewards of a run be loaded?

The request has the run's `config`, a `row` of the dataset or null, and `calls`. With a row, the answer says
what judges and reward models would read of it; with `calls` too, those that are functions are called once
with it. A process of its own (`common/process/checks.py`), because importing a user's module runs whatever
stands in it.
"""

import sys
from pathlib import Path
from typing import Any

from tidemill.common.config import NamedRewardConfig, RewardConfig, RunConfig, ServersConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.checks import Answer, answer_check
from tidemill.common.process.programs import run_main
from tidemill.common.run.dataset import PROMPT
from tidemill.services.reward.functions.group_functions import load_group_function
from tidemill.services.reward.functions.reward_function import TrlLog, trl_arguments
from tidemill.services.reward.functions.signature import Style
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.rewards.reward import REWARDS, FunctionReward, check_reward, load_checked
from tidemill.services.reward.sample import RewardSample


def check(request: Any) -> Answer:
    """Check every reward of the run's config, and show or call it for the row, if one is given."""
    run, row = RunConfig.model_validate(request["config"]), request["row"]
    config = run.reward
    for name, reward in config.named.items():
        check_reward(name, reward, run.servers)
        _check_tokenizer(name, reward)
    if config.group:
        load_group_function(config.group, config.group_kwargs)
    if row is None:
        return {"reads": {}, "called": []}
    _check_columns(config, row)
    reads = readings(run, row)
    return {"reads": reads, "called": run_main(_call_functions(config, row)) if request["calls"] else []}


def _check_tokenizer(name: str, reward: NamedRewardConfig) -> None:
    """See that there is the folder of a function's tokenizer. Raises ConfigError: there is not."""
    if reward.tokenizer.startswith(("/", "~", ".")) and not Path(reward.tokenizer).exists():
        raise ConfigError(
            f"reward {name}: the tokenizer {reward.tokenizer} does not exist on this machine; give the "
            "folder of a tokenizer, or its name on the hub"
        )


def _check_columns(config: RewardConfig, row: dict[str, Any]) -> None:
    """See that the row has the columns on which functions in TRL's style insist.

    Raises:
        ConfigError: it lacks one.
    """
    sample = _sample_of(row)
    for name, reward in config.named.items():
        scores = reward.scores_source(sample.data_source, sample.source)
        if reward.function is None or not scores or "train" not in reward.lanes:
            continue
        function = load_checked(name, reward)
        if function.how.style is not Style.TRL:
            continue
        try:
            trl_arguments(function.how, [sample], TrlLog(), {} if function.is_made else reward.kwargs)
        except AttemptError as error:
            raise ConfigError(
                f"reward {name}: {reward.function} {error}. Add the column, give the argument in kwargs, or "
                "a default in the function."
            ) from None


def _sample_of(row: dict[str, Any]) -> RewardSample:
    """The row with an empty completion."""
    truth, extra = row["ground_truth"], row["extra"]
    return RewardSample((0, 0), False, row["data_source"], "", truth, extra, source=row.get("source", ""))


async def _call_functions(config: RewardConfig, row: dict[str, Any]) -> list[str]:
    """Call each reward that is a function, once; judges and models cost time and money, and need servers.
    Returns what came of it, a line each.

    Raises:
        ConfigError: one of them gives no score.
    """
    sample, lines = _sample_of(row), []
    for name, reward in config.named.items():
        if reward.function is None or reward.router:
            lines.append(f"{name} was not called: only functions without a judge are")
            continue
        function = load_checked(name, reward)
        called = FunctionReward(function, reward.timeout_s, num_processes=1)
        try:
            outcome = await called.score(sample)
        except AttemptError as error:
            raise ConfigError(
                f"reward {name}: called with the first training row and an empty completion, it gave no "
                f"score: {error}"
            ) from None
        finally:
            await called.close()
        lines.append(f"{name} gave {outcome.value:g} for the first training row and an empty completion")
    return lines


COMPLETION = "(the completion)"
TEMPLATED = "(the prompt in the policy's chat template)"


def readings(run: RunConfig, row: dict[str, Any]) -> dict[str, str]:
    """By the reward's name, the text of a request about this row; rewards without servers are left out.

    Raises:
        ConfigError: the template of a judge cannot be filled in for it.
    """
    prompt = row["prompt"]
    extra = dict(row["extra"]) | ({PROMPT: prompt} if isinstance(prompt, list) else {})
    own = prompt if isinstance(prompt, str) else ""
    sample = RewardSample(
        (0, 0),
        False,
        row["data_source"],
        COMPLETION,
        row["ground_truth"],
        extra,
        TEMPLATED,
        own_text=own,
        source=row.get("source", ""),
    )
    asked = {
        name: reward
        for name, reward in run.reward.named.items()
        if reward.servers and reward.scores_source(sample.data_source, sample.source)
    }
    return {
        name: _reading(name, reward, sample, run.servers[reward.servers]) for name, reward in asked.items()
    }


def _reading(name: str, reward: NamedRewardConfig, sample: RewardSample, servers: ServersConfig) -> str:
    reading = REWARDS[reward.kind].reading
    assert reading is not None  # it names servers
    try:
        return reading(name, reward, sample, servers)
    except AttemptError as error:
        if "train" not in reward.lanes:
            return str(error)  # the rows of an evaluation may have other columns
        raise ConfigError(f"reward {name}: for the first training row, {error}") from None


if __name__ == "__main__":
    sys.exit(answer_check(check))
