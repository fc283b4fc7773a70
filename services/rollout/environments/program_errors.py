"""Cause of the exception that ended an agent's program: the model, the machine, or not known.

Programs raise where the model is wrong: it called a tool that does not exist, or its answer cannot be read.
Such a session should get a low reward and not be played again. Frameworks have classes for such exceptions.
"""

import builtins
import re
from collections.abc import Iterator
from typing import Literal

from tidemill.common.errors import EnvironmentFaultError

Cause = Literal["model", "machine", "unknown"]

OF_THE_MODEL = frozenset(
    [
        "agents.MaxTurnsExceeded",
        "agents.ModelBehaviorError",
        "agents.OutputGuardrailTripwireTriggered",
        "agents.ToolInputGuardrailTripwireTriggered",
        "autogen_core.InvalidToolArgumentsException",
        "autogen_core.ToolNotFoundException",
        "dspy.AdapterParseError",
        "instructor.AsyncValidationError",
        "instructor.IncompleteOutputException",
        "instructor.InstructorRetryException",
        "instructor.ResponseParsingError",
        "instructor.ValidationError",
        "json.JSONDecodeError",
        "langchain.StructuredOutputError",
        "langchain.MultipleStructuredOutputsError",
        "langchain.StructuredOutputValidationError",
        "langchain_core.OutputParserException",
        "langgraph.GraphRecursionError",
        "litellm.JSONSchemaValidationError",
        "minisweagent.FormatError",
        "openai.LengthFinishReasonError",
        "pydantic_ai.IncompleteToolCall",
        "pydantic_ai.UnexpectedModelBehavior",
        "pydantic_ai.UsageLimitExceeded",
        "pydantic_core.ValidationError",
        "smolagents.AgentMaxStepsError",
        "smolagents.AgentParsingError",
        "smolagents.AgentToolCallError",
    ]
)
"""Exceptions that the model causes. Package and class only: modules move between releases."""
OF_THE_MACHINE = frozenset(
    [
        *("anthropic.APIConnectionError", "openai.APIConnectionError", "httpx.TransportError"),
        *("builtins.OSError", "builtins.ImportError", "builtins.MemoryError"),
    ]
)
"""Exceptions that the model does not cause, whatever was raised from them."""
ENGINE_FAILED = 125
"""Exit code of `docker run` where the container could not be started."""
TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)", re.MULTILINE)


class ProgramError(EnvironmentFaultError):
    """An agent's program ended with an exception, or with an exit code other than 0."""

    def __init__(self, message: str, cause: Cause = "unknown") -> None:
        super().__init__(message, "program")
        self.cause = cause


def cause_of(error: BaseException) -> Cause:
    """The cause of an exception, by its class, those that it derives from, and what it was raised from."""
    if isinstance(error, BaseExceptionGroup):
        causes = {cause_of(member) for member in error.exceptions}
        if len(causes) == 1:
            return causes.pop()
        return "machine" if "machine" in causes else "unknown"
    chain = list(_chain(error))
    # The whole chain: frameworks raise an error for wrong answers from that of a lost connection.
    if any(_names(raised) & OF_THE_MACHINE for raised in chain):
        return "machine"
    return "model" if _names(error) & OF_THE_MODEL else "unknown"


def cause_in(output: str, code: int) -> Cause:
    """`cause_of` for a command, from its exit code and the traceback in its output."""
    if code < 0 or code > 128:
        return "machine"  # a signal: out of memory, or killed; 255: the engine of `docker exec` is gone
    if code == ENGINE_FAILED:
        return "machine"
    _, mark, last = output.rpartition(TRACEBACK)
    raised = _RAISED.search(last) if mark else None
    if raised is None:
        return "unknown"
    package, _, name = raised[1].rpartition(".")
    if not package:
        builtin = getattr(builtins, name, None)
        is_machine = isinstance(builtin, type) and issubclass(builtin, (OSError, ImportError, MemoryError))
        return "machine" if is_machine else "unknown"
    short = f"{package.partition('.')[0]}.{name}"
    if short in OF_THE_MACHINE:
        return "machine"
    return "model" if short in OF_THE_MODEL else "unknown"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(100):  # a chain may be a ring
        if error is None:
            return
        yield error
        error = error.__cause__


def _names(error: BaseException) -> set[str]:
    return {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
