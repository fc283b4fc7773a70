"""Names that were built in and are users' functions now, in `examples/algorithms`."""

ADVANTAGES_MOVED = {
    "gpg": "gpg.py:gpg",
    "scale_rl": "scale_rl.py:scale_rl",
    "grpo_passk": "passk.py:grpo_passk",
    "dr_grpo_passk": "passk.py:dr_grpo_passk",
}
"""By the name it had: the file of the example, and the function in it."""

PRESETS_MOVED = {"scalerl": "scale_rl.yaml"}
"""By the name it had: the file with its settings."""


def advantage_error(name: str) -> str:
    """Why `advantage: name` is refused, and the setting that loads the example."""
    function = ADVANTAGES_MOVED[name]
    file = function.partition(":")[0]
    return (
        f"{name} is a function in examples/algorithms/{file} now: copy that file beside the config and set "
        f"trainer.algorithm.advantage: {function}"
    )


def preset_error(name: str) -> str:
    """Why `preset: name` is refused, and what has its settings."""
    return (
        f"preset {name} is examples/algorithms/{PRESETS_MOVED[name]} now: copy that section into the config "
        f"in place of the preset, and {advantage_error('scale_rl').partition(': ')[2]}"
    )
