"""Samples without a trajectory, and copies of samples with other numbers."""

from dataclasses import replace
from typing import Any

import numpy as np

from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.groups.columns import COLUMNS
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.sample import Sample, SegmentTokens, fill_teacher

OWN = (
    "reward", "shaped_reward", "advantage", "turns", "routes", "kept", "teacher", "teacher_weight",
    "imitation", "group_size", "group_trained", "images",
)  # fmt: skip
"""Fields of a sample beside its tokens."""


def sample_of(
    key: tuple[int, int], prompt_ids: Any, completion_ids: Any, logprobs: Any = None, **fields: Any
) -> Sample:
    """A sample of one segment whose completion is trained in full; without logprobs they are 0. `fields` as
    for `changed`."""
    prompt = np.asarray(prompt_ids, np.int32)
    completion = np.asarray(completion_ids, np.int32)
    logprobs_T = np.zeros(len(completion)) if logprobs is None else logprobs
    columns = {"rollout_logprobs": np.asarray(logprobs_T, np.float32)}
    segments = (SegmentTokens(prompt, len(completion)),)
    sample = Sample(key, segments, completion, np.ones(len(completion), np.bool_), columns)
    return changed(sample, **({"advantage": 0.0} | fields))


def changed(sample: Sample, **fields: Any) -> Sample:
    """A copy of a sample with other fields, or columns by their names; a column of None is left out,
    `advantage` is a number, or one for each token."""
    columns = {name: values_T.copy() for name, values_T in sample.columns.items()}
    advantage = fields.pop("advantage", None)
    if "completion_ids" in fields and "advantages" in columns:  # of other tokens
        del columns["advantages"]
        advantage = sample.advantage if advantage is None else advantage
    for name in [name for name in fields if name in COLUMNS]:
        values_T = fields.pop(name)
        columns.pop(name, None)
        if values_T is not None:
            columns[name] = values_T
    segments = fields.pop("segments", sample.segments)
    completion_ids = fields.pop("completion_ids", sample.completion_ids)
    if "prompt_ids" in fields:
        segments = (SegmentTokens(fields.pop("prompt_ids"), len(completion_ids)), *segments[1:])
    copy = Sample(
        fields.pop("key", sample.key),
        segments,
        completion_ids,
        fields.pop("mask", sample.mask),
        columns,
        **({name: getattr(sample, name) for name in OWN} | fields),
    )
    if advantage is not None:
        copy.set_advantage(advantage)
    return copy


def taught(
    sample: Sample, logprobs_A: Any, weight: float = 1.0, teacher: str = "wise", **fields: Any
) -> Sample:
    """A copy with a teacher's logprobs of its trained tokens."""
    copy = changed(sample, **fields)
    fill_teacher(copy, copy.mask, teacher, np.asarray(logprobs_A, np.float32), weight)
    return copy


def copied(group: Group) -> Group:
    """A group with copies of its samples, so that the same ones can be trained in several ways."""
    copies = [changed(sample) for sample in group.samples]
    baseline = None if group.baseline is None else changed(group.baseline)
    return replace(group, samples=copies, baseline=baseline)


def assigned(advantages: Advantages, *groups: Group) -> list[Group]:
    """Copies of the groups with the advantages of their samples."""
    copies = [copied(group) for group in groups]
    advantages.assign(copies)
    return copies
