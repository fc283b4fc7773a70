"""How much one worker takes at once, and what its functions do wrong: it follows what is measured."""

from common.config import RewardConfig
from common.presence import BLOCKING, Heartbeat
from services.reward.hybrid import HybridReward
from services.reward.rewards import FunctionReward


class Capacity:
    """Of all rewards of a run together."""

    def __init__(self, config: RewardConfig, reward: HybridReward) -> None:
        self._config, self._reward = config, reward
        self._executions = [
            named.reward.execution for named in reward.rewards if isinstance(named.reward, FunctionReward)
        ]

    def slots(self) -> int:
        """Samples that a lane holds."""
        return min(self._config.max_in_flight, self._reward.slots or self._config.max_in_flight)

    def parallel(self) -> int:
        """Samples that are scored at once: no more than the processes of any reward take."""
        counts = [execution.parallel for execution in self._executions]
        return min([self.slots(), *(count for count in counts if count is not None)])

    def report(self, beat: Heartbeat) -> None:
        """Say in a heartbeat which functions block."""
        notes = [note for execution in self._executions for note in execution.notes]
        beat.counts[BLOCKING] = beat.counts.get(BLOCKING, 0) + len(notes)
        beat.detail = "; ".join([*([beat.detail] if beat.detail else []), *notes])
