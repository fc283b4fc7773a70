"""`python -m tidemill.services.trainer.picture_check`: how many tokens can a picture of a run have?

The request is the run's config. A process of its own (`common/process/checks.py`), because the console does
not import what an image processor needs.
"""

import sys
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.images.processor import load_processor
from tidemill.common.process.checks import Answer, answer_check


def count(request: Any) -> Answer:
    """Raises ConfigError: the model's image processor cannot be loaded."""
    config = RunConfig.model_validate(request)
    assert config.images is not None, "a run of text does not come here"
    return {"most_tokens": load_processor(config.model.path, config.images).most_tokens()}


if __name__ == "__main__":
    sys.exit(answer_check(count))
