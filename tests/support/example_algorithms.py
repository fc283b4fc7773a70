"""The algorithms of examples/algorithms, as a config names them."""

from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[2] / "examples" / "algorithms"


def example(function: str) -> str:
    """`gpg.py:gpg` as a reference that does not depend on a config's folder."""
    return f"{EXAMPLES}/{function}"


def scale_rl_settings() -> dict[str, Any]:
    """`trainer.algorithm` of scale_rl.yaml."""
    section = yaml.safe_load((EXAMPLES / "scale_rl.yaml").read_text())["trainer"]["algorithm"]
    return {**section, "advantage": example(section["advantage"])}
