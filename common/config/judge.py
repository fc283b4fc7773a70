"""A language model as a judge: `reward.rewards.<name>.judge`."""

import math
import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from common.config.remote import RemoteConfig
from common.config.section import Section

SCORE = "score"
"""Name of the group in a verdict's regular expression, and of what a verdict is called in errors."""


class VerdictConfig(Section):
    """How the judge's words become a number. Words without one are a failed attempt, never 0.

    First `regex` or `json_field` finds the verdict in the words; without either, all of them are. Then
    `choices` gives its value, or it is a number. `function` does all of this itself.
    """

    regex: str = ""
    """Finds the verdict, by its last match that is no quotation: the group `score`, else the first group,
    else all of it. `{nonce}` is the word that the template shows as `{{ nonce }}`: no completion knows it."""
    json_field: str = ""
    """The last JSON object in the words with this field has the verdict; `a.b` is the field `b` of `a`."""
    choices: dict[str, float] = Field(default_factory=dict, max_length=256)
    """Words and their values, such as {A: 1, B: 0}."""
    range: tuple[float, float] | None = None
    """Lowest and highest number that is a verdict; any other is none."""
    to_unit: bool = False
    """Map `range` onto 0 to 1."""
    function: str = ""
    """`path.py:name` of a function from the judge's words to a number, or a dict with `score`."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.function and (self.regex or self.json_field or self.choices):
            raise ValueError(
                "function reads the words itself: give no regex, json_field or choices beside it"
            )
        if self.regex and self.json_field:
            raise ValueError("give regex or json_field, not both")
        if self.to_unit and self.range is None:
            raise ValueError("to_unit needs a range")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"range must be [lowest, highest], got {list(self.range)}")
        return self

    @field_validator("regex")
    @classmethod
    def _is_a_regex(cls, regex: str) -> str:
        try:
            re.compile(regex)
        except re.error as error:
            raise ValueError(f"{regex!r} is no regular expression: {error}") from None
        return regex

    @field_validator("choices")
    @classmethod
    def _values_are_finite(cls, choices: dict[str, float]) -> dict[str, float]:
        if any(not math.isfinite(value) or not label.strip() for label, value in choices.items()):
            raise ValueError("each of the choices needs a word and a finite value")
        return choices


class JudgeConfig(RemoteConfig):
    """A judge behind servers that speak the OpenAI API: hosted ones, or vLLM's of your own."""

    model: str = ""
    """Name of the model in requests; empty takes that of `local_replicas`."""
    api: Literal["chat", "completions"] = "chat"
    """`chat` sends the template's text as the user's message, `completions` as it is."""
    template: str = ""
    """Jinja template of what the judge reads: from prompt and messages (the row's own), prompt_text (what
    the policy read), completion, ground_truth, extra, data_source, and nonce, a word that is another one in
    every request."""
    template_file: str = ""
    """Or a file with it, relative to the config; its text is taken when the config is read."""
    system: str = ""
    """Jinja template of the system message of `chat`; empty sends none."""
    temperature: float = Field(0.0, ge=0.0, le=100.0)
    """Of the judge's sampling."""
    max_tokens: int = Field(512, ge=1, le=1_000_000)
    """Most tokens of an answer."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, such as {seed: 0} or vLLM's own."""
    verdict: VerdictConfig = VerdictConfig()
    """From the judge's words to a number."""
    router_only: bool = False
    """Score nothing: the servers are there for functions that name this reward as their `router`."""

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        return self.model or (self.local_replicas.model if self.local_replicas else "")

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if not self.template and not self.router_only:
            raise ValueError("a judge needs a template, or a template_file with one")
        if not self.model_name and not self.router_only:
            raise ValueError("a judge needs the name of its model, or local_replicas with one")
        if self.system and self.api != "chat":
            raise ValueError("system belongs to api: chat; put it into the template")
        return self
