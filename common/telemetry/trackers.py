"""The trackers that a run sends its metrics to: whether their packages are here."""

import importlib.util
from collections.abc import Sequence

from tidemill.common.errors import ConfigError


def check_loggers(names: Sequence[str]) -> None:
    """Raises ConfigError: a tracker is not installed; the message says which, and how to install it."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"trainer.loggers names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed here: pip install 'tidemill[{','.join(missing)}]', or leave it out."
        )
