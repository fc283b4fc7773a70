"""Environments that answer whatever the model says: a class with `step(text)`.

    class Guess:
        def reset(self, row): ...       # optional: None, text for the end of the prompt, or a whole chat
        def step(self, text): ...       # (observation, reward, done), or a dict with these names
        def close(self): ...            # optional
        def get_metrics(self): ...      # optional: numbers by name

Each may be `async`. SkyRL-gym's `BaseTextEnv` has `init(messages)` in place of `reset`, and is made with
`env_config` and `extras`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidemill.common.errors import ConfigError
from tidemill.common.run.dataset import PROMPT
from tidemill.services.rollout.environments.environment import Act, Closing, Kind, Opening, Row
from tidemill.services.rollout.environments.tools import bound, is_coroutine
from tidemill.services.rollout.environments.users_code import (
    act_of,
    call_reset,
    contained,
    finished,
    metrics_of,
    number_of,
    opening_of,
)

Maker = Callable[[Row], Any]


class StepEnvironment:
    """One object with `step`, for one session."""

    def __init__(self, make: Maker, row: Row, name: str) -> None:
        self._name = name
        with contained(f"making {name}", "start"):
            self._object = make(row)

    async def reset(self, row: Row) -> Opening:
        """Call `reset`, or `init` as SkyRL-gym has it."""
        init = getattr(self._object, "init", None)
        where = f"{self._name}.{'init' if callable(init) else 'reset'}"
        with contained(where, "reset"):
            if callable(init):
                prompt = row[PROMPT]
                chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
                returned = await finished(init([dict(message) for message in chat]))
                # What it hands back as it was is rendered as the ticket has it.
                if isinstance(returned, tuple) and returned and returned[0] == chat:
                    returned = None
            elif callable(reset := getattr(self._object, "reset", None)):
                returned = await finished(call_reset(reset, row))
            else:
                returned = None
        return opening_of(returned, where)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        raise AssertionError("an environment that takes text has no tools")

    async def step(self, text: str) -> Act:
        """Call `step` with what the model said."""
        where = f"{self._name}.step"
        with contained(where, "step"):
            returned = await finished(self._object.step(text))
        return act_of(returned, where)

    async def finish(self) -> Closing:
        """Its metrics, and its last word on the reward where it has `get_reward`."""
        reward = None
        with contained(f"{self._name}.get_reward", "reward"):
            if callable(get_reward := getattr(self._object, "get_reward", None)):
                reward = await finished(get_reward())
        reward = number_of(reward, f"{self._name}.get_reward returned", "reward")
        with contained(f"{self._name}.get_metrics", "reward"):
            get_metrics = getattr(self._object, "get_metrics", None)
            found = await finished(get_metrics()) if callable(get_metrics) else {}
        return Closing(reward, metrics_of(found))

    async def close(self) -> None:
        if callable(close := getattr(self._object, "close", None)):
            with contained(f"{self._name}.close", "close"):
                await finished(close())


class StepDesign:
    """A class or factory whose objects have `step`."""

    def __init__(self, make: Maker, found: type, name: str) -> None:
        check_step(found, name)
        self._make, self._kind = make, Kind(name, takes_text=True)
        methods = ("init", "reset", "step", "close", "get_metrics", "get_reward")
        self.is_async = all(is_coroutine(getattr(found, m)) for m in methods if hasattr(found, m))

    def kind_of(self, row: Row) -> Kind:
        return self._kind

    def kinds(self) -> Sequence[Kind]:
        return [self._kind]

    def make(self, row: Row) -> StepEnvironment:
        """An object for one session."""
        return StepEnvironment(self._make, row, self._kind.name)


class EnvConfig(dict[str, Any]):
    """Settings by key and by attribute, as SkyRL-gym's environments read them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def skyrl_maker(factory: Callable[..., Any], options: Mapping[str, Any], max_turns: int) -> Maker:
    """Makes SkyRL-gym's objects, which are given their row when they are made."""

    def make(row: Row) -> Any:
        truth = {"method": "rule", "ground_truth": row.get("ground_truth")}
        extras = {"reward_spec": truth, "reward_model": truth, "max_turns": max_turns, **row}
        return factory(env_config=EnvConfig(options), extras=extras)

    return make


def check_step(found: type, name: str) -> None:
    """Raises ConfigError: `step` does not take the text."""
    try:
        inspect.signature(bound(found.step)).bind("text")  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ConfigError(
            f"rollout.environment.use {name}: step{inspect.signature(found.step)} cannot be called with what "  # type: ignore[attr-defined]
            "the model said; expected step(self, text)"
        ) from None
