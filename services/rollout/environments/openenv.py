"""`use: openenv:http://host:port`: an environment on an OpenEnv server, one connection for each session.

Speaks the frames of `/ws` itself: the package `openenv` cannot be installed beside vLLM, and its client hides
that a step after a timeout runs on a new environment that was not reset. Here whatever is late, and a
connection that ends, is a fault: the session is played again from its start.

Tried with the server of openenv 0.10.0 (tests/integration/rollout/test_openenv.py).
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from tidemill.common.config.environment import OPENENV, EnvironmentConfig
from tidemill.common.config.section import Section
from tidemill.common.data.dataset import PROMPT
from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.common.process.shortage import fault_in
from tidemill.services.rollout.environments.environment import Act, Environment, Kind, Opening, Row
from tidemill.services.rollout.environments.users_code import MAX_CHARS, number_of

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

Frame = dict[str, Any]
CAPACITY = "CAPACITY_REACHED"
INVALID = "VALIDATION_ERROR"
UNSENDABLE = "Unable to serialize unknown type"
"""Part of the server's error where its answer has an object that cannot be sent as JSON: the session ends."""
OTHER_FIELDS = {"missing", "extra_forbidden"}
"""Types of errors of an action which mean that its field is not named `action_field`, or not the only one."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Pause before asking a full server again; doubles each time."""
CONNECT_S = 10.0
PING_S = 20.0
"""Pause between pings: gateways end connections that are silent while the model speaks."""
TEXTS = ("text", "message", "messages", "content", "prompt", "result", "output", "echoed_message")
"""Fields of observations that may have the text for the model, if `observation_field` is not set."""


class OpenEnvOptions(Section):
    """`rollout.environment.options` with an OpenEnv server."""

    action_field: str = "message"
    """The field of an action that holds what the model said."""
    action_schema: dict[str, Any] | None = None
    """JSON schema of an action. With it the model acts by calling a tool, whose arguments are the action."""
    tool: str = "act"
    """The name of that tool."""
    description: str = "Act in the environment."
    """Description of the tool for the model."""
    observation_field: str = ""
    """The field of an observation that the model reads; empty takes the one with text, else all as JSON."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of every reset."""
    repeatable: bool = False
    """Whether the same actions get the same answers, so that another worker may play them again and go on."""


