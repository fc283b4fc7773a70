"""Published algorithms as values for the fields of `trainer.algorithm`.

A preset fills what a config leaves open; what the config says wins. None of them adds a KL penalty: it needs
a reference model, which costs memory, and most recipes for verifiable rewards leave it out.
"""

from typing import Any, Literal

Preset = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "ppo"]

PRESETS: dict[Preset, dict[str, Any]] = {
    # arXiv 2402.03300
    "grpo": {
        "advantage": "grpo",
        "loss": "ppo",
        "normalisation": "sequence",
        "clip_high": 0.2,
        "old_logprobs": "recompute",
    },
    # arXiv 2503.20783
    "dr_grpo": {
        "advantage": "dr_grpo",
        "loss": "ppo",
        "normalisation": "constant",
        "clip_high": 0.2,
        "old_logprobs": "recompute",
    },
    # arXiv 2503.14476
    "dapo": {
        "advantage": "grpo",
        "loss": "ppo",
        "normalisation": "token",
        "clip_high": 0.28,
        "old_logprobs": "recompute",
        "filter_zero_variance": True,
        "overlong": {"penalty": 1.0, "buffer_share": 0.2},
    },
    # arXiv 2507.18071, section 5.1
    "gspo": {
        "advantage": "grpo",
        "loss": "gspo",
        "normalisation": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "old_logprobs": "rollout",
    },
    # arXiv 2506.13585: no lower bound; the upper one as in arXiv 2510.13786
    "cispo": {
        "advantage": "grpo",
        "loss": "cispo",
        "normalisation": "token",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "old_logprobs": "rollout",
    },
    # arXiv 2402.14740
    "rloo": {
        "advantage": "rloo",
        "loss": "reinforce",
        "normalisation": "constant",
        "old_logprobs": "recompute",
    },
    # arXiv 2501.03262
    "reinforce_plus_plus": {
        "advantage": "reinforce_plus_plus",
        "loss": "ppo",
        "normalisation": "token",
        "clip_high": 0.2,
        "old_logprobs": "recompute",
    },
    # arXiv 1707.06347, with the token as the action
    "ppo": {
        "advantage": "gae",
        "loss": "ppo",
        "normalisation": "token",
        "clip_high": 0.2,
        "old_logprobs": "recompute",
        "gae_lambda": 0.95,
        "value": {"head": True},
    },
}


def with_preset(given: dict[str, Any]) -> dict[str, Any]:
    """The section's fields with those of its preset filled in, also within sections of it."""
    values = next((values for name, values in PRESETS.items() if name == given.get("preset")), {})
    filled = values | given
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(given.get(name), dict):
            filled[name] = value | given[name]
    return filled
