"""The reward of a sample as the weighted sum of its parts, and what a failed part means.

What does not apply is left out of the sum, as in TRL. A teacher adds nothing to it: its logprobs travel
beside it. A part that failed is replaced by its own `failure_value` where its policy is `value`; otherwise it
fails the score, and the score says whether only the sample or its whole group is given up.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.common.config import RewardConfig
from tidemill.common.wire.messages import OnFailure, Score, ScoreStatus
from tidemill.services.reward.outcome import Detail, RewardOutcome
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.rewards.cache import RewardCache
from tidemill.services.reward.rewards.named import NamedReward
from tidemill.services.reward.rewards.reward import make_reward
from tidemill.services.reward.sample import RewardSample

Parts = dict[str, RewardOutcome]
"""By the reward's name."""

NONE_APPLIES = "no reward applies to this sample: each of them returned None or is for other data sources"


def score_of(total: RewardOutcome, sample: RewardSample, worker: str, latency_s: float) -> Score:
    """The message that says what the sum of a sample is."""
    return Score(
        ticket=sample.key[0],
        index=sample.key[1],
        tokens_digest=sample.tokens_digest,
        status=total.status,
        value=total.value,
        components=total.components,
        detail=total.detail,
        error=total.error,
        on_failure=total.on_failure,
        attempts=max(Counter(name for name, *_ in total.tries).values(), default=1),
        tries=tuple(total.tries),
        worker=worker,
        latency_s=latency_s,
        teacher_logprobs=total.teacher_logprobs,
    )


class WeightedSum:
    """All rewards of a run."""

    def __init__(self, rewards: Sequence[NamedReward], is_named: bool) -> None:
        self.rewards = list(rewards)
        self._is_named = is_named
        """Whether the parts go by their names: a single `reward.function` speaks for itself."""

    @property
    def slots(self) -> int | None:
        """Samples it makes sense to hold: as many as the reward that waits longest can use."""
        counts = [named.reward.slots for named in self.rewards]
        known = [count for count in counts if count is not None]
        return max(known) if len(known) == len(counts) else None

    async def score(self, sample: RewardSample) -> Parts:
        """The part of each reward that scores samples one by one; all are asked at once."""
        single = [named for named in self.rewards if not named.is_per_group]
        if len(single) == 1:
            return {single[0].name: await single[0].score(sample)}
        parts = await asyncio.gather(*(named.score(sample) for named in single))
        return {named.name: part for named, part in zip(single, parts, strict=True)}

    async def score_group(self, samples: list[RewardSample]) -> list[Parts]:
        """The parts of the rewards that score a group at once, for each of its samples."""
        together = [named for named in self.rewards if named.is_per_group]
        columns = await asyncio.gather(*(named.score_group(samples) for named in together))
        return [
            {named.name: column[place] for named, column in zip(together, columns, strict=True)}
            for place in range(len(samples))
        ]

    @property
    def has_group_rewards(self) -> bool:
        """Whether a reward needs all samples of a group."""
        return any(named.is_per_group for named in self.rewards)

    def sum_up(self, parts: Mapping[str, RewardOutcome]) -> RewardOutcome:
        """The weighted sum of the parts of one sample, or why there is none."""
        components, detail = self._notes(parts)
        total, num_values, failed, is_group_lost = 0.0, 0, list[str](), False
        policy: OnFailure = ""
        teacher_logprobs: bytes | None = None
        for named in self.rewards:
            part, config = parts[named.name], named.config
            value = part.value
            if not part.is_ok:
                value = config.failure_value
                if value is None or not self._is_named:
                    failed.append(named.name)
                    is_group_lost |= config.on_failure == "drop_group"
                    continue
                components[named.name] = value
                detail.setdefault("failures", {})[named.name] = part.error
            if value is not None:
                total += config.weight * value
                num_values += 1
            elif part.teacher_logprobs is not None:
                teacher_logprobs = part.teacher_logprobs
                num_values += 1
        status, error = ScoreStatus.OK, ""
        if failed:
            status, error = parts[failed[0]].status, parts[failed[0]].error
            if self._is_named:
                error = "; ".join(f"{name}: {parts[name].error}" for name in failed)
                policy = "drop_group" if is_group_lost else "drop_sample"
        elif not num_values:
            status, error = ScoreStatus.FAILED, NONE_APPLIES
        return RewardOutcome(
            total if status is ScoreStatus.OK else None,
            components,
            detail,
            None if failed else teacher_logprobs,
            status,
            error,
            tries=[one for part in parts.values() for one in part.tries],
            on_failure=policy,
        )

    def failures(self) -> dict[str, int]:
        """How often each reward failed, as `<name>:<kind>`."""
        return {
            f"{named.name}:{kind}": count for named in self.rewards for kind, count in named.failures.items()
        }

    async def close(self) -> None:
        """Free what the rewards hold."""
        await asyncio.gather(*(named.close() for named in self.rewards))

    def _notes(self, parts: Mapping[str, RewardOutcome]) -> tuple[dict[str, float | None], Detail]:
        if not self._is_named:
            (part,) = parts.values()
            return dict(part.components), dict(part.detail)
        components: dict[str, float | None] = {name: part.value for name, part in parts.items()}
        detail: dict[str, Any] = {name: part.detail for name, part in parts.items() if part.detail}
        for name, part in parts.items():
            components |= {f"{name}/{key}": value for key, value in part.components.items()}
        return components, detail


def make_weighted_sum(config: RewardConfig, dependencies: RewardDependencies) -> WeightedSum:
    """All rewards of a run, ready to score.

    Raises:
        ConfigError: one of them cannot be loaded or called as configured.
    """
    cache = RewardCache(dependencies.broker, dependencies.keys, config.cache_mb << 20)
    rewards = [
        NamedReward(
            name,
            named,
            make_reward(name, named, dependencies),
            cache if named.is_cached else None,
            dependencies.config.servers.get(named.servers),
        )
        for name, named in config.named.items()
    ]
    return WeightedSum(rewards, bool(config.rewards))
