"""Whether the loggers that a config names are installed, without importing them."""

import importlib.util
from collections.abc import Sequence

from common.errors import ConfigError


def check_loggers(names: Sequence[str]) -> None:
    """Say which are missing and how to install them.

    Raises:
        ConfigError: at least one is not installed.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"trainer.loggers names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed here: pip install 'tidemill[{','.join(missing)}]', or leave it out."
        )
