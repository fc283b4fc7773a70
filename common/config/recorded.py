"""Configs that a run has recorded, in Redis and in its folder: complete, and of the release that wrote them.

Guarantee: a recorded run keeps its meaning. A field that did not exist when it was recorded takes the value
that the code had then, not today's default, so that its steps replay to the same bytes.
"""

import copy
from pathlib import Path
from typing import Any

from common.config.loading import parse_config, read_tree
from common.config.run import RunConfig

FORMER_VALUES: dict[str, Any] = {
    "trainer.algorithm.dual_clip": None,
    "trainer.algorithm.kl.bound": None,
}
"""Field -> what releases without it did, where today's default does something else."""


def load_recorded(path: Path) -> RunConfig:
    """The config that a run has written into its folder.

    Raises:
        ConfigError: there is none, or this release does not understand it.
    """
    return parse_recorded(read_tree(path), str(path))


def parse_recorded(tree: dict[str, Any], origin: str) -> RunConfig:
    """As `parse_config`, for what was written by `RunConfig.model_dump`."""
    completed = copy.deepcopy(tree)
    for field, value in FORMER_VALUES.items():
        *sections, name = field.split(".")
        node: Any = completed
        for section in sections:
            node = node.setdefault(section, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.setdefault(name, value)
    return parse_config(completed, origin)
