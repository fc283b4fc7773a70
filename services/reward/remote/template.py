"""What a judge reads: a Jinja template over the sample.

The environment is sandboxed: a template formats text and does nothing else. A name that does not exist is an
error and not an empty place, so that no judge grades half a question.
"""

from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.config.judge import JudgeConfig
from common.errors import ConfigError
from services.reward.outcome import AttemptError, describe
from services.reward.sample import Sample

Message = dict[str, str]


class JudgePrompt:
    """The templates of one judge."""

    def __init__(self, name: str, config: JudgeConfig) -> None:
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
        self._user = _compiled(environment, config.template, f"reward.rewards.{name}.judge.template")
        self._system = (
            _compiled(environment, config.system, f"reward.rewards.{name}.judge.system")
            if config.system
            else None
        )

    def text(self, sample: Sample, nonce: str = "") -> str:
        """What the judge reads about a sample. `nonce` is a word that no completion can know.

        Raises:
            AttemptError: the template asks for something that the sample does not have.
        """
        return _rendered(self._user, sample, nonce)

    def messages(self, sample: Sample, nonce: str = "") -> list[Message]:
        """The same as a chat."""
        if self._system is None:
            return [{"role": "user", "content": self.text(sample, nonce)}]
        system = {"role": "system", "content": _rendered(self._system, sample, nonce)}
        return [system, {"role": "user", "content": self.text(sample, nonce)}]


def _compiled(environment: ImmutableSandboxedEnvironment, source: str, where: str) -> Template:
    try:
        return environment.from_string(source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"{where} is no Jinja template: {error}{f' (line {line})' if line else ''}"
        ) from None


def _rendered(template: Template, sample: Sample, nonce: str) -> str:
    fields: dict[str, Any] = {
        "prompt": sample.prompt,
        "messages": sample.chat,
        "prompt_text": sample.prompt_text,
        "completion": sample.solution_str,
        "ground_truth": sample.ground_truth,
        "extra": sample.extra_info,
        "data_source": sample.data_source,
        "nonce": nonce,
    }
    try:
        return template.render(fields)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise AttemptError(
            f"the judge's template cannot be filled in: {describe(error)}; it sees {', '.join(fields)}",
            is_final=True,
            kind="template",
        ) from error
