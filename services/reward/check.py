"""`python -m tidemill.services.reward.check CONFIG [ROW [call]]`: can the rewards of a run be loaded?

CONFIG is the run's config as JSON. ROW, a row of the dataset as JSON, has told what judges and reward models
would read of it; with `call`, those that are functions are called once with it.

Exits with 0, or with 2 and the reason on stderr. A process of its own, because importing a user's module
runs whatever stands in it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tidemill.common.config import NamedRewardConfig, RewardConfig, RunConfig, ServersConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.checks import CALLED, READS
from tidemill.common.process.programs import run_main
from tidemill.common.run.chat_template import ChatTemplate, RenderError
from tidemill.common.run.dataset import PROMPT
from tidemill.services.reward.functions.group_functions import load_group_function
from tidemill.services.reward.functions.loading import load_function
from tidemill.services.reward.functions.reward_function import RewardFunction, TrlLog, trl_arguments
from tidemill.services.reward.functions.signature import Style
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.remote.judge import JudgePrompt
from tidemill.services.reward.remote.serving import template_file
from tidemill.services.reward.remote.teacher import TeacherPrompt
from tidemill.services.reward.rewards.reward import FunctionReward, check_reward
from tidemill.services.reward.sample import ChatMessages, RewardSample


def main(argument: str, row: str = "", call: str = "") -> int:
    """Check every reward of the run's config given as JSON, and show or call it for the row, if one is given.

    Returns the exit code.
    """
    try:
        run = RunConfig.model_validate(json.loads(argument))
        config = run.reward
        functions = {}
        for name, reward in config.named.items():
            functions[name] = check_reward(name, reward, run.servers)
            _check_tokenizer(name, reward)
        if config.group:
            load_group_function(config.group, config.group_kwargs)
        if row:
            _check_columns(config, functions, json.loads(row))
            print(READS + json.dumps(readings(run, json.loads(row))))
        if call:
            run_main(_call_functions(config, json.loads(row)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _check_tokenizer(name: str, reward: NamedRewardConfig) -> None:
    """See that there is the folder of a function's tokenizer. Raises ConfigError: there is not."""
    if reward.tokenizer.startswith(("/", "~", ".")) and not Path(reward.tokenizer).exists():
        raise ConfigError(
            f"reward {name}: the tokenizer {reward.tokenizer} does not exist on this machine; give the "
            "folder of a tokenizer, or its name on the hub"
        )


def _check_columns(
    config: RewardConfig, functions: dict[str, RewardFunction | None], row: dict[str, Any]
) -> None:
    """See that the row has the columns on which functions in TRL's style insist.

    Raises:
        ConfigError: it lacks one.
    """
    sample = _sample_of(row)
    for name, reward in config.named.items():
        scores = reward.scores_source(sample.data_source, sample.source)
        function = functions[name]
        if function is None or function.how.style is not Style.TRL:
            continue
        if not scores or "train" not in reward.lanes:
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


async def _call_functions(config: RewardConfig, row: dict[str, Any]) -> None:
    """Call each reward that is a function, once; judges and models cost time and money, and need servers.

    Raises:
        ConfigError: one of them gives no score.
    """
    sample = _sample_of(row)
    for name, reward in config.named.items():
        if reward.function is None or reward.router:
            print(f"{CALLED}{name} was not called: only functions without a judge are")
            continue
        function = load_function(reward.function, reward.kwargs, reward.style, reward.tokenizer)
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
        print(f"{CALLED}{name} gave {outcome.value:g} for the first training row and an empty completion")


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
    if reward.judge is not None:
        try:
            messages = JudgePrompt(name, reward.judge).messages(sample)
        except AttemptError as error:
            if "train" not in reward.lanes:
                return str(error)  # the rows of an evaluation may have other columns
            raise ConfigError(f"reward {name}: for the first training row, {error}") from None
        return _lines(messages) if reward.judge.api == "chat" else messages[-1]["content"]
    if reward.teacher is not None:
        return _taught(name, reward, sample)
    assert reward.model is not None
    if reward.model.input == "ids":
        return "the token ids that the policy read and wrote"
    if reward.model.input == "text":
        return sample.prompt_text + sample.solution_str
    return _rendered(servers, sample.conversation)


def _taught(name: str, reward: NamedRewardConfig, sample: RewardSample) -> str:
    """The prompt of a teacher's own, where it has one."""
    assert reward.teacher is not None
    if not reward.teacher.has_own_prompt:
        return "the token ids that the policy read and wrote"
    try:
        prompt = TeacherPrompt(name, reward.teacher).of(sample)
    except AttemptError as error:
        if "train" not in reward.lanes:
            return str(error)
        raise ConfigError(f"reward {name}: for the first training row, {error}") from None
    return (prompt if isinstance(prompt, str) else _lines(prompt) + "\n") + COMPLETION


def _rendered(servers: ServersConfig, messages: ChatMessages) -> str:
    """In the reward model's template where that is on this machine, else as messages."""
    local = servers.local
    if local is not None and not local.command and Path(servers.model).is_dir():
        template = ChatTemplate.of(Path(servers.model), template_file(local))
        try:
            if template is not None:
                return template.render(messages, add_generation_prompt=False)
        except RenderError as error:
            return f"{error}: {_lines(messages)}"
    return _lines(messages)


def _lines(messages: ChatMessages) -> str:
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
