"""`python -m services.reward.check '{"function": ..., ...}' [ROW [call]]`: can these rewards be loaded?

ROW, a row of the dataset as JSON, has told what judges and reward models would read of it; with `call`, those
that are functions are called once with it.

Exits with 0, or with 2 and the reason on stderr. A process of its own, because importing a user's module
runs whatever stands in it.
"""

import json
import sys
from typing import Any

from common.config import RewardConfig
from common.errors import ConfigError
from common.process.checks import CALLED, READS
from common.process.programs import run_main
from services.reward.functions.functions import load_function
from services.reward.functions.sample import Sample, readings
from services.reward.groups.group_functions import load_group_function
from services.reward.results.outcome import AttemptError
from services.reward.rewards.reward import FunctionReward, check_reward


def main(argument: str, row: str = "", call: str = "") -> int:
    """Check every reward of the section given as JSON, and show or call it for the row, if one is given.

    Returns the exit code.
    """
    try:
        config = RewardConfig.model_validate(json.loads(argument))
        for name, reward in config.named.items():
            check_reward(name, reward)
        if config.group:
            load_group_function(config.group, config.group_kwargs)
        if row:
            print(READS + json.dumps(readings(config, json.loads(row))))
        if call:
            run_main(_call_functions(config, json.loads(row)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


async def _call_functions(config: RewardConfig, row: dict[str, Any]) -> None:
    """Call each reward that is a function, once; judges and models cost time and money, and need servers.

    Raises:
        ConfigError: one of them gives no score.
    """
    sample = Sample((0, 0), False, row["data_source"], "", row["ground_truth"], row["extra"])
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