class OpenEnvStage:
    def __init__(self, config: EnvironmentConfig) -> None:
        """A session waits for a place on a full server for at most `session_timeout_s`.

        Raises:
            ConfigError: an option is wrong, or the package that connects is missing.
        """
        try:
            import websockets  # noqa: F401
        except ImportError:
            raise ConfigError(
                "rollout.environment.use: openenv:... needs the package websockets; install the extra: "
                "pip install 'tidemill[openenv]'"
            ) from None
        try:
            self.options = OpenEnvOptions.model_validate(config.options)
        except ValidationError as error:
            raise ConfigError(f"rollout.environment.options of an OpenEnv server: {error}") from None
        self._url = "ws" + config.use.removeprefix(OPENENV).removeprefix("http").rstrip("/") + "/ws"
        self._timeout_s = config.call_timeout_s
        self._wait_s = config.session_timeout_s
        function = {"name": self.options.tool, "description": self.options.description}
        tools: Sequence[Mapping[str, Any]] = ()
        if self.options.action_schema is not None:
            tools = [{"type": "function", "function": function | {"parameters": self.options.action_schema}}]
        self._kind = Kind(
            config.use, tools, takes_text=not tools, resumes="repeat" if self.options.repeatable else ""
        )

    def kind_of(self, row: Row) -> Kind:
        return self._kind

    async def open(self, row: Row) -> "OpenEnvEnvironment":
        """Connect, and reset there: only then the server says whether it has a place."""
        pause_s = FIRST_PAUSE_S
        deadline = time.monotonic() + self._wait_s
        while True:
            environment = OpenEnvEnvironment(await self._connect(), self.options, self._timeout_s, self._url)
            try:
                await environment.begin(row)
                return environment
            except _FullError:
                await environment.close()
                if time.monotonic() >= deadline:
                    raise EnvironmentFaultError(
                        f"{self._url} was full for {self._wait_s:g} s (session_timeout_s); let it hold more "
                        "sessions (max_concurrent_envs), or let workers play fewer (max_groups_in_flight); a "
                        "step that never returns keeps its place on the server",
                        "start",
                    ) from None
            except BaseException:
                # Also where this was cancelled: the server counts the session until its connection ends.
                await environment.close()
                raise
            # Random: sessions that were refused together would retry together.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def close(self) -> None:
        """Nothing was started."""

    async def _connect(self) -> "ClientConnection":
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        try:
            # The defaults of `connect` would end the connection at observations above 1 MiB, and use the
            # proxies that environment variables name. They would also end it 20 s after an unanswered ping,
            # in the middle of a step that blocks the server: only call_timeout_s limits a step.
            return await connect(
                self._url,
                open_timeout=CONNECT_S,
                max_size=None,
                proxy=None,
                ping_interval=PING_S,
                ping_timeout=None,
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            problem = f"{self._url} cannot be reached"
            fault = fault_in(error, problem)
            raise fault or EnvironmentFaultError(f"{problem}: {error}", "start") from None


class OpenEnvEnvironment(Environment):
    def __init__(
        self, connection: "ClientConnection", options: OpenEnvOptions, timeout_s: float, url: str
    ) -> None:
        self._connection = connection
        self._options = options
        self._timeout_s = timeout_s
        self._url = url
        self._opening = Opening()

    async def begin(self, row: Row) -> None:
        columns = {name: value for name, value in row.items() if name != PROMPT}
        answer = await self._ask("reset", {**columns, **self._options.reset})
        self._opening = Opening(added=self._text(answer.get("observation")))

    async def reset(self, row: Row) -> Opening:
        """The server's answer to the reset, which was made with the connection."""
        return self._opening

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        return await self._act(dict(arguments), role={})

    async def step(self, text: str) -> Act:
        return await self._act({self._options.action_field: text}, role={"role": "user"})

    async def close(self) -> None:
        """The server ends its environment with the connection."""
        await self._connection.close()

    async def _act(self, action: Frame, role: Mapping[str, str]) -> Act:
        try:
            answer = await self._ask("step", action)
        except _RefusedError as error:
            # A text is not a call of a tool, so it is not counted as a wrong one.
            is_call = self._options.action_schema is not None
            return Act([{**role, "content": f"error: {error}"}], is_wrong=is_call)
        reward = number_of(answer.get("reward"), f"{self._url}: reward is", "step")
        text = self._text(answer.get("observation"))
        return Act([{**role, "content": text}], reward, bool(answer.get("done")))

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Frame:
        """Send one frame and return the answer. After an error the session on the server is of no use."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            async with asyncio.timeout(self._timeout_s):
                if kind == "step":
                    await self._check_unread()
                # A full server says so and closes, before it is asked: `recv` below returns what it said.
                with contextlib.suppress(ConnectionClosed):
                    await self._connection.send(json.dumps({"type": kind, "data": data}, default=str))
                frame = json.loads(await self._connection.recv())
        except TimeoutError:
            raise EnvironmentFaultError(
                f"{self._url}: {kind} took longer than {self._timeout_s:g} s (call_timeout_s)", "timeout"
            ) from None
        except (OSError, WebSocketException, ValueError, RecursionError) as error:
            raise EnvironmentFaultError(f"{self._url}: {kind} failed: {error}", kind) from None
        content: Any = None
        if isinstance(frame, dict):
            content = frame.get("data") or {}
        if not isinstance(content, dict):
            said = f"{str(frame)[:MAX_CHARS]}; expected an object with type and data"
            raise EnvironmentFaultError(f"{self._url}: {kind} was answered by {said}", kind)
        if frame.get("type") == "observation":
            return dict(content)
        code = str(content.get("code"))
        message = str(content.get("message"))
        if code == CAPACITY:
            raise _FullError(message)
        if code == INVALID:
            errors = content.get("errors") or ()
            message = "; ".join(_explained(error) for error in errors) or message
            # The model gets the error as an answer where other words of it may be accepted.
            is_models_mistake = self._options.action_schema is not None or _is_of_text(errors)
            if kind == "step" and is_models_mistake:
                raise _RefusedError(message)
        if UNSENDABLE in message:
            message += (
                " (openenv cannot send what is no JSON: let validators of the action raise "
                "PydanticCustomError, not ValueError, and let observations hold plain values)"
            )
        raise EnvironmentFaultError(f"{self._url}: {kind} failed with {code}: {message}", kind)

    async def _check_unread(self) -> None:
        """Raise EnvironmentFaultError where the server has sent one answer too many: answers have no number,
        and each later one would be taken for that of the step after it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                frame = str(await self._connection.recv())[:MAX_CHARS]
                raise EnvironmentFaultError(f"{self._url}: a second answer to one step: {frame}", "step")

    def _text(self, observation: Any) -> str:
        """What the model reads of an observation: its text, or what is there as JSON.

        Examples, without `observation_field`: "you win" of `{"text": "you win", "score": 1}`, and
        '{"score": 1}' of `{"score": 1}`.
        """
        if not isinstance(observation, Mapping):
            return "" if observation is None else str(observation)
        field = self._options.observation_field
        if field and field not in observation:
            raise EnvironmentFaultError(
                f"{self._url}: an observation has {', '.join(observation)}, and not {field!r} "
                "(options.observation_field)",
                "step",
            )
        names = (field,) if field else TEXTS
        for name in names:
            if isinstance(observation.get(name), str):
                return str(observation[name])
        value = observation.get(field) if field else dict(observation)
        return json.dumps(value, default=str, ensure_ascii=False)


def _explained(error: Mapping[str, Any]) -> str:
    return f"{'.'.join(str(key) for key in error.get('loc', ()))}: {error.get('msg')}"


def _is_of_text(errors: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an action was refused for its text, so that another text of the model may be accepted.

    Of the types of errors, `string_too_long` is about the text. `missing` is not: the field has another name.
    `list_type` and `is_instance_of` are not: no text is ever a list, or an object of a class.
    """
    types = {str(error.get("type")) for error in errors}
    if types & OTHER_FIELDS:
        return False
    return any(not name.endswith("_type") and name != "is_instance_of" for name in types)


class _FullError(Exception):
    """The server has no place for another session."""


class _RefusedError(Exception):
    """Invalid action; the error is returned to the model."""
