"""A reward function, and its arguments as the system that it was written for passes them."""

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

from tidemill.common.process.programs import run_main
from tidemill.common.run.dataset import PROMPT
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.functions.signature import (
    BATCH_ARGUMENTS,
    ROUTER,
    SOLUTION_NAMES,
    TOKENIZER,
    CallConvention,
    Style,
    is_async,
)
from tidemill.services.reward.outcome import (
    AttemptError,
    RewardOutcome,
    interpret,
    interpret_batch,
    interpret_list,
    users_own,
)
from tidemill.services.reward.sample import ChatMessages, RewardSample

_NOT_COLUMNS = frozenset((PROMPT, "prompts", "completion", "completions", "completion_ids"))
Kwargs = Mapping[str, Any]
Result = TypeVar("Result")


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


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function with its further arguments, or what they have made: an object with its methods."""

    name: str
    function: Callable[..., Any]
    how: CallConvention
    kwargs: Kwargs = field(default_factory=dict)
    is_cheap: bool = False
    tokenizer: str = ""
    is_made: bool = False
    """Whether `kwargs` made it, so that calls get none."""
    post_process: Callable[..., Any] | None = None
    """`post_process_scores` of a class: from the scores of a group to new ones."""
    tokenizers: list[Any] = field(default_factory=list)
    """The tokenizer, once it has been loaded."""

    @property
    def is_async(self) -> bool:
        return self.how.is_async

    def spec(self) -> dict[str, Any]:
        """What another process needs to load the same function."""
        kwargs, style = dict(self.kwargs), self.how.style.value
        return {"reference": self.name, "kwargs": kwargs, "style": style, "tokenizer": self.tokenizer}

    def call(self, request: Request) -> list[RewardOutcome]:
        """Call a plain function.

        Raises:
            AttemptError: it raised, or returned no finite number for a sample.
        """
        with users_own():
            if request.scores is not None:
                work, is_awaited = self._post_processed(request.scores), is_async(self._post_process)
                return run_main(work) if is_awaited else _run_through(work)
            log = TrlLog()
            returned = [self.function(**arguments) for arguments in self._calls(request, log)]
            return self._read(returned, request, log)

    async def call_async(self, request: Request) -> list[RewardOutcome]:
        """Call an async function; raises as `call` does."""
        with users_own():
            if request.scores is not None:
                return await self._post_processed(request.scores, in_thread=True)
            log = TrlLog()
            returned = [await self.function(**arguments) for arguments in self._calls(request, log)]
            return self._read(returned, request, log)

    def _calls(self, request: Request, log: TrlLog) -> Iterator[dict[str, Any]]:
        """The arguments of each call: one for all samples where the function takes lists."""
        kwargs = {} if self.is_made else self.kwargs
        if self.how.style is Style.TRL:
            yield trl_arguments(self.how, request.samples, log, kwargs)
        elif self.how.style is Style.VERL_BATCH:
            yield batch_arguments(self.how, request.samples, kwargs)
        elif self.how.style is Style.VERIFIERS:
            yield from (rubric_arguments(self.how, sample, kwargs) for sample in request.samples)
        else:
            given = self._given(request)
            yield from (verl_arguments(self.how, sample, given, kwargs) for sample in request.samples)

    def _read(self, returned: list[Any], request: Request, log: TrlLog) -> list[RewardOutcome]:
        if self.how.style is Style.TRL:
            return interpret_list(returned[0], len(request.samples), log.metrics, log.extra)
        if self.how.style is Style.VERL_BATCH:
            return interpret_batch(returned[0], len(request.samples))
        return [interpret(one) for one in returned]

    def _given(self, request: Request) -> dict[str, Any]:
        if not self.tokenizer:
            return dict(request.given)
        if not self.tokenizers:
            from transformers import AutoTokenizer

            self.tokenizers.append(AutoTokenizer.from_pretrained(self.tokenizer))
        return {**request.given, TOKENIZER: self.tokenizers[0]}

    async def _post_processed(
        self, scores: list[float | None], in_thread: bool = False
    ) -> list[RewardOutcome]:
        """What the class makes of a group's scores, in which None is a failure that it may fill in.

        One that cannot take None (it raises TypeError) is given those that are there; what failed stays so.
        The method is often plain beside an async `compute_score`, and runs in a thread then; or the reverse.
        """
        known = [score for score in scores if score is not None]
        if not known:
            return [RewardOutcome(None) for _ in scores]
        try:
            return interpret_list(await self._answer(list(scores), in_thread), len(scores))
        except TypeError:
            if len(known) == len(scores):
                raise
        new = iter(interpret_list(await self._answer(known, in_thread), len(known)))
        return [RewardOutcome(None) if score is None else next(new) for score in scores]

    async def _answer(self, scores: list[Any], in_thread: bool) -> Any:
        if is_async(self._post_process):
            return await self._post_process(scores)
        return (
            await asyncio.to_thread(self._post_process, scores) if in_thread else self._post_process(scores)
        )

    @property
    def _post_process(self) -> Callable[..., Any]:
        assert self.post_process is not None
        return self.post_process


def _run_through(work: Coroutine[Any, Any, Result]) -> Result:
    """Run what never waits, in this thread and without a loop: it may use signals, or a loop of its own."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waited")


