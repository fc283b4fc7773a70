"""The reward that the environment of a session gave itself: it came with the trajectory."""

import math

from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.sample import RewardSample

NUM_TURNS = "num_turns"


class EnvironmentReward:
    """Implements `Reward`: that of the session, else the sum over its turns; never 0 for want of one."""

    slots: int | None = None

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """The value, with the environment's metrics and the number of turns as components.

        Raises:
            AttemptError: the environment gave no reward, or one that is no finite number.
        """
        session = sample.session
        if session is None:
            raise AttemptError("this is no session: a single turn has no environment", is_final=True)
        given = [reward for reward in session["turn_rewards"] if reward is not None]
        value = session["reward"] if session["reward"] is not None else sum(given) if given else None
        if value is None:
            raise AttemptError(
                f"the environment {session['environment']} gave no reward, for the session or a turn "
                f"(it ended with {session['end']}); take another reward, or have it give one",
                is_final=True,
                kind="no_reward",
            )
        if not math.isfinite(value):
            raise AttemptError(
                f"the environment {session['environment']} gave the reward {value}; expected a finite number",
                is_final=True,
            )
        metrics = {name: number for name, number in session["metrics"].items() if math.isfinite(number)}
        return RewardOutcome(float(value), {**metrics, NUM_TURNS: float(len(session["turn_rewards"]))})

    async def close(self) -> None:
        """It holds nothing."""
