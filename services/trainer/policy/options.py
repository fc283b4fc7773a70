"""What a policy may have beside its model: each is a file, imported where a run's config asks for it.

The core of the policy never imports these files, which an import contract checks: it gets their classes and
functions from `load_option`.
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
    # An advantage with values, which come from the policy's hidden states.
    "value_head": "side_models:ValueHead",
    # The same with `value.model: own`: values come from a model of their own.
    "critic": "side_models:Critic",
    # `trainer.algorithm.router`, or `rollout.record_routes` for a mixture of experts.
    "routers": "routers:Routers",
}
"""By name: the file beside this one, and what is in it."""


def load_option(name: str) -> Any:
    """The class or function of an option; its file is imported now."""
    file, _, attribute = OPTIONS[name].partition(":")
    return getattr(importlib.import_module(f"{__package__}.{file}"), attribute)
