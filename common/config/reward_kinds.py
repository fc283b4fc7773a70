"""Kinds of rewards: judges, reward models, and code that is run."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from tidemill.common.config.section import PathText, Range, Rules, Section, Template

Label = Annotated[str, StringConstraints(pattern=r"\S")]
SCORE = "score"
"""Name of the group in a verdict's regular expression, and of the verdict in errors."""


class VerdictConfig(Section):
    """How the answer becomes a number. Answers without one are failed attempts, never 0."""

    regex: str = ""
    """Its last match that is no quotation: the group `score`, else the first, else all of it. `{nonce}` is
    the template's `{{ nonce }}`."""
    json_field: str = ""
    """Field of the last JSON object that has it; `a.b` is the field `b` of `a`."""
    choices: dict[Label, float] = Field(default_factory=dict, max_length=256)
    """Words and their values, such as {A: 1, B: 0}."""
    range: Range | None = None
    """Lowest and highest valid number."""
    to_unit: bool = False
    """Map `range` onto 0 to 1."""
    function: PathText = ""
    """`path.py:name` of a function from the answer to a number, or a dict with `score`."""

    def rules(self) -> Rules:
        if self.function and (self.regex or self.json_field or self.choices):
            yield "function reads the words itself: give no regex, json_field or choices beside it"
        if self.regex and self.json_field:
            yield "give regex or json_field, not both"
        if self.to_unit and self.range is None:
            yield "to_unit needs a range"

    @field_validator("regex")
    @classmethod
    def _is_a_regex(cls, regex: str) -> str:
        try:
            re.compile(regex)
        except re.error as error:
            raise ValueError(f"{regex!r} is no regular expression: {error}") from None
        return regex


class AskingConfig(Section):
    """Base of rewards that ask servers."""

    servers: str = Field(min_length=1)
    """Name of its servers in the section `servers`."""


class JudgeConfig(AskingConfig):
    """A judge behind servers that speak the OpenAI API."""

    api: Literal["chat", "completions"] = "chat"
    """`chat` sends the template as the user's message, `completions` as it is."""
    template: Template = Field(min_length=1)
    """Jinja template, or a file with it, of what the judge reads; docs/models.md has its names."""
    system: str = ""
    """Jinja template of the system message of `chat`; empty sends none."""
    temperature: float = Field(0.0, ge=0.0, le=100.0)
    """Sampling temperature."""
    max_tokens: int = Field(512, ge=1, le=1_000_000)
    """Most tokens of an answer."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of requests, such as {seed: 0} or vLLM's own."""
    verdict: VerdictConfig = VerdictConfig()
    """How the judge's answer becomes a number."""


class RewardModelConfig(AskingConfig):
    """A classifier that scores sequences or tokens, behind vLLM's pooling API or this project's server."""

    head: Literal["sequence", "token"] = "sequence"
    """One score for the whole sequence (/classify), or one for every token (/pooling)."""
    input: Literal["ids", "chat", "text"] = "chat"
    """The policy's token ids (only with the policy's tokenizer), the conversation in the model's chat
    template, or text."""
    label: int = Field(0, ge=0, le=65535)
    """Which of several labels is the reward."""
    token_reward: Literal["last", "mean", "min", "sum", "all_mean"] = "last"
    """How scores of the completion's tokens become one; `all_mean` counts the prompt's too. Without
    `input: ids`: `last` or `all_mean`."""
    keep_token_rewards: bool = False
    """Keep all scores in the detail."""
    normalise: Literal["none", "sigmoid", "standardise"] = "none"
    """`sigmoid` maps to 0 to 1; `standardise` subtracts `mean` and divides by `std`."""
    mean: float = Field(0.0, ge=-1e9, le=1e9)
    """With `standardise`: mean of the raw scores on your data."""
    std: float = Field(1.0, gt=0.0, le=1e9)
    """With `standardise`: their standard deviation."""
    clip: Range | None = None
    """Lowest and highest value after normalisation."""
    max_tokens: int = Field(0, ge=0, le=1 << 20)
    """Longer inputs lose their beginning; 0 refuses inputs that are too long."""

    def rules(self) -> Rules:
        if self.head == "token" and self.input != "ids" and self.token_reward not in ("last", "all_mean"):
            yield (
                f"token_reward: {self.token_reward} needs input: ids, because only then is it known which "
                "tokens are the completion's; or take last or all_mean"
            )


class TeacherConfig(AskingConfig):
    """A language model with the policy's tokenizer. It gives the logprob of every sampled token;
    `trainer.algorithm.teacher` says what is made of them."""

    prompt_column: str = ""
    """Column with the teacher's own prompt (self-distillation, arXiv 2601.19897)."""
    template: Template = ""
    """Or a Jinja template of that prompt, like a judge's."""
    chat: bool = False
    """Put it into the teacher's chat template, as the user's message."""

    @property
    def has_own_prompt(self) -> bool:
        """Whether it reads another prompt than the policy did."""
        return bool(self.prompt_column or self.template)

    def rules(self) -> Rules:
        if self.prompt_column and self.template:
            yield "give prompt_column or template, not both: each is the prompt of the teacher"


TEST_COLUMNS = (
    "fn_name", "func_name", "function_name", "entry_point", "metadata", "import_prefix", "test_imports",
    "test_setup_code", "setup_code", "checker", "generated_checker", "special_judge", "interaction_format",
    "interactor",
)  # fmt: skip
"""Columns of a row that say how the tests in its ground truth are meant."""


class SandboxConfig(Section):
    """Runs Python code of a completion against tests, in a jail.

    The ground truth has the tests in one of their published forms, as a map, a list or text; the sandbox's
    README has a table of them. What it lacks may stand in columns, such as `entry_point`. A form that is not
    known, and tests that check nothing, are failures and never scores.
    """

    workers: int = Field(1, ge=0, le=1024)
    """RQ workers that `tidemill up` starts; each runs one completion at a time."""
    score: Literal["all", "fraction"] = "all"
    """1 only if all tests pass, or the share that pass."""
    max_cases: int = Field(64, ge=1, le=10_000)
    """Only the first so many tests count."""
    time_s: float = Field(6.0, gt=0.0, le=3600.0)
    """Longest test; its processes have as much CPU time each."""
    total_s: float = Field(30.0, gt=0.0, le=3600.0)
    """Longest time for all tests of a completion."""
    memory_mb: int = Field(512, ge=32, le=1 << 20)
    """Memory of one test, its child processes included."""
    file_mb: int = Field(16, ge=1, le=1 << 16)
    """Largest file, and all files together."""
    packages: bool = False
    """Let the code import installed packages, such as numpy."""
