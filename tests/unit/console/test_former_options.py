"""An option that a command had once is refused with what to do in its place."""

import pytest
import typer.main

from tidemill.common.errors import ConfigError
from tidemill.services.console.__main__ import app


def test_an_option_that_a_command_had_once_is_refused_with_the_cure() -> None:
    command = typer.main.get_command(app)
    with pytest.raises(ConfigError, match=r"--sky is gone.*console\.up\.node CONFIG --run RUN_ID"):
        command.main(["slurm", "config.yaml", "--sky"], standalone_mode=False)
