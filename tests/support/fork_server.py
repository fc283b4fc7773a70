"""The process that tests' workers and services are forked from: it has only imported the heavy modules.

`tests.support.preloaded` starts it and asks it for processes. A forked process leaves this file's loop and
does what `python -m MODULE` does, and ends as those of a run do (`end_with`). When a process that asks has
ended, so do all that were forked for it; when it is the first of them, so does this one.
"""

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
import types
from dataclasses import dataclass
from typing import Any, NoReturn

from tidemill.common.process.fork_server import end_with

PRELOADED = (
    "tidemill.services.trainer.service",
    "tidemill.services.trainer.policy.transformers_policy",
    "tidemill.services.rollout.service",
    "tidemill.services.rollout.engines.transformers",
    "tidemill.services.rollout.engines.simulated",
    "tidemill.services.reward.worker",
    "tidemill.services.console.look.exporter",
    "tidemill.services.reward.model_server.app",
    "tidemill.common.archive.__main__",
    "tidemill.common.archive.archiver",
    "transformers.models.llama.modeling_llama",
    "torch._inductor.compile_fx",
    "peft",
)
MAX_REQUEST_BYTES = 1 << 18


@dataclass
class Child:
    """A process that was forked, and the socket to which its end is reported."""

    pid: int
    status: socket.socket
    client: socket.socket

    def tell_end(self) -> None:
        """Take the process off the kernel's list and pass on its exit code."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with contextlib.suppress(OSError):  # the client has closed it
            self.status.sendall(f"{code}\n".encode())
        self.status.close()


class ForkServer:
    """Answers requests until the process that has started it is gone."""

    def __init__(self, listener: socket.socket, owner: socket.socket | None = None) -> None:
        self._listener = listener
        self._owner = owner
        self._selector = selectors.DefaultSelector()
        self._clients = [owner] if owner else []
        for channel in (listener, *self._clients):
            self._selector.register(channel, selectors.EVENT_READ)
        self._children: dict[int, Child] = {}

    def serve(self) -> dict[str, Any] | None:
        """Returns twice and more: in each forked process its request, in the server None at the end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._clients.append(self._listener.accept()[0])
                    self._selector.register(self._clients[-1], selectors.EVENT_READ)
                elif not isinstance(client := key.fileobj, socket.socket):
                    if key.fd in self._children:  # else it ended with a client just now
                        self._ended(key.fd)
                else:
                    request, descriptors, _, _ = socket.recv_fds(client, MAX_REQUEST_BYTES, 4)
                    if request and self._fork(client, *descriptors):
                        return dict(json.loads(request))
                    if not request:
                        self._end_all(client)
                        if client is self._owner:
                            return None

    def _fork(self, client: socket.socket, status: int, *standard: int) -> bool:
        """Whether this is the new process."""
        pid = os.fork()
        if pid == 0:
            self._leave(standard)
            os.close(status)
            return True
        for descriptor in standard:
            os.close(descriptor)
        child = Child(pid, socket.socket(fileno=status), client)
        with contextlib.suppress(OSError):  # the client has ended
            child.status.sendall(f"{pid}\n".encode())
        descriptor = os.pidfd_open(pid)
        self._children[descriptor] = child
        self._selector.register(descriptor, selectors.EVENT_READ)
        return False

    def _leave(self, standard: tuple[int, ...]) -> None:
        """In the new process: close what is the server's, and redirect input and outputs."""
        self._selector.close()
        self._listener.close()
        for client in self._clients:
            client.close()
        for descriptor, child in self._children.items():
            os.close(descriptor)
            child.status.close()
        self._children.clear()
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
            os.close(descriptor)

    def _ended(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        self._children.pop(descriptor).tell_end()

    def _end_all(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        self._clients.remove(client)
        client.close()
        for descriptor, child in [*self._children.items()]:
            if child.client is client or client is self._owner:
                os.kill(child.pid, signal.SIGKILL)
                self._ended(descriptor)


class FailedImports:
    """Takes away what is left of a file whose import failed, so that each forked process fails at it again.

    pytest (9.2, `--import-mode=importlib`) leaves such a module in `sys.modules`, takes it from there when it
    collects the file again, and finds no tests and no error in it.
    """

    def pytest_exception_interact(self, node: Any) -> None:
        """The file of `node` could not be collected."""
        for name, module in [*sys.modules.items()]:
            file = getattr(module, "__file__", None)
            if file is not None and os.path.realpath(file) == os.path.realpath(node.path):
                del sys.modules[name]


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
    end_with(lambda: run(request["module"], request["code"]))


def run(module: str, code: str) -> None:
    if code:
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> dict[str, Any] | None:
    """Import, then serve: all that services need, or all files of tests that pytest's arguments name."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, whose end ends this process
    kind, *arguments = sys.argv[1:]
    gc.disable()  # what imports make stays: looking through it for garbage again and again finds none
    if kind == "services":
        for name in PRELOADED:
            with contextlib.suppress(ImportError):  # some are of extras
                importlib.import_module(name)
        server = ForkServer(*(socket.socket(fileno=int(descriptor)) for descriptor in arguments))
    else:
        import pytest

        options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        pytest.main([*arguments, *options], plugins=[FailedImports()])
        server = ForkServer(socket.socket(fileno=os.dup(0)))
    gc.collect()
    gc.freeze()  # so that no collection of a forked process copies the pages of all these modules
    gc.enable()
    return server.serve()


if __name__ == "__main__" and (asked := main()) is not None:
    become(asked)
