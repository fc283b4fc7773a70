"""The coefficients of the KL penalty and the entropy bonus, which may be adaptive.

They move once a step, by metrics of that step, so that a replay moves them in the same way; they are part of
the policy's state. Those that are not adaptive stay as the config has them.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tidemill.common.config.algorithm import AlgorithmConfig

LARGEST_ERROR = 0.2
"""Relative errors of the KL divergence count as at most this."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Coefficients of the next step; `last_entropy` is that of the step before, None before the first."""

    kl: float
    entropy: float
    last_entropy: float | None = None

    @classmethod
    def at_start(cls, algorithm: AlgorithmConfig, saved: Mapping[str, Any] | None = None) -> "Coefficients":
        """The config's coefficients, or a checkpoint's for those that are adaptive."""
        start = cls(algorithm.kl.coefficient, algorithm.entropy_coefficient)
        values = dict(saved or {})
        if algorithm.kl_control.target is None:
            values.pop("kl", None)
        if algorithm.entropy_control.target is None:
            values = {name: value for name, value in values.items() if "entropy" not in name}
        return replace(start, **values)

    def after(
        self, kl: float, entropy: float, num_samples: float, algorithm: AlgorithmConfig
    ) -> "Coefficients":
        """The coefficients after a step with this KL divergence and entropy (means over its trained tokens).
        A mean that is not finite moves nothing.

        KL: coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon), at least 0 (arXiv
        1909.08593, eq. 2). 0.1 with a KL of 0.11 where 0.1 is wanted, after 1,000 of 10,000 samples: 0.1 * (1
        + 0.1 * 0.1) = 0.101. Entropy: one step up where it is at or below its target, else one down; within
        [low, high] (arXiv 2505.22312). 0.01 with an entropy of 0.1 where 0.2 is wanted and a delta of 0.005
        gives 0.015.
        """
        kl_control = algorithm.kl_control
        control = algorithm.entropy_control
        moved = self
        if kl_control.target is not None and math.isfinite(kl):
            error = min(LARGEST_ERROR, max(-LARGEST_ERROR, kl / kl_control.target - 1.0))
            scale = 1.0 + error * num_samples / kl_control.horizon
            moved = replace(moved, kl=max(0.0, self.kl * scale))
        if control.target is not None and math.isfinite(entropy):
            now = self.entropy + (control.delta if entropy <= control.target else -control.delta)
            now = min(control.high, max(control.low, now))
            moved = replace(moved, entropy=now, last_entropy=entropy)
        return moved

    def applied(self, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        """The section with these coefficients in place of its own. With a target the bonus is used only after
        a step whose entropy was at or below it."""
        if not algorithm.is_adaptive:
            return algorithm
        target = algorithm.entropy_control.target
        entropy = self.entropy
        if target is not None and (self.last_entropy is None or self.last_entropy > target):
            entropy = 0.0
        kl = algorithm.kl.model_copy(update={"coefficient": self.kl})
        return algorithm.model_copy(update={"kl": kl, "entropy_coefficient": entropy})

    def as_values(self, algorithm: AlgorithmConfig) -> dict[str, Any]:
        """Values for a checkpoint; none where no coefficient is adaptive."""
        return {"coefficients": asdict(self)} if algorithm.is_adaptive else {}


class CurrentCoefficients:
    """The coefficients of a policy, which move once a step."""

    def __init__(self, configured: AlgorithmConfig) -> None:
        self._configured = configured
        self.begin()

    def begin(self, saved: Mapping[str, Any] | None = None) -> None:
        """Begin as the config says, or go on from a checkpoint's."""
        self._hold(Coefficients.at_start(self._configured, saved))

    def adapt(self, kl: float, entropy: float, num_samples: float) -> None:
        """Move them by a step's metrics, as `Coefficients.after` says."""
        self._hold(self.current.after(kl, entropy, num_samples, self._configured))

    def _hold(self, coefficients: Coefficients) -> None:
        self.current = coefficients
        self.algorithm = coefficients.applied(self._configured)
        """The config's section, with these in place of its own."""

    def as_values(self) -> dict[str, Any]:
        """Values for a checkpoint."""
        return self.current.as_values(self._configured)


def coefficient_metrics(algorithm: AlgorithmConfig) -> dict[str, float]:
    """The adaptive coefficients that a step is trained with; `algorithm` is the section as applied."""
    metrics = {}
    if algorithm.kl_control.target is not None:
        metrics["kl_coefficient"] = algorithm.kl.coefficient
    if algorithm.entropy_control.target is not None:
        metrics["entropy_coefficient"] = algorithm.entropy_coefficient
    return metrics
