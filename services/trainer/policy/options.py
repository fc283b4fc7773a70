"""What a policy may have beside its model: each is a file, imported where a run's config asks for it.

The core of the policy imports none of these files (an import contract holds it to that); it asks the objects
that are made here.
"""

import importlib
from typing import Any

OPTIONS = {
    # `trainer.lora`: low-rank adapters are trained in place of the weights.
    "adapters": "adapters:Adapters",
    # `trainer.compile`.
    "compiler": "compiling:compile_model",
    # `trainer.algorithm.reference.model`.
    "reference": "side_models:ReferenceModel",
    # An advantage with values: on the policy's hidden states, or with `value.model: own` on a critic.
    "value_head": "side_models:ValueHead",
    "critic": "side_models:Critic",
    # `trainer.algorithm.router`, or `rollout.record_routes` for a mixture of experts.
    "routers": "routers:Routers",
}
"""By name: the file beside this one, and what is in it."""


def load_option(name: str) -> Any:
    """The class or function of an option; its file is imported now."""
    file, _, attribute = OPTIONS[name].partition(":")
    return getattr(importlib.import_module(f"{__package__}.{file}"), attribute)
