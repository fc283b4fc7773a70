"""What differs between two configs of a run, and what a run cannot change."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tidemill.common.config.run import RunConfig

FIXED = {
    "seed": "the order of the prompts and the sampling follow from it",
    "model.special_tokens": "rewards of later steps would be of other texts than those of earlier ones",
    "model": "weights and checkpoints are those of this model",
    "data.train": "tickets are numbered by the position of their prompt",
    "data.columns": "which rows are used, and what is asked, follows from it",
    "data.system_prompt": "the prompts of later steps would be others than those of earlier ones",
    "data.prompt_suffix": "the prompts of later steps would be others than those of earlier ones",
    "data.chat_template": "the prompts of later steps would be others than those of earlier ones",
    "data.max_prompt_tokens": "which rows are used, and so the order of the prompts, follows from it",
    "data.overlong_prompts": "which rows are used, and so the order of the prompts, follows from it",
    "data.max_rows": "which rows are used, and so the order of the prompts, follows from it",
    "data.shuffle": "tickets are numbered by the position of their prompt",
    "data.stream": "a checkpoint knows its prompts by another fingerprint",
    "data.curriculum": "which prompt a ticket has follows from it",
    "trainer.groups_per_step": "tickets belong to steps by their number",
    "trainer.group_size": "groups that were issued have this many samples",
    "trainer.policy": "the checkpoints are those of this kind of policy",
    "trainer.batch_order": "tickets that are outstanding were issued for this order",
}
"""Field or section -> why a run cannot change it. Of a field and its section the first one here gives the
reason, so `model.special_tokens` stands before `model`."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field that differs between two configs.

    Example: `field` "trainer.optimizer.lr", `before` 1e-5, `after` 5e-6.
    """

    field: str
    before: Any
    after: Any

    @property
    def refusal(self) -> str:
        """Why a run cannot take this change; empty where it can."""
        for name, reason in FIXED.items():
            # With the dots: "model.path" is in the section "model", "models" is not.
            if f"{self.field}.".startswith(f"{name}."):
                return reason
        return ""

    def __str__(self) -> str:
        return f"{self.field}: {self.before!r} -> {self.after!r}"


def changed_fields(before: RunConfig, after: RunConfig) -> list[FieldChange]:
    """Every field that differs, by its dotted name; the run id is no part of the comparison."""
    return [change for change in _compare(before, after) if change.field != "run_id"]


def _compare(before: BaseModel, after: BaseModel, prefix: str = "") -> Iterator[FieldChange]:
    for name in type(before).model_fields:
        old = getattr(before, name)
        new = getattr(after, name)
        if isinstance(old, BaseModel) and type(old) is type(new):
            yield from _compare(old, new, f"{prefix}{name}.")
        elif old != new:
            yield FieldChange(prefix + name, _plain(old), _plain(new))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.model_dump() if isinstance(value, BaseModel) else value
