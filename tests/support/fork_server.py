"""The process that service processes are forked from: it has imported what is heavy, and has run nothing.

`tests.support.preloaded` starts it and asks it for processes. A forked process leaves this file's loop and
does what `python -m MODULE` does, with the same exit codes, signals and handlers at its end; it spares itself
only the taking apart of every module, half a second for those of torch. When the tests' process has ended, so
do all that were forked.
"""

import atexit
import contextlib
import gc
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
from dataclasses import dataclass
from typing import Any, NoReturn

PRELOADED = (
    "tidemill.services.trainer.service",
    "tidemill.services.trainer.policy.transformers_policy",
    "tidemill.services.rollout.service",
    "tidemill.services.rollout.engines.transformers",
    "tidemill.services.rollout.engines.simulated",
    "tidemill.services.reward.worker",
    "tidemill.services.console.exporter.exporter",
    "tidemill.services.reward.model_server.app",
    "tidemill.services.jobs.known_jobs",
    "tidemill.services.jobs.archive",
    "tidemill.common.archive.archiver",
    "transformers.models.llama.modeling_llama",
)
MAX_REQUEST_BYTES = 1 << 18


@dataclass
class Child:
    """A process that was forked, and the socket that its end is told to."""

    pid: int
    status: socket.socket

    def tell_end(self) -> None:
        """Take the process off the kernel's list and pass on its exit code."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with contextlib.suppress(OSError):  # nobody waits for it any more
            self.status.sendall(f"{code}\n".encode())
        self.status.close()


class ForkServer:
    """Answers requests until the tests' process is gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._children: dict[int, Child] = {}

    def serve(self) -> dict[str, Any] | None:
        """Returns twice and more: in each forked process its request, in the server None at the end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._ended(key.fd)
                    continue
                request, descriptors, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, 3)
                if not request:
                    self._end_all()
                    return None
                if self._fork(*descriptors):
                    return dict(json.loads(request))

    def _fork(self, output: int, errors: int, status: int) -> bool:
        """Whether this is the new process."""
        pid = os.fork()
        if pid == 0:
            self._leave(output, errors)
            os.close(status)
            return True
        os.close(output)
        os.close(errors)
        child = Child(pid, socket.socket(fileno=status))
        child.status.sendall(f"{pid}\n".encode())
        descriptor = os.pidfd_open(pid)
        self._children[descriptor] = child
        self._selector.register(descriptor, selectors.EVENT_READ)
        return False

    def _leave(self, output: int, errors: int) -> None:
        """Nothing of the server's stays open in the new process, and its output goes where it belongs."""
        self._selector.close()
        self._control.close()
        for descriptor, child in self._children.items():
            os.close(descriptor)
            child.status.close()
        self._children.clear()
        for descriptor, place in ((output, 1), (errors, 2)):
            os.dup2(descriptor, place)
            os.close(descriptor)

    def _ended(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        self._children.pop(descriptor).tell_end()

    def _end_all(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
            child.tell_end()


def become(request: dict[str, Any]) -> NoReturn:
    """Run the module as `__main__`, in environment and folder as asked for, and end with its exit code."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-m", *request["arguments"]]
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    code = run(request["module"])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def run(module: str) -> int:
    """What the interpreter makes of a module's end; negative: it ends by that signal."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def main() -> dict[str, Any] | None:
    """Import, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, whose end ends this process
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no collection of a forked process copies the pages of all these modules
    return ForkServer(control).serve()


if __name__ == "__main__" and (asked := main()) is not None:
    become(asked)
