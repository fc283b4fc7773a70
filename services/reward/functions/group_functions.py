"""Group functions: what is done to the rewards of a group when all of them are there (`reward.group`).

A built-in's name, `path.py:name` or `package.module:name`, plain or async:

    def function(scores, samples, **kwargs) -> list: ...

`scores` has a number or None (it failed) for each sample. `samples`, which may be left out, has a dict for
each, with `index`, `solution_str`, `ground_truth`, `data_source`, `extra_info`, `prompt`, `status`, `error`
and `components`. The list that is returned has a number for each sample, or None where there is no reward.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.common.errors import ConfigError
from tidemill.services.reward.builtin.groups import GROUP_FUNCTIONS
from tidemill.services.reward.functions.loading import import_function
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.functions.signature import is_async, signature_of
from tidemill.services.reward.outcome import RewardOutcome, interpret_list, users_own

EXPECTED = "function(scores, samples, **kwargs) -> list, plain or async"


@dataclass(frozen=True, slots=True)
class GroupFunction:
    """A group function with its further arguments."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    takes_samples: bool
    is_cheap: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def spec(self) -> dict[str, Any]:
        """What another process needs to load the same."""
        return {"reference": self.name, "kwargs": dict(self.kwargs), "is_group": True}

    def call(self, request: Request) -> list[RewardOutcome]:
        """Call a plain function; raises AttemptError."""
        with users_own():
            return interpret_list(self.function(**self._arguments(request)), len(request.samples))

    async def call_async(self, request: Request) -> list[RewardOutcome]:
        """Call an async function; raises AttemptError."""
        with users_own():
            return interpret_list(await self.function(**self._arguments(request)), len(request.samples))

    def _arguments(self, request: Request) -> dict[str, Any]:
        arguments: dict[str, Any] = {"scores": list(request.scores or []), **self.kwargs}
        if self.takes_samples:
            pairs = zip(request.samples, request.notes or [], strict=True)
            arguments["samples"] = [
                {**sample.fields(), "index": sample.key[1], "prompt": sample.prompt, **notes}
                for sample, notes in pairs
            ]
        return arguments


def load_group_function(reference: str, kwargs: Mapping[str, Any]) -> GroupFunction:
    """Import the function that `reward.group` names, and check that it can be called.

    Raises:
        ConfigError: it does not exist, cannot be imported, or takes other arguments.
    """
    builtin = GROUP_FUNCTIONS.get(reference)
    function = builtin or import_function(reference, "reward.group", tuple(GROUP_FUNCTIONS))
    if inspect.isclass(function):
        raise ConfigError(f"reward.group {reference} is a class; expected {EXPECTED}")
    signature = signature_of(function, reference)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    takes_samples = takes_any or "samples" in signature.parameters
    given = {"scores": None, **kwargs} | ({"samples": None} if takes_samples else {})
    try:
        signature.bind(**given)
    except TypeError as error:
        shown = ", ".join(signature.parameters)
        raise ConfigError(
            f"reward.group {reference} takes ({shown}): {error}; expected {EXPECTED}, with further arguments "
            "from reward.group_kwargs"
        ) from None
    return GroupFunction(
        reference, function, is_async(function), takes_samples, builtin is not None, dict(kwargs)
    )
