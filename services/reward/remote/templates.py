"""Jinja templates of what judges and teachers read about a sample."""

from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidemill.common.errors import ConfigError
from tidemill.services.reward.outcome import AttemptError, describe
from tidemill.services.reward.sample import RewardSample


class SampleTemplate:
    """The template in the field `where` of the config. Raises ConfigError: it is invalid."""

    def __init__(self, source: str, where: str) -> None:
        self._where = where
        try:
            environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
            self._template = environment.from_string(source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ConfigError(
                f"{where} is no Jinja template: {error}{f' (line {line})' if line else ''}"
            ) from None

    def render(self, sample: RewardSample, nonce: str = "") -> str:
        """The text about one sample. `nonce` is a word that no completion can know.

        Raises:
            AttemptError: the template asks for something that the sample does not have.
        """
        fields: dict[str, Any] = {
            "prompt": sample.prompt,
            "messages": sample.chat,
            "prompt_text": sample.trajectory.prompt_text,
            "completion": sample.trajectory.text,
            "thought": sample.trajectory.thought or "",
            "conversation": sample.conversation,
            "ground_truth": sample.trajectory.ground_truth,
            "extra": sample.trajectory.extra,
            "data_source": sample.trajectory.data_source,
            "nonce": nonce,
        }
        try:
            return self._template.render(fields)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise AttemptError(
                f"{self._where} cannot be filled in: {describe(error)}; it sees {', '.join(fields)}",
                is_final=True,
                kind="template",
            ) from error
