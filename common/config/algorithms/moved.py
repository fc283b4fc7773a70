"""Names that were built in and are examples now, in `examples/algorithms`.

A config of the user's that has one of them is refused, with the file and the setting to take. The recorded
config of an old run is not: its run can be read and replayed, with the example.
"""

from pathlib import Path
from typing import Any

ADVANTAGES_MOVED = {
    "gpg": "gpg.py:gpg",
    "scale_rl": "scale_rl.py:scale_rl",
    "grpo_passk": "passk.py:grpo_passk",
    "dr_grpo_passk": "passk.py:dr_grpo_passk",
}
"""By the name it had: the file of the example, and the function in it."""

PRESETS_MOVED = {"scalerl": "scale_rl.yaml"}
"""By the name it had: the file with its settings."""

FOLDER = "examples/algorithms"
CLONE = Path(__file__).resolve().parents[3]
"""Where `FOLDER` is in a clone; the installed package has no examples."""


def check_not_moved(name: str) -> None:
    """Raises ValueError: the advantage is an example now, which the error names."""
    if name in ADVANTAGES_MOVED:
        raise ValueError(f"{name} is not built in any more, but an example: {_copy(name)}")


def check_preset_not_moved(name: str) -> None:
    """Raises ValueError: the preset is an example now, which the error names."""
    if name in PRESETS_MOVED:
        raise ValueError(
            f"preset {name} is not built in any more, but an example: take trainer.algorithm of "
            f"{FOLDER}/{PRESETS_MOVED[name]} in place of the preset, and {_copy('scale_rl')}"
        )


def _copy(name: str) -> str:
    function = ADVANTAGES_MOVED[name]
    file = function.partition(":")[0]
    return (
        f"copy {FOLDER}/{file} of Tidemill's repository beside the config, and set "
        f"trainer.algorithm.advantage: {function}"
    )


def with_examples(recorded: dict[str, Any]) -> dict[str, Any]:
    """The recorded config of a run, with the examples in place of names that were built in at its time.

    `advantage: gpg` becomes `/path/of/the/clone/examples/algorithms/gpg.py:gpg`. Without a clone it is
    `examples/algorithms/gpg.py:gpg`. The run can be read without the file; a replay needs it, in the working
    directory.
    """
    trainer = recorded.get("trainer")
    algorithm = trainer.get("algorithm") if isinstance(trainer, dict) else None
    if not isinstance(trainer, dict) or not isinstance(algorithm, dict):
        return recorded
    changes: dict[str, Any] = {}
    # Its settings are all there beside it: a recorded config is complete.
    if str(algorithm.get("preset")) in PRESETS_MOVED:
        changes["preset"] = None
    function = ADVANTAGES_MOVED.get(str(algorithm.get("advantage")))
    if function is not None:
        folder = CLONE / FOLDER
        changes["advantage"] = f"{folder if folder.is_dir() else FOLDER}/{function}"
    return {**recorded, "trainer": {**trainer, "algorithm": {**algorithm, **changes}}}
