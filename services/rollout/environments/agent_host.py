"""The process that runs agent programs: it imports functions once, and forks a process for every session.

So a session starts in milliseconds, a program that blocks or dies affects no other, and it can be killed with
all that it started. A fork that fails is an answer to the session that asked for it, and to no other. The
kernel kills sessions as this process dies, and this process as the worker dies.
"""

import contextlib
import ctypes
import gc
import http.client
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any, NoReturn
from urllib.parse import urlsplit

from tidemill.common.errors import ConfigError, EnvironmentFaultError, MachineFaultError
from tidemill.common.process.children import (
    become_child,
    end_with_parent,
    read_frame,
    sender,
    startup_failure,
)
from tidemill.common.process.programs import ending_in_words, run_main
from tidemill.common.process.shortage import is_machine_fault, machine_faults, number_in_text, shortage_number
from tidemill.common.process.users_code import load_users
from tidemill.services.rollout.environments.program_errors import ProgramError, cause_in, cause_of
from tidemill.services.rollout.environments.users_code import metrics_of, number_of

FIELD = "rollout.environment.agent"
COMMAND = "$ "
OFFERED = ("row", "base_url", "anthropic_base_url", "api_key", "model")
"""Names of the arguments that a function may take."""
QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DSPY_CACHE_LIMIT": "0",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "HAYSTACK_TELEMETRY_ENABLED": "false",
    "AGNO_TELEMETRY": "false",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
"""Without these, libraries ask servers on the internet, which takes seconds if there are none; report runs to
their makers; keep answers on disk, where other sessions would find them and not ask the model; or fail
because they know no price."""
MAX_TRACE_CHARS = 4000
LONGEST_VARIABLE = 100_000
"""Linux refuses to start a program with a longer one; a row is on stdin, too."""
TAIL_BYTES = 16_384
TAIL_CHARS = 2_000
PIPES_CLOSE_S = 1.0
"""Longest wait for a command's output to end: processes that it started may hold it open."""
BACKLOG = 4096
REFUSAL_PAUSE_S = 0.1
PR_SET_PDEATHSIG = 1

Program = Callable[[Mapping[str, Any]], Any]
"""Plays a session with the arguments `OFFERED`; `result_of` reads what it returns."""


def main(descriptor: int, parent: int) -> None:
    """Fork for every connection, until process `parent` closes the socket `descriptor`."""
    with become_child(descriptor, parent) as channel:
        send = sender(channel)
        spec = read_frame(channel.makefile("rb"))
        if spec is None:
            return
        try:
            placeholder = Placeholder()
            # Before the file is imported: clients that it makes as it loads read their address then.
            os.environ.update(variables_of(placeholder.root, spec["placeholder_key"], spec["model"]))
            program = load_program(spec["agent"])
            listener = socket.socket(socket.AF_UNIX)
            spare = Spare()
        except Exception as error:
            if not isinstance(error, ConfigError) and not is_machine_fault(error):
                raise
            send(startup_failure(error))
            return
        with listener:
            listener.bind(spec["path"])
            listener.listen(BACKLOG)
            gc.freeze()  # memory that is shared with the sessions stays shared
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps sessions
            # After `listen`: the worker connects as soon as it reads this.
            send({})
            while channel not in select.select([listener, channel], [], [])[0]:
                try:
                    connection, _ = listener.accept()
                except OSError as error:
                    if not is_machine_fault(error):
                        raise
                    spare.refuse(listener, error)
                    continue
                with connection:
                    try:
                        pid = os.fork()
                    except OSError as error:
                        sender(connection)(refusal_of(error))
                        continue
                    if pid == 0:
                        # Held open here, it would hide the host's end from the worker.
                        channel.close()
                        listener.close()
                        _serve(connection, program, placeholder, spec["model"])


def refusal_of(error: BaseException) -> dict[str, Any]:
    """The answer to a session that cannot be started: the `errno` of what the machine is short of, or 0, and
    why in words."""
    return {"refused": f"{type(error).__name__}: {error}", "shortage": shortage_number(error)}


