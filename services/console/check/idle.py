"""Settings that do nothing in a run, because of another setting: `tidemill check` warns of them.

A combination that would train something else than what was meant is refused where the section is defined.
What is here is harmless: it would only surprise.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tidemill.common.config.algorithm_table import LOSSES
from tidemill.common.config.environment import AGENT, TOOLS
from tidemill.common.config.run import RunConfig

IDLE: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    (
        "streams: claim_check_url",
        lambda s: s.claim_check_bytes,
        "claim_check_bytes is above 0, such as 65536",
    ),
    (
        "trainer.evaluation: top_p top_k min_p samples",
        lambda s: s.temperature,
        "temperature is above 0: at 0 every sample is the likeliest one",
    ),
    (
        "trainer: offload_optimizer algorithm.router",
        lambda s: s.policy != "simulated",
        "policy is transformers",
    ),
    ("trainer.algorithm: max_filter_rounds", lambda s: s.filter_zero_variance, "filter_zero_variance is on"),
    ("trainer.algorithm: kl_control.target", lambda s: s.kl.place != "off", "kl.place is loss or reward"),
    ("trainer.algorithm.rejection: denominator", lambda s: s.is_on, "there are bounds or a veto"),
    (
        "trainer.algorithm.value: detach",
        lambda s: s.model == "policy",
        "model is policy: a model of its own never reaches it",
    ),
    *(
        (
            f"trainer.algorithm: {options}",
            # As a default: a closure would see the loop's last value.
            lambda s, options=options: s.loss_traits.options == options,
            f"loss is {' or '.join(name for name, row in LOSSES.items() if row.options == options)}",
        )
        for options in sorted({row.options for row in LOSSES.values()} - {""})
    ),
    ("rollout.environment: tools", lambda s: s.use == TOOLS, "use is tools"),
    ("rollout.environment: agent", lambda s: s.use == AGENT, "use is agent"),
    ("reward.rewards.*.judge: system", lambda s: s.api == "chat", "api is chat"),
    ("reward.rewards.*.model: mean std", lambda s: s.normalise == "standardise", "normalise is standardise"),
    (
        "reward.rewards.*.teacher: chat",
        lambda s: s.has_own_prompt,
        "prompt_column or template gives the teacher a prompt of its own",
    ),
)
"""(section and fields in it, whether they are read with this section, what they need)"""


def idle_settings(config: RunConfig) -> Iterator[str]:
    """Settings that were changed and do nothing, each with what it needs."""
    for names, is_read, needs in IDLE:
        path, _, fields = names.partition(": ")
        for where, section in _sections(config, path.split(".")):
            for name in fields.split() if not is_read(section) else ():
                value, default = _value(section, name)
                if value != default:
                    yield f"{where}.{name} does nothing unless {where}.{needs}"


def _sections(root: Any, names: list[str], where: str = "") -> Iterator[tuple[str, Any]]:
    """The sections of a path, in which `*` stands for every name, as far as the run has them."""
    if root is None or not names:
        yield from [(where, root)] if root is not None else []
        return
    first, *rest = names
    inner = root if isinstance(root, Mapping) else {first: getattr(root, first)}
    for name, section in inner.items():
        yield from _sections(section, rest, f"{where}.{name}".lstrip("."))


def _value(section: Any, name: str) -> tuple[Any, Any]:
    """The value of a field, and its default."""
    first, _, rest = name.partition(".")
    default = type(section).model_fields[first].get_default(call_default_factory=True)
    value = getattr(section, first)
    return (value, default) if not rest else (getattr(value, rest), getattr(default, rest))
