"""Built-in rewards, with the same signature as users' functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidemill.services.reward.builtin import exact_match, gsm8k, math_equivalence


@dataclass(frozen=True, slots=True)
class Builtin:
    """A built-in reward. `is_cheap`: microseconds, safe on the event loop. `needs`: optional modules.
    `warm_up`: what its process does before the first call, so that this costs no call its time."""

    function: Callable[..., Any]
    is_cheap: bool = False
    needs: tuple[str, ...] = ()
    warm_up: Callable[[], None] = lambda: None


BUILTINS = {
    "gsm8k": Builtin(gsm8k.compute_score, is_cheap=True),
    "math": Builtin(math_equivalence.compute_score, needs=("math_verify",), warm_up=math_equivalence.warm_up),
    "exact_match": Builtin(exact_match.compute_score, is_cheap=True),
}
