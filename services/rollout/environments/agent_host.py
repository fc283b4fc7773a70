"""The process that runs agent functions: it imports them once, and forks a process for every session.

So a session starts in milliseconds, a function that blocks or dies hurts nobody, and it can be killed with
all that it started. The kernel kills sessions as this process dies, and this process as the worker dies.
"""

import contextlib
import ctypes
import gc
import inspect
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.common.process.children import become_child, end_with_parent, read_frame, sender
from tidemill.common.process.programs import run_main
from tidemill.common.process.users_code import load_users
from tidemill.services.rollout.environments.users_code import metrics_of, number_of
from tidemill.services.rollout.gateway.placeholder import Placeholder
from tidemill.services.rollout.gateway.program_errors import cause_of

FIELD = "rollout.environment.agent"
OFFERED = ("row", "base_url", "anthropic_base_url", "api_key", "model")
"""What a function may take, by name."""
QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DSPY_CACHE_LIMIT": "0",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
}
"""Without these, libraries ask servers on the internet, which takes seconds where there are none; keep
answers on disk, where other sessions would find them and not ask the model; or fail for want of its price."""
MAX_TRACE_CHARS = 4000
BACKLOG = 4096
PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Fork for every connection, until process `parent` closes the socket `descriptor`."""
    with become_child(descriptor, parent) as channel:
        send = sender(channel)
        spec = read_frame(channel.makefile("rb"))
        if spec is None:
            return
        placeholder = Placeholder()
        os.environ.update(variables_of(placeholder.root, placeholder.key, spec["model"]))
        try:
            function = load_agent(spec["agent"])
        except ConfigError as error:
            send({"error": str(error)})
            return
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(spec["path"])
            listener.listen(BACKLOG)
            gc.freeze()  # what is shared with the sessions stays shared
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
            send({})
            while channel not in select.select([listener, channel], [], [])[0]:
                connection, _ = listener.accept()
                with connection:
                    if os.fork() == 0:
                        channel.close()
                        listener.close()
                        _serve(connection, function, placeholder)


def load_agent(reference: str) -> Callable[..., Any]:
    """The function, made to take all of `OFFERED`.

    Raises:
        ConfigError: it does not exist, or wants what nobody gives.
    """
    function = load_users(FIELD, reference)
    if not callable(function):
        raise ConfigError(f"{FIELD} {reference} is {type(function).__name__}; expected a function")
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in variadic}
    if unknown := sorted(required - (names & set(OFFERED))):
        raise ConfigError(
            f"{FIELD} {reference} takes ({', '.join(p.name for p in parameters)}), and nothing gives "
            f"{', '.join(unknown)}. Write it as def {reference.rpartition(':')[2]}(row, base_url, api_key); "
            f"it may take {', '.join(OFFERED)}, which are passed by keyword, so the names matter"
        )

    def call(offered: Mapping[str, Any]) -> Any:
        return function(**{name: value for name, value in offered.items() if takes_all or name in names})

    return call


def variables_of(root: str, key: str, model: str) -> dict[str, str]:
    """By which programs and their libraries find the model at an address."""
    return {
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": key,
        "TIDEMILL_MODEL": model,
        **QUIET,
    }


def _serve(connection: socket.socket, function: Callable[..., Any], placeholder: Placeholder) -> NoReturn:
    """One session, from its frame to its result.

    The process whose number the worker has leads the group, and lives until the worker kills that: the number
    is never another's by then. What plays is its child.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    send, leader = sender(connection), os.getpid()
    send({"pid": leader})
    asked = read_frame(connection.makefile("rb"))
    if asked is not None:
        if os.fork():
            connection.close()  # as the child dies, the worker has to see the end
            while True:
                signal.pause()
        end_with_parent(leader)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # what it starts can be waited for
        os.environ.update(asked["variables"])
        offered = asked["offered"]
        placeholder.route(offered["anthropic_base_url"], offered["api_key"])
        send(_result(function, offered))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def _result(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    try:
        returned = function(offered)
        if inspect.iscoroutine(returned):
            returned = run_main(returned)
        return result_of(returned, "it returned")
    except EnvironmentFaultError as error:
        return {"error": str(error), "cause": "machine"}
    except BaseException as error:
        return {"error": traceback.format_exc()[-MAX_TRACE_CHARS:], "cause": cause_of(error)}


def result_of(returned: Any, verb: str) -> dict[str, Any]:
    """Reward and metrics in what a program gave. Raises EnvironmentFaultError: it is none of that."""
    if not isinstance(returned, Mapping):
        returned = {"reward": returned}
    reward = number_of(returned.get("reward"), verb, "reward")
    return {"reward": reward, "metrics": metrics_of(returned.get("metrics"))}
