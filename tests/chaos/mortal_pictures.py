"""A trainer or worker of a run with pictures that gets a signal at a given point: SIGKILL, or SIGSTOP where
the test does something to Redis at that moment.

`POINT` names one of `POINTS`, `SIGNAL` the signal, and `COUNT` which time it is reached.
"""

import importlib
import os
import runpy
import signal
from typing import Any

from tests.chaos.signals import arrange_signal

POINT = "TESTS_POINT"
SIGNAL = "TESTS_SIGNAL"
COUNT = "TESTS_COUNT"
STORE = "tidemill.common.images.store"
DOOR = "tidemill.common.images.door"
CONSUMER = "tidemill.common.streams.consumer:Consumer"
SCHEDULER = "tidemill.services.trainer.batch.scheduler:Scheduler"
TRAINER = "tidemill.services.trainer.trainer"

POINTS: dict[str, tuple[str, str, str, bool]] = {
    "before a picture is written": ("trainer", f"{STORE}:ImageStore", "_write", False),
    "with a picture written, before its note": ("trainer", f"{STORE}:ImageStore", "_write", True),
    "before the notes are written": ("trainer", f"{DOOR}:ImageDoor", "_write_notes", False),
    "with the notes written, before the tickets": ("trainer", SCHEDULER, "admit", False),
    "between training and commit": ("trainer", TRAINER, "append_commit", False),
    "between commit and weights": ("trainer", TRAINER, "append_commit", True),
    "with its pictures read, before it generates": ("rollout", STORE, "read_images", True),
    "with a sample generated, before its entry": ("rollout", CONSUMER, "publish_sample", False),
    "with an entry, before the next one": ("rollout", CONSUMER, "publish_sample", True),
}
"""The service, the function's owner and name, and whether it has returned then."""


def arrange() -> str:
    """Returns the service that is to run."""
    service, owner_name, name, is_after = POINTS[os.environ[POINT]]
    module_name, _, class_name = owner_name.partition(":")
    owner: Any = importlib.import_module(module_name)
    if class_name:
        owner = getattr(owner, class_name)
    count = int(os.environ[COUNT])
    arrange_signal(owner, name, is_after, count, signal.Signals[os.environ[SIGNAL]])
    return service


if __name__ == "__main__":
    runpy.run_module(f"tidemill.services.{arrange()}", run_name="__main__", alter_sys=True)