def verl_arguments(
    how: CallConvention, sample: RewardSample, given: Kwargs, kwargs: Kwargs
) -> dict[str, Any]:
    """`data_source`, `solution_str`, `ground_truth` and `extra_info`, as far as they are taken.

    Router and tokenizer are passed where they are configured. A function that insists on the tokenizer is
    given None without one, as in verl.
    """
    offered = sample.fields()
    solution = next((name for name in SOLUTION_NAMES if name in how.names), SOLUTION_NAMES[0])
    offered[solution] = offered.pop("solution_str")
    arguments = how.taken(offered)
    if "is_evaluation" in how.names:
        arguments["is_evaluation"] = sample.is_evaluation
    for name in (ROUTER, TOKENIZER):
        if (name in given and how.takes(name)) or name in how.required:
            arguments[name] = given.get(name)
    return arguments | dict(kwargs)


def batch_arguments(how: CallConvention, samples: Sequence[RewardSample], kwargs: Kwargs) -> dict[str, Any]:
    """Lists with one element for each sample, as verl's batch manager passes them."""
    rows = [sample.fields() for sample in samples]
    offered = {name: [row[name.removesuffix("s")] for row in rows] for name in BATCH_ARGUMENTS}
    return how.taken(offered) | dict(kwargs)


def rubric_arguments(how: CallConvention, sample: RewardSample, kwargs: Kwargs) -> dict[str, Any]:
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
    return how.taken({**offered, "state": dict(offered)}) | dict(kwargs)


def trl_arguments(
    how: CallConvention, samples: Sequence[RewardSample], log: TrlLog, kwargs: Kwargs
) -> dict[str, Any]:
    """Lists with one element for each sample: prompts, completions, token ids, and the row's columns.

    Where the dataset's prompt is a chat, prompts and completions are lists of messages, those of a session
    with calls of tools and their results; otherwise text. TRL's `environments` are not among them: they live
    in the rollout workers.

    Raises:
        AttemptError: the function insists on a column that the dataset does not have.
    """
    columns = [_columns(sample) for sample in samples]
    names = dict.fromkeys(name for row in columns for name in row)
    offered: dict[str, Any] = {name: [row.get(name) for row in columns] for name in names} | {
        "prompts": [sample.messages or sample.prompt for sample in samples],
        "completions": [_completion(sample) for sample in samples],
        "completion_ids": [list(map(int, sample.completion_ids)) for sample in samples],
        "trainer_state": SimpleNamespace(global_step=samples[0].step, max_steps=None),
        "log_extra": log.log_extra,
        "log_metric": log.log_metric,
    }
    if "is_evaluation" in how.names:
        offered["is_evaluation"] = samples[0].is_evaluation  # a call has one lane, and a list would be true
    if missing := sorted(how.required - offered.keys() - kwargs.keys()):
        raise AttemptError(
            f"takes {', '.join(missing)}, which is no column of the dataset; it has {', '.join(names)}",
            is_final=True,
        )
    return how.taken(offered) | dict(kwargs)


def _completion(sample: RewardSample) -> str | ChatMessages:
    return sample.solution_str if sample.messages is None else copy.deepcopy(sample.said)


def _columns(sample: RewardSample) -> dict[str, Any]:
    row = {name: value for name, value in sample.extra_info.items() if name not in _NOT_COLUMNS}
    return {"data_source": sample.data_source, "ground_truth": sample.ground_truth} | row
