"""The `data` section: what is trained on, in which proportions, and which prompts come up again."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PrivateAttr, Tag

from tidemill.common.config.section import PathText, Rules, Section

SOURCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


Columns = dict[
    Literal["prompt", "ground_truth", "data_source", "extra_info"], Annotated[str, Field(min_length=1)]
]


class SourceConfig(Section):
    """One of several training sets."""

    name: str = Field(pattern=SOURCE_NAME)
    """Its name in metrics and records, and in `sources` of rewards."""
    path: PathText | list[PathText]
    """File or files, as `data.train` takes them."""
    weight: float = Field(1.0, gt=0.0, le=1e6)
    """Its share of the groups is this, divided by the sum over all sources."""
    epochs: int | None = Field(None, ge=1, le=1_000_000)
    """Most passes: after so many times its rows in groups, the others share its place. Null has no end."""
    columns: Columns = Field(default_factory=dict)
    """As `data.columns`, which the empty mapping takes."""
    data_source: str = ""
    """The `data_source` of rows that have none; empty takes the source's name."""
    environment: str = ""
    """The `environment` of rows that have no such column: one of those that `rollout.environment.use` offers
    by name (a dict of TRL's classes)."""
    group_size: int | None = Field(None, ge=1, le=4096)
    """Completions of each of its groups; null takes `trainer.group_size`."""
    sampling: dict[Literal["max_tokens", "top_p", "top_k", "min_p"], float] = Field(default_factory=dict)
    """What is sampled otherwise than `rollout.sampling` says; `max_tokens` is at most the one there. There is
    no temperature: the trainer divides the logits of all samples by the same."""


class CurriculumConfig(Section):
    """Chooses prompts by how often they were solved: half the rate until now, half that of the last group.
    `trainer.algorithm.success_threshold` says what solves a prompt. Steps that are committed decide, and
    nothing else."""

    easy: float = Field(0.9, gt=0.0, le=1.0)
    """A prompt solved at least so often is left out (ScaleRL, arXiv 2510.13786)."""
    hard: float = Field(0.0, ge=0.0, lt=1.0)
    """A prompt solved at most so often is left out."""
    revisit: int = Field(10, ge=1, le=1_000_000)
    """A prompt that is left out comes up again after so many epochs of its source."""
    focus: float = Field(0.25, ge=0.0, le=0.9)
    """Share of the groups that goes to prompts between `hard` and `easy` again, ahead of their turn."""

    def rules(self) -> Rules:
        yield (
            self.hard >= self.easy,
            f"hard ({self.hard}) must be below easy ({self.easy}): prompts between them are kept",
        )


FILE, FILES, SOURCES = "<file>", "<files>", "<sources>"
"""What `data.train` can be."""


def _kind_of_train(given: Any) -> str:
    if not isinstance(given, list | tuple):
        return FILE
    return SOURCES if any(isinstance(item, dict | SourceConfig) for item in given) else FILES


Train = Annotated[
    Annotated[PathText, Tag(FILE)]
    | Annotated[list[PathText], Tag(FILES)]
    | Annotated[list[SourceConfig], Tag(SOURCES)],
    Discriminator(_kind_of_train),
]


class DataConfig(Section):
    """Datasets are JSONL, JSON, CSV or Parquet files, or sets of the Hugging Face hub (`hub:OWNER/NAME`), in
    verl's columns or under the names that docs/data.md lists."""

    train: Train
    """File or files with the training prompts (`data/*.parquet` is a pattern), rows that Python code has
    (`my_env.py:MyEnv.rows`), or a list of sources (docs/data.md)."""
    eval: dict[str, PathText] = Field(default_factory=dict)
    """Evaluation sets by name; each is scored by the rewards of the run whose `lanes` hold `eval`."""
    columns: Columns = Field(default_factory=dict)
    """Own names of columns for `prompt`, `ground_truth`, `data_source` and `extra_info`, such as
    `{prompt: instruction, ground_truth: meta.label}`; `meta.label` is `label` inside of `meta`. Without, a
    prompt (text, or a list of chat messages) is `prompt`, `messages`, `question` or `problem`."""
    system_prompt: str = ""
    """Put before the prompt where the tokenizer has a chat template."""
    prompt_suffix: str = ""
    """Appended to every prompt text, for instance the request for an answer format."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies the tokenizer's chat template where it has one."""
    max_prompt_tokens: int = Field(1024, ge=1, le=1 << 20)
    """A longer prompt is an error that names its row; see `overlong_prompts`."""
    overlong_prompts: Literal["error", "drop", "left", "right", "middle"] = "error"
    """`drop` leaves out prompts above the limit; `left`, `right` and `middle` cut tokens off there, with the
    chat template in place. How many is logged."""
    max_rows: int | None = Field(None, ge=1)
    """Take only the first rows of the training set, or of each source; null takes all. Overlong prompts count
    among them."""
    shuffle: bool = True
    """Visit the rows in a new seeded order each epoch."""
    stream: bool = False
    """Keep rows on the disk, and read each when its ticket is issued: for sets that do not fit into memory.
    Parquet then needs the package datasets (`pip install 'tidemill[datasets]'`)."""
    curriculum: CurriculumConfig | None = None
    """Choose prompts by how often they were solved; null visits all alike, `{}` takes the defaults."""

    _needs_truth: bool = PrivateAttr(True)

    @property
    def needs_truth(self) -> bool:
        """Whether a reward of the run may look at a row's truth: not where the environment alone rewards."""
        return self._needs_truth

    def without_truth(self) -> None:
        """Rows need none. Called once, by the config that this is a section of."""
        self._needs_truth = False

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The sources that `train` lists; empty where it names files."""
        if isinstance(self.train, str):
            return ()
        return tuple(item for item in self.train if isinstance(item, SourceConfig))

    @property
    def train_files(self) -> str | list[str]:
        """The files that `train` names, where it lists no sources."""
        if isinstance(self.train, str):
            return self.train
        return [item for item in self.train if isinstance(item, str)]

    def of_source(self, source: SourceConfig) -> "DataConfig":
        """The section as it is for one source, which has files and may have columns of its own."""
        return self.model_copy(update={"train": source.path, "columns": source.columns or self.columns})

    def rules(self) -> Rules:
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        yield twice, f"two sources are called {''.join(twice[:1])!r}; give each a name of its own"
