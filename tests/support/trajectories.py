"""Trajectories and commits as services publish them, with as little in them as a test needs."""

from typing import Any

import numpy as np

from tidemill.common.config import RunConfig, parse_config
from tidemill.common.wire.messages import Commit, Trajectory


def make_trajectory(ticket: int = 0, index: int = 0, text: str = "#### 1", **fields: Any) -> Trajectory:
    """A completion of three tokens whose ground truth is 1."""
    values: dict[str, Any] = {
        "prompt_ids": np.arange(4, dtype=np.int32),
        "ground_truth": "1",
        "step": 0,
        "group_size": 4096,
        "completion_ids": np.arange(3, dtype=np.int32),
        "logprobs": np.full(3, -0.5, dtype=np.float32),
        "spans": ((0, 0),),
    }
    return Trajectory(ticket=ticket, index=index, text=text, **(values | fields))


def make_commit(step: int, **fields: Any) -> Commit:
    """The commit of a step on the ticket with its number, otherwise empty."""
    return Commit(**{"step": step, "version": step + 1, "mini_batches": (), "groups": (step,)} | fields)


def make_config(**sections: Any) -> RunConfig:
    """A whole run's config around the sections a test is about."""
    tree = {"model": {"path": "model"}, "data": {"train": "train.jsonl"}, **sections}
    return parse_config(tree, "the test's config")