class Spare:
    """A descriptor in reserve. At the limit of descriptors it is given up for a moment, to answer a session
    that could not even be accepted: else that session would wait for its limit of time."""

    def __init__(self) -> None:
        self._descriptor = os.open(os.devnull, os.O_RDONLY)

    def refuse(self, listener: socket.socket, error: OSError) -> None:
        """Accept the next session, and answer that it cannot be started."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        try:
            with listener.accept()[0] as connection:
                sender(connection)(refusal_of(error))
            self._descriptor = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            # Another took the place, or the machine itself is at its limit: the session stays in line.
            time.sleep(REFUSAL_PAUSE_S)


def load_program(agent: str) -> Program:
    """The command or function that the config names.

    Raises:
        ConfigError: it does not exist, or requires arguments that are not `OFFERED`.
    """
    if agent.startswith(COMMAND):
        return lambda offered: _run_command(agent.removeprefix(COMMAND), offered["row"])
    function = load_users(FIELD, agent)
    if not callable(function):
        raise ConfigError(f"{FIELD} {agent} is {type(function).__name__}; expected a function")
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in variadic}
    if unknown := sorted(required - (names & set(OFFERED))):
        raise ConfigError(
            f"{FIELD} {agent} takes ({', '.join(p.name for p in parameters)}), and nothing gives "
            f"{', '.join(unknown)}. Write it as def {agent.rpartition(':')[2]}(row, base_url, api_key); "
            f"it may take {', '.join(OFFERED)}, which are passed by keyword, so the names matter"
        )

    def call(offered: Mapping[str, Any]) -> Any:
        returned = function(**{name: offered[name] for name in OFFERED if takes_all or name in names})
        return run_main(returned) if inspect.iscoroutine(returned) else returned

    return call


def variables_of(root: str, key: str, model: str) -> dict[str, str]:
    """Environment variables by which programs and their libraries find the model at an address."""
    return {
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": key,
        "TIDEMILL_MODEL": model,
        **QUIET,
    }


def result_of(returned: Any, verb: str) -> dict[str, Any]:
    """Reward and metrics of a program's result. Raises EnvironmentFaultError: the reward is not a number."""
    if not isinstance(returned, Mapping):
        returned = {"reward": returned}
    reward = number_of(returned.get("reward"), verb, "reward")
    metrics = metrics_of(returned.get("metrics"))
    return {"reward": reward, "metrics": metrics, "is_late": returned.get("timeout") is True}


