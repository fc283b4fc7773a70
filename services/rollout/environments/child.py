"""What runs in a process of environments: it loads the design once, then plays any number of sessions.

Each session has a thread of its own, with an event loop for what is async, so an environment sees one thread
from its making to its close. When the worker closes the socket or dies, every environment is closed, for
which there is a moment; then the process ends, whatever is still running.
"""

import asyncio
import os
import queue
import signal
import sys
import threading
from dataclasses import asdict
from typing import Any

from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.common.process.children import Send, become_child, read_frame, sender
from tidemill.services.rollout.environments import load
from tidemill.services.rollout.environments.environment import Design, Environment
from tidemill.services.rollout.environments.users_code import described

GRACE_S = 5
CLOSE = {"op": "close", "id": 0, "arguments": []}


def main(descriptor: int, parent: int) -> None:
    """Serve the socket `descriptor` until process `parent` closes it."""
    with become_child(descriptor, parent, may_outlive=True) as channel, channel.makefile("rb") as frames:
        spec, send = read_frame(frames), sender(channel)
        if spec is None:
            return
        try:
            design = load(EnvironmentConfig.model_validate(spec["config"]))
            assert isinstance(design, Design)
        except ConfigError as error:
            send({"error": str(error)})
            return
        send({})
        sessions: dict[int, SessionThread] = {}
        while (frame := read_frame(frames)) is not None:
            number = frame["session"]
            if frame["op"] == "open":
                sessions[number] = SessionThread(design, send)
                sessions[number].start()
            if (thread := sessions.get(number)) is not None:
                thread.frames.put(frame)
            # The thread ends by itself once it has closed; its number is never used again.
            if frame["op"] == "close":
                sessions.pop(number, None)
        _end(list(sessions.values()))


def _end(threads: "list[SessionThread]") -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(GRACE_S)  # the kernel ends this process then, also in the middle of a call
    for thread in threads:
        thread.frames.put(CLOSE)
    for thread in threads:
        thread.join()
    sys.stdout.flush()
    os._exit(0)


class SessionThread(threading.Thread):
    """One session, from its opening to its close."""

    def __init__(self, design: Design, send: Send) -> None:
        super().__init__(daemon=True)
        self.frames: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._design, self._send = design, send
        self._environment: Environment | None = None

    def run(self) -> None:
        with asyncio.Runner() as runner:
            while True:
                frame = self.frames.get()
                try:
                    answer = runner.run(self._do(frame))
                    self._send({"id": frame["id"], "returned": answer})
                except EnvironmentFaultError as fault:
                    self._send({"id": frame["id"], "fault": str(fault), "kind": fault.kind})
                except BaseException as error:  # an answer that cannot be sent, an interrupt
                    self._send({"id": frame["id"], "fault": described(error), "kind": frame["op"]})
                if frame["op"] == "close":
                    return

    async def _do(self, frame: dict[str, Any]) -> dict[str, Any]:
        if frame["op"] == "open":
            self._environment = self._design.make(*frame["arguments"])
            return {}
        environment = self._environment
        if environment is None:  # it could not be made
            return {}
        returned = await getattr(environment, frame["op"])(*frame["arguments"])
        return {} if returned is None else asdict(returned)
