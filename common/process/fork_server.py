"""A process that imports torch and its like once, and becomes several services: a fork shares the imports.

    python -m tidemill.common.process.fork_server FD

Over the socket FD it gets a request for each process: module, arguments, variables and log. It answers with
the process's id, and when the process ends with the id and the exit code. A fork that fails is answered with
`failed` and the `errno`: the processes that were forked before go on. It ends when the other side of the
socket is closed and all forked processes have ended.

Only for machines without GPUs: CUDA must not be forked once it is in use, and imports may use it.
"""

import atexit
import contextlib
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from tidemill.common.process.privacy import hide_memory
from tidemill.common.process.programs import SHARED_IMPORTS, importing

MAX_REQUEST_BYTES = 1 << 18
FAILED = "failed"


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Returns in each forked process, with its request, and in the server at the end, with None."""
    children: dict[int, int] = {}  # pidfd, which becomes readable when the process ends -> process id
    with control, selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        is_wanted = True
        while is_wanted or children:
            for key, _ in selector.select():
                if key.fd in children:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    pid, status = os.waitpid(children.pop(key.fd), 0)
                    with contextlib.suppress(OSError):  # the other side is closed
                        control.send(f"{pid} {os.waitstatus_to_exitcode(status)}".encode())
                elif request := control.recv(MAX_REQUEST_BYTES):
                    try:
                        pid, descriptor = fork_watched()
                    except OSError as error:
                        with contextlib.suppress(OSError):  # the other side is closed
                            control.send(f"{FAILED} {error.errno}".encode())
                        continue
                    if not pid:
                        for child in children:
                            os.close(child)
                        return dict(json.loads(request))
                    children[descriptor] = pid
                    selector.register(descriptor, selectors.EVENT_READ)
                    with contextlib.suppress(OSError):  # the other side is closed
                        control.send(str(pid).encode())
                else:
                    selector.unregister(control)
                    is_wanted = False
    return None


def fork_watched() -> tuple[int, int]:
    """Fork. Returns the process's id and its pidfd, and in the new process 0 and 0.

    Raises:
        OSError: the machine is short of processes, memory or descriptors. There is no new process.
    """
    pid = os.fork()
    if not pid:
        return 0, 0
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        # Nobody would see its end.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def become(request: dict[str, Any]) -> NoReturn:
    """Do what `python -m MODULE` does, as the leader of a session, with output appended to the log."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    # The server imported torch with one thread.
    torch = sys.modules.get("torch")
    if torch:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
        torch.seed()  # else all forked processes draw the same numbers
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed()
    sys.argv[1:] = request["arguments"]
    end_with(lambda: runpy.run_module(request["module"], run_name="__main__", alter_sys=True))


def end_with(work: Callable[[], object]) -> NoReturn:
    """Do `work`, then end the process like the interpreter, with the same exit codes, signals and handlers,
    but without tearing down modules: that takes half a second with torch."""
    code = 0
    try:
        work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # As the interpreter does before it tears down modules: wait for threads, then call exit handlers.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def main() -> dict[str, Any] | None:
    hide_memory()  # it receives the variables of all services
    with importing():
        for name in SHARED_IMPORTS:
            importlib.import_module(name)
    return serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__" and (asked := main()) is not None:
    become(asked)