class Placeholder:
    """The model's address for what an agent's file makes while it is imported, such as `client = OpenAI()`.

    The file is imported once, before there is a session. It gets a port of this machine that nothing listens
    on, so that no client reaches a provider, and what asks while the file is imported is refused at once. In
    the process of a session, connections to it are made to the gateway, which learns whose they are.
    """

    def __init__(self) -> None:
        self._reserved = socket.socket()  # bound for as long as the host lives, and never listened on
        self._reserved.bind(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._reserved.getsockname()
        self.root = f"http://{self.address[0]}:{self.address[1]}"

    def route(self, root: str, key: str) -> None:
        """Redirect this process's connections to the placeholder to the session at `root`."""
        session = urlsplit(root)
        gateway = (session.hostname or "", session.port or 80)

        def claim(caller: socket.socket) -> None:
            # Before the caller can send anything: the gateway knows the session by the connection's port. It
            # takes the claim only from the process that holds the connection, so the pid is asked for here:
            # the program may have forked.
            asking = http.client.HTTPConnection(*gateway)
            path = f"{session.path}/processes/{os.getpid()}/connections/{caller.getsockname()[1]}"
            with contextlib.closing(asking):
                asking.request("POST", path, headers={"x-api-key": key})
                answer = asking.getresponse()
                refusal = answer.read().decode(errors="replace")
            if answer.status != http.HTTPStatus.OK:
                raise ConnectionRefusedError(f"the gateway refused this connection: {refusal}")

        def redirected(connect: Callable[..., Any]) -> Callable[..., Any]:
            def connect_to(caller: socket.socket, address: Any) -> Any:
                if not isinstance(address, tuple) or address[:2] != self.address:
                    return connect(caller, address)
                try:
                    return connect(caller, gateway)  # of a socket that does not block, this raises
                finally:
                    claim(caller)

            return connect_to

        # What blocks and what runs on asyncio's loop both connect through these two.
        for name in ("connect", "connect_ex"):
            setattr(socket.socket, name, redirected(getattr(socket.socket, name)))


def _serve(connection: socket.socket, program: Program, placeholder: Placeholder, model: str) -> NoReturn:
    """One session, from its frame to its result.

    The process whose pid the worker has leads the group, and lives until the worker kills the group, so the
    pid cannot be reused by then. The program runs in its child.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Before its pid is sent: the worker kills the group of that id.
    os.setsid()
    send = sender(connection)
    leader = os.getpid()
    send({"pid": leader})
    asked = read_frame(connection.makefile("rb"))
    if asked is not None:
        try:
            pid = os.fork()
        except OSError as error:
            send(refusal_of(error))
            pid = -1
        if pid:
            # A program that is asked to end gets it with its group; the leader lives until it is killed.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            connection.close()  # as the child dies, the worker has to see the end
            while True:
                signal.pause()
        end_with_parent(leader)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # what it starts can be waited for
        root = asked["root"]
        key = asked["key"]
        os.environ.update(variables_of(root, key, model) | asked["variables"])
        placeholder.route(root, key)
        urls = {"base_url": f"{root}/v1", "anthropic_base_url": root}
        send(_result(program, {"row": asked["row"], "api_key": key, "model": model} | urls))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Without the interpreter's shutdown: its exit handlers are copies of the host's.
    os._exit(0)


def _result(program: Program, offered: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return result_of(program(offered), "it returned")
    except MachineFaultError as error:  # raised by us, so the program has not run
        return refusal_of(error)
    except ProgramError as error:
        # A shell says it in words.
        return {"error": str(error), "cause": error.cause, "shortage": number_in_text(str(error))}
    except EnvironmentFaultError as error:
        return {"error": str(error), "cause": "machine"}
    except BaseException as error:
        text = traceback.format_exc()[-MAX_TRACE_CHARS:]
        return {"error": text, "cause": cause_of(error), "shortage": shortage_number(error)}


def _run_command(command: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Run a command of the shell; the last line of its output may be a result in JSON.

    Raises:
        ProgramError: it ended with an exit code other than 0.
        MachineFaultError: it could not be started.
    """
    # A program that is asked to end gets SIGTERM with its group: the command may use its time, so this waits.
    # A handler, unlike SIG_IGN, is not inherited by the command.
    signal.signal(signal.SIGTERM, lambda *_: None)
    data = json.dumps(row)
    short = {"TIDEMILL_ROW": data} if len(data) < LONGEST_VARIABLE else {}
    pipe = subprocess.PIPE
    with machine_faults("the command could not be started"):
        process = subprocess.Popen(
            command, shell=True, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | short
        )
    assert process.stdin and process.stdout and process.stderr
    output = bytearray()
    errors = bytearray()
    readers = [
        # Both pipes are read at once: a command that fills the other one would wait for ever.
        threading.Thread(target=_keep_tail, args=each, daemon=True)
        for each in ((process.stdout, output), (process.stderr, errors))
    ]
    try:
        with machine_faults("the command's output could not be read"):
            for reader in readers:
                reader.start()
    except MachineFaultError:
        process.kill()
        raise
    with contextlib.suppress(BrokenPipeError), process.stdin as row_pipe:  # it may end without reading it
        row_pipe.write(data.encode())
    code = process.wait()
    for reader in readers:
        reader.join(PIPES_CLOSE_S)
    if code:
        said = errors.decode(errors="replace")
        end = f"{ending_in_words(code)}: {said.strip()[-TAIL_CHARS:]}"
        raise ProgramError(f"the command ended with {end}", cause_in(said, code))
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    return result if isinstance(result, dict) and result.keys() & {"reward", "metrics"} else {}


def _keep_tail(pipe: IO[bytes], tail: bytearray) -> None:
    while chunk := os.read(pipe.fileno(), TAIL_BYTES):
        tail[:] = (tail + chunk)[-TAIL_BYTES:]
