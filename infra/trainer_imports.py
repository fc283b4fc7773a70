"""Counts the files that a trainer of a plain GRPO run imports: `python -m infra.trainer_imports`.

A process imports the service, its policy and what these need, as a trainer does whose config names nothing
but a model, text and a reward: no adapters, critic, reference, routers, compiler or ranks, no evaluation, and
the default algorithm, for a float32 model on a CPU (elsewhere come deltas of weights, and how weights are
read to their device). The files of `common/` and `services/` that it then holds are counted, with their
lines. `--list` names them.
"""

import importlib
import sys
from pathlib import Path
from typing import NamedTuple

MODULES = (
    "tidemill.services.trainer.__main__",
    "tidemill.services.trainer.service",
    "tidemill.services.trainer.policy.transformers_policy",
    "tidemill.services.trainer.algorithm.advantages",
)
"""What the trainer's process runs, in this order; `service` and the policy are imported as it starts."""


class ImportedFile(NamedTuple):
    """`services/trainer/step.py` with 342 lines."""

    module: str
    num_lines: int


def imported_files() -> list[ImportedFile]:
    """The files of `common/` and `services/` that this process holds, by name."""
    files = []
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and name.startswith(("tidemill.common", "tidemill.services")):
            files.append(ImportedFile(name, len(Path(path).read_text(encoding="utf-8").splitlines())))
    return files


def main(arguments: list[str]) -> int:
    for name in MODULES:
        importlib.import_module(name)
    files = imported_files()
    if "--list" in arguments:
        for file in files:
            print(f"{file.num_lines:>6}  {file.module}")
    num_lines = sum(file.num_lines for file in files)
    print(f"{len(files)} files, {num_lines:,} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
