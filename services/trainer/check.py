"""`python -m tidemill.services.trainer.check '{"advantage": ..., "loss": ...}'`: can users' own be loaded?

The request is the section `trainer.algorithm`. A process of its own (`common/process/checks.py`), because
importing a user's module runs its code.
"""

import sys
from typing import Any

from tidemill.common.config import AlgorithmConfig
from tidemill.common.process.checks import Answer, answer_check
from tidemill.services.trainer.algorithm.advantages.registry import find_advantage
from tidemill.services.trainer.algorithm.losses.policy_loss import find_loss


def check(request: Any) -> Answer:
    """Load and try advantage and loss, as the trainer will."""
    algorithm = AlgorithmConfig.model_validate(request)
    find_advantage(algorithm)
    find_loss(algorithm)
    return {}


if __name__ == "__main__":
    sys.exit(answer_check(check))
