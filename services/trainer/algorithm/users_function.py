"""Functions of the user's own: `path/to/file.py:name` or `package.module:name`, loaded and called.

Whatever such code raises becomes a ConfigError that names it (`contained`). A mistake is found when the
trainer starts, by a call with made-up numbers, and not after the first hour of rollouts.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from tidemill.common.errors import ConfigError
from tidemill.common.process.users_code import load_users, raised_at


@contextmanager
def contained(field: str) -> Iterator[None]:
    """Turn whatever the block raises into a ConfigError about `field`."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"{type(error).__name__}: {str(error)[:500]}"
        raise ConfigError(f"{field}: {problem} ({raised_at(error)})") from error


def load_users_function(
    field: str, reference: str, offered: Collection[str]
) -> tuple[Callable[..., Any], frozenset[str]]:
    """The function that `reference` names, and which of the arguments `offered` it takes. It is called by
    keyword, with any of the offered arguments: those that it does not take are left out of the call.

    Example: of the offered "logprobs", "advantages" and "mask", `loss(logprobs, mask)` takes two. `field` is
    the config's field, for messages.

    Raises:
        ConfigError: it does not exist, cannot be imported, or takes other arguments.
    """
    function = load_users(field, reference, "function")
    label = f"{field} {reference}"
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{label} is no function, but {type(function).__name__}")
    names = _arguments(label, function, offered)

    def call(**arguments: Any) -> Any:
        with contained(label):
            return function(**{key: value for key, value in arguments.items() if key in names})

    return call, names


def _arguments(label: str, function: Callable[..., Any], offered: Collection[str]) -> frozenset[str]:
    """Names among `offered` that the function takes. It must take the first of them, and must not require any
    other name."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return frozenset(offered)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [p.name for p in parameters if p.name not in offered and p.default is p.empty]
    first_offered = next(iter(offered))
    if unknown or first_offered not in names:
        raise ConfigError(
            f"{label} takes ({', '.join(p.name for p in parameters)}); expected arguments among "
            f"({', '.join(offered)}), the first of them always. They are passed by keyword, so the "
            "names matter"
        )
    return frozenset(names & set(offered))
