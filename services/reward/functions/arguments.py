"""The arguments of reward functions, as the systems that they were written for pass them."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from common.run.dataset import PROMPT
from services.reward.functions.sample import Sample
from services.reward.functions.signature import (
    BATCH_ARGUMENTS,
    ROUTER,
    SOLUTION_NAMES,
    TOKENIZER,
    Call,
)
from services.reward.results.outcome import AttemptError

_NOT_COLUMNS = frozenset((PROMPT, "prompts", "completion", "completions", "completion_ids"))


class TrlLog:
    """What a TRL function says through `log_metric(name, value)` and `log_extra(column, values)`."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: Any) -> None:
        """One number for the call; it becomes a component of every sample."""
        self.metrics[name] = value

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """One value for each sample; it is kept as detail."""
        self.extra[column] = list(values)


def verl_arguments(
    call: Call, sample: Sample, given: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """`data_source`, `solution_str`, `ground_truth` and `extra_info`, as far as they are taken.

    Router and tokenizer are passed where they are configured. A function that insists on the tokenizer is
    given None without one, as in verl.
    """
    offered = sample.fields()
    solution = next((name for name in SOLUTION_NAMES if name in call.names), SOLUTION_NAMES[0])
    offered[solution] = offered.pop("solution_str")
    arguments = {name: value for name, value in offered.items() if call.takes(name)}
    if "is_evaluation" in call.names:
        arguments["is_evaluation"] = sample.is_evaluation
    for name in (ROUTER, TOKENIZER):
        if (name in given and call.takes(name)) or name in call.required:
            arguments[name] = given.get(name)
    return arguments | dict(kwargs)


def batch_arguments(call: Call, samples: Sequence[Sample], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Lists with one element for each sample, as verl's batch manager passes them."""
    rows = [sample.fields() for sample in samples]
    offered = {name: [row[name.removesuffix("s")] for row in rows] for name in BATCH_ARGUMENTS}
    return {name: values for name, values in offered.items() if call.takes(name)} | dict(kwargs)


def rubric_arguments(call: Call, sample: Sample, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a rubric of `verifiers` passes: the row, the completion, and both once more as `state`.

    Completion and prompt are chats where the dataset's prompt is one, otherwise text.
    """
    offered: dict[str, Any] = {
        "prompt": sample.messages or sample.prompt,
        "completion": _completion(sample),
        "answer": sample.ground_truth,
        "info": dict(sample.extra_info),
        "task": sample.data_source,
    }
    offered["state"] = dict(offered)
    return {name: value for name, value in offered.items() if call.takes(name)} | dict(kwargs)


def trl_arguments(
    call: Call, samples: Sequence[Sample], log: TrlLog, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Lists with one element for each sample: prompts, completions, token ids, and the row's columns.

    Where the dataset's prompt is a chat, prompts and completions are lists of messages; otherwise text.

    Raises:
        AttemptError: the function insists on a column that the dataset does not have.
    """
    offered: dict[str, Any] = {
        "prompts": [sample.messages or sample.prompt for sample in samples],
        "completions": [_completion(sample) for sample in samples],
        "completion_ids": [list(map(int, sample.completion_ids)) for sample in samples],
        "trainer_state": SimpleNamespace(global_step=samples[0].step, max_steps=None),
        "log_extra": log.log_extra,
        "log_metric": log.log_metric,
    }
    columns = [_columns(sample) for sample in samples]
    names = dict.fromkeys(name for row in columns for name in row)
    offered = {name: [row.get(name) for row in columns] for name in names} | offered
    if "is_evaluation" in call.names:
        offered["is_evaluation"] = [sample.is_evaluation for sample in samples]
    if missing := sorted(call.required - offered.keys() - kwargs.keys()):
        raise AttemptError(
            f"takes {', '.join(missing)}, which is no column of the dataset; it has {', '.join(names)}",
            is_final=True,
        )
    return {name: value for name, value in offered.items() if call.takes(name)} | dict(kwargs)


def _completion(sample: Sample) -> str | list[dict[str, str]]:
    text = sample.solution_str
    return text if sample.messages is None else [{"role": "assistant", "content": text}]


def _columns(sample: Sample) -> dict[str, Any]:
    row = {name: value for name, value in sample.extra_info.items() if name not in _NOT_COLUMNS}
    return {"data_source": sample.data_source, "ground_truth": sample.ground_truth} | row
