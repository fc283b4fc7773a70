"""A user's own advantage and loss are tried in a process of their own before anything starts."""

import pytest

from tidemill.common.config import AlgorithmConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process import checks
from tidemill.common.process.checks import check_algorithm


def test_what_is_built_in_needs_no_process(monkeypatch):
    monkeypatch.setattr(checks, "run_own", None)
    check_algorithm(AlgorithmConfig(preset="dapo"))


def test_a_mistake_is_one_line_that_names_field_file_and_reason(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "print('hello')\n"
        "def advantage(rewards):\n    return rewards - rewards.mean()\n"
        "def loss(ratio):\n    return ratio.advantages_N\n"
    )
    check_algorithm(AlgorithmConfig(advantage=f"{mine}:advantage"))
    with pytest.raises(ConfigError, match=r"^trainer\.algorithm\.loss .*mine\.py:loss returned .* without a"):
        check_algorithm(AlgorithmConfig(advantage=f"{mine}:advantage", loss=f"{mine}:loss"))
