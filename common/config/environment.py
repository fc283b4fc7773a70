"""The `rollout.environment` section: what answers the model, and within which limits."""

import re
from typing import Any, Literal

from pydantic import Field

from tidemill.common.config.section import PathText, Rules, Section

SINGLE_TURN = "single_turn"
TOOLS = "tools"
AGENT = "agent"
OPENENV = "openenv:"
NO_CONTAINERS = "none"

CallFormat = Literal["auto", "hermes", "llama3", "json"]


class EnvironmentConfig(Section):
    """What answers the model, and within which limits (docs/sessions.md)."""

    use: PathText = SINGLE_TURN
    """`single_turn`, `tools`, `agent`, `openenv:http://host:port`, or a class or factory: `my_env.py:MyEnv`,
    `package.module:MyEnv`."""
    tools: tuple[PathText, ...] = ()
    """Functions that the model may call, such as `my_tools.py:search`; typed, with a docstring."""
    agent: PathText = ""
    """A function, `my_agent.py:run`, or a command that starts with `$ `."""
    gateway_host: str = Field("127.0.0.1", min_length=1)
    """Address at which agents reach the model; in containers that of their bridge."""
    structured_output: Literal["sample", "refuse"] = "sample"
    """An agent that asks for a form of the answer (`response_format`, a forced call) gets a free sample, or a
    refusal."""
    repeated_requests: Literal["retry", "sample"] = "retry"
    """A request that an agent repeats is a retry, of whose answers one is trained; or, for agents that sample
    several answers on purpose, a sample of its own."""
    on_program_error: Literal["fault", "truncated"] | float = "fault"
    """An exception of the agent's program: a fault, a truncated session, or this number as its reward."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of what `use` names."""
    call_format: CallFormat = "auto"
    """How the model writes calls of tools; `auto` looks at the chat template."""
    max_turns: int = Field(16, ge=1, le=10_000)
    """Turns after which a session is truncated."""
    max_tokens: int = Field(0, ge=0, le=1 << 20)
    """Completion tokens, the environment's included, after which a session is truncated. 0: by
    `model.max_model_len`."""
    max_segments: int = Field(32, ge=1, le=10_000)
    """Segments (rewritten histories) after which an agent's session is truncated."""
    max_result_tokens: int = Field(0, ge=0, le=1 << 20)
    """A longer answer of the environment is cut in its middle; 0: one longer than `model.max_model_len`."""
    call_timeout_s: float = Field(60.0, gt=0.0, le=86_400.0)
    """Longest call of the environment, and silence of an agent after its first answer; longer is `late`. A
    late opening or reset is a fault."""
    late: Literal["auto", "truncate", "fault"] = "auto"
    """A late call truncates the session, or is a fault. `auto`: a fault with OpenEnv's servers, else
    truncated."""
    session_timeout_s: float = Field(1800.0, gt=0.0, le=864_000.0)
    """Time after which a session is truncated."""
    attempts: int = Field(6, ge=1, le=100)
    """Tries of a session that ends in faults, before another worker gets the ticket."""
    max_faults: int = Field(200, ge=0, le=1_000_000)
    """Tickets in a row that a worker hands on for such faults, after which the run stops; 0: never."""
    processes: int = Field(8, ge=1, le=1024)
    """Most processes of a worker for blocking environments and tools."""

    oracle: PathText = ""
    """A function, `tasks.py:oracle`, of a row: it returns the turns of a model that knows the solution.
    `tidemill check` plays the first rows with these turns (reward 1) and with nothing (reward 0)."""
    containers: Literal["none", "docker", "podman"] = "none"
    """Command by which containers of sessions are removed when their session ends, or its worker is gone."""
    max_containers: int = Field(0, ge=0, le=100_000)
    """With so many containers of sessions on a node, of all its workers, no session starts; 0: no limit."""

    @property
    def program_error_value(self) -> float | None:
        """Reward of a session whose agent's program failed; None where `on_program_error` is no number."""
        return self.on_program_error if isinstance(self.on_program_error, float) else None

    @property
    def truncates_late(self) -> bool:
        """Whether a late call truncates its session; otherwise it is a fault."""
        return self.late == "truncate" or (self.late == "auto" and not self.use.startswith(OPENENV))

    @property
    def is_single_turn(self) -> bool:
        """Whether nothing answers the model: a completion is one turn."""
        return self.use == SINGLE_TURN

    def rules(self) -> Rules:
        if self.use == TOOLS and not self.tools:
            yield (
                "use: tools needs `tools`: the functions that the model may call, for example "
                "[my_tools.py:search]"
            )
        has_programs = self.use == AGENT or (":" in self.use and not self.use.startswith(OPENENV))
        if self.containers != NO_CONTAINERS and not has_programs:
            yield (
                f"containers: {self.containers} is for sessions that start containers: an agent's, or those "
                f"of a class of your own; {self.use} starts none. Remove it"
            )
        if self.max_containers and self.containers == NO_CONTAINERS:
            yield "max_containers needs `containers`: docker or podman, the command that counts them"
        if self.use == AGENT and not self.agent:
            yield (
                "use: agent needs `agent`: a function such as my_agent.py:run, or a command such as "
                "`$ python my_agent.py`"
            )
        if self.use.startswith(OPENENV) and not re.match(r"https?://[^/]", self.use.removeprefix(OPENENV)):
            yield f"use: openenv: needs a server's address, openenv:http://host:port; got {self.use!r}"
        if self.use not in (SINGLE_TURN, TOOLS, AGENT) and ":" not in self.use:
            yield (
                "use must be single_turn, tools, agent, or a class of your own such as my_env.py:MyEnv; got "
                f"{self.use!r}"
            )
