"""The body of a model and its layers, as transformers names them."""

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel


def body_of(model: PreTrainedModel) -> nn.Module:
    """The model below its output head; the model itself where it names no such part. Llama 4 names one that
    it does not have, and calls it `model` as others do."""
    body: nn.Module = model.base_model
    return getattr(model, "model", model) if body is model else body


def language_model_of(model: PreTrainedModel) -> nn.Module | None:
    """The part of a model with several parts that reads text; None where it is all of the model."""
    language_model: nn.Module | None = getattr(body_of(model), "language_model", None)
    return language_model


def tower_of(model: PreTrainedModel) -> list[nn.Module]:
    """What turns pictures into features: the tower and the projector behind it; empty where there is none."""
    language_model = language_model_of(model)
    if language_model is None:
        return []
    return [child for child in body_of(model).children() if child is not language_model]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that transformers keeps in one piece, and that are in no other such block; ranks gather them
    one after the other."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return outermost(model, lambda module: type(module).__name__ in names)


def outermost(module: nn.Module, is_meant: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The modules in it for which `is_meant` holds and that are in no other such module, in their order."""
    if is_meant(module):
        return [module]
    return [block for child in module.children() for block in outermost(child, is_meant)]
