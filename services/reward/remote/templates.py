"""Jinja templates of what judges and teachers read about a sample."""

from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidemill.common.errors import ConfigError
from tidemill.services.reward.outcome import AttemptError, describe
from tidemill.services.reward.sample import RewardSample


def compiled(source: str, where: str) -> Template:
    """The template in the field `where`. Raises ConfigError: it is none."""
    try:
        return ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True).from_string(source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"{where} is no Jinja template: {error}{f' (line {line})' if line else ''}"
        ) from None


def rendered(template: Template, sample: RewardSample, whose: str, nonce: str = "") -> str:
    """The text about one sample; `whose` begins an error.

    Raises:
        AttemptError: the template asks for something that the sample does not have.
    """
    fields: dict[str, Any] = {
        "prompt": sample.prompt,
        "messages": sample.chat,
        "prompt_text": sample.prompt_text,
        "completion": sample.solution_str,
        "conversation": sample.conversation,
        "ground_truth": sample.ground_truth,
        "extra": sample.extra_info,
        "data_source": sample.data_source,
        "nonce": nonce,
    }
    try:
        return template.render(fields)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise AttemptError(
            f"{whose} template cannot be filled in: {describe(error)}; it sees {', '.join(fields)}",
            is_final=True,
            kind="template",
        ) from error
