"""The `rollout.environment` section: what answers the model, and within which limits."""

import re
from typing import Any, Literal

from pydantic import Field

from tidemill.common.config.section import PathText, Rules, Section

SINGLE_TURN, TOOLS, AGENT = "single_turn", "tools", "agent"
OPENENV = "openenv:"

CallFormat = Literal["auto", "hermes", "llama3", "json"]


class EnvironmentConfig(Section):
    """What a rollout worker plays for each sample: a session of an environment and the model."""

    use: PathText = SINGLE_TURN
    """`single_turn`: one completion and no more. `tools`: the functions of `tools`. `agent`: the program of
    `agent`. `openenv:http://host:port`: an OpenEnv server. Else a class or factory of your own,
    `my_env.py:MyEnv` or `package.module:MyEnv`: one of TRL's or SkyRL-gym's, or ours."""
    tools: tuple[PathText, ...] = ()
    """Functions that the model may call, `my_tools.py:search` each: typed, with a docstring that says what
    each argument means; plain or async."""
    agent: PathText = ""
    """A program that plays a session against an address like OpenAI's or Anthropic's: a function,
    `my_agent.py:run`, or a command that starts with `$ `, such as `$ python my_agent.py`."""
    gateway_host: str = Field("127.0.0.1", min_length=1)
    """The address of this machine at which agents reach the model: for those in containers, that of their
    bridge. Any but 127.0.0.1 can be reached by others too, who then need a session's key."""
    structured_output: Literal["sample", "refuse"] = "sample"
    """An agent that asks for a form of the answer (`response_format`, a forced call): sample freely, as it is
    trained, and let the agent validate; or refuse the request."""
    on_program_error: Literal["fault", "truncated"] | float = "fault"
    """What an exception of the agent's program means, once the model has answered it: a fault, and the
    session is played again; a truncated session, scored by what was said; or one with this number as its own
    reward, as where the program was ended at a limit. Of classes by which frameworks say that the model was
    wrong (docs/sessions.md), `fault` truncates too. Exceptions of the machine, such as OSError, are faults
    always."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of what `use` names; of an OpenEnv server, see docs/sessions.md."""
    call_format: CallFormat = "auto"
    """How the model writes calls of tools. `auto` looks at the chat template."""
    max_turns: int = Field(16, ge=1, le=10_000)
    """Turns of the model in one session; then it is truncated."""
    max_tokens: int = Field(0, ge=0, le=1 << 20)
    """Completion tokens of one session, those of the environment included; then it is truncated. 0: as many
    as `model.max_model_len` leaves."""
    max_segments: int = Field(32, ge=1, le=10_000)
    """Histories of one agent session: the first, and one for each that does not go on where another ended;
    then it is truncated. The trainer reads all of them, each of up to `model.max_model_len` tokens."""
    max_result_tokens: int = Field(0, ge=0, le=1 << 20)
    """A longer answer of the environment is cut in its middle, and says so. 0: no limit of its own."""
    call_timeout_s: float = Field(60.0, gt=0.0, le=86_400.0)
    """One call of the environment may take this long, in seconds; longer is a fault of it. An agent may be
    silent for so long: before its first answer that is a fault, later the session is truncated."""
    session_timeout_s: float = Field(1800.0, gt=0.0, le=864_000.0)
    """A whole session may take this long, in seconds; then it is truncated."""
    attempts: int = Field(6, ge=1, le=100)
    """How often a worker plays a session whose environment fails, before it gives the ticket to another. It
    pauses in between, 0.2 s at first and then twice as long each time, so a server may be started again."""
    processes: int = Field(8, ge=1, le=1024)
    """Most processes of one worker in which blocking environments and tools run."""

    @property
    def program_error_value(self) -> float | None:
        """The own reward of a session whose program failed; None where it has none."""
        return self.on_program_error if isinstance(self.on_program_error, float) else None

    @property
    def is_single_turn(self) -> bool:
        """Whether there is nothing that answers the model."""
        return self.use == SINGLE_TURN

    def rules(self) -> Rules:
        yield (
            self.use == TOOLS and not self.tools,
            "use: tools needs `tools`: the functions that the model may call, for example "
            "[my_tools.py:search]",
        )
        yield (
            self.use == AGENT and not self.agent,
            "use: agent needs `agent`: a function such as my_agent.py:run, or a command such as "
            "`$ python my_agent.py`",
        )
        yield (
            self.use.startswith(OPENENV) and not re.match(r"https?://[^/]", self.use.removeprefix(OPENENV)),
            f"use: openenv: needs a server's address, openenv:http://host:port; got {self.use!r}",
        )
        yield (
            self.use not in (SINGLE_TURN, TOOLS, AGENT) and ":" not in self.use,
            "use must be single_turn, tools, agent, or a class of your own such as my_env.py:MyEnv; got "
            f"{self.use!r}",
        )
