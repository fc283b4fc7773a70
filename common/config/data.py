"""The `data` section: what is trained on. Several sets, and a curriculum, are in `sources.py`."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, PrivateAttr, Tag

from tidemill.common.config.section import PathText, Rules, Section, later

Columns = dict[
    Literal["prompt", "ground_truth", "data_source", "extra_info", "completion", "images"],
    Annotated[str, Field(min_length=1)],
]

if TYPE_CHECKING:
    from tidemill.common.config.sources import CurriculumConfig, SourceConfig
else:
    CurriculumConfig = later("sources:CurriculumConfig")
    SourceConfig = later("sources:SourceConfig")

FILE = "<file>"
FILES = "<files>"
SOURCES = "<sources>"
"""Tags of the forms that `data.train` can have."""


def _kind_of_train(train: Any) -> str:
    if not isinstance(train, list | tuple):
        return FILE
    return SOURCES if any(isinstance(item, dict | Section) for item in train) else FILES


Train = Annotated[
    Annotated[PathText, Tag(FILE)]
    | Annotated[list[PathText], Tag(FILES)]
    | Annotated[list[SourceConfig], Tag(SOURCES)],
    Discriminator(_kind_of_train),
]


class DataConfig(Section):
    """Datasets; docs/data.md has formats and columns."""

    train: Train
    """File, files or pattern, `hub:OWNER/NAME`, Python rows (`my_env.py:MyEnv.rows`), or a list of
    sources."""
    eval: dict[str, PathText] = Field(default_factory=dict)
    """Evaluation sets by name, scored by the rewards whose `lanes` hold `eval`."""
    columns: Columns = Field(default_factory=dict)
    """Names of your columns, such as `{prompt: instruction, ground_truth: meta.label}`."""
    system_prompt: str = ""
    """Put before the prompt where there is a chat template."""
    prompt_suffix: str = ""
    """Appended to every prompt text."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies the tokenizer's template where it has one."""
    max_prompt_tokens: int = Field(1024, ge=1, le=1 << 20)
    """Longest prompt; see `overlong_prompts`."""
    overlong_prompts: Literal["error", "drop", "left", "right", "middle"] = "error"
    """Treatment of longer prompts: refuse the data, leave them out, or cut at that place."""
    max_rows: int | None = Field(None, ge=1)
    """Number of rows to use, from the beginning of the training set or of each source."""
    shuffle: bool = True
    """New seeded order in each epoch."""
    stream: bool = False
    """Read rows from disk when they are needed; Parquet then needs `pip install 'tidemill[datasets]'`."""
    curriculum: CurriculumConfig | None = None
    """Choose prompts by how often they were solved; `{}` takes the defaults."""

    _needs_truth: bool = PrivateAttr(True)
    _has_images: bool = PrivateAttr(False)

    @property
    def needs_truth(self) -> bool:
        """Whether a reward of the run may need a row's ground truth: not if only the environment rewards."""
        return self._needs_truth

    def without_truth(self) -> None:
        """Note that rows need no ground truth. Called once, by the `RunConfig`."""
        self._needs_truth = False

    @property
    def has_images(self) -> bool:
        """Whether rows may have pictures: where the run has the section `images`."""
        return self._has_images

    def with_images(self) -> None:
        """Note that rows may have pictures. Called once, by the `RunConfig`."""
        self._has_images = True

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The sources that `train` lists; empty where it names files."""
        if isinstance(self.train, str):
            return ()
        return tuple(item for item in self.train if not isinstance(item, str))

    @property
    def prompt_sources(self) -> tuple[SourceConfig, ...]:
        """The sources whose completions are sampled."""
        return tuple(source for source in self.sources if not source.is_imitated)

    @property
    def demonstrations(self) -> tuple[SourceConfig, ...]:
        """The sources whose rows are trained on as they are."""
        return tuple(source for source in self.sources if source.is_imitated)

    @property
    def train_files(self) -> str | list[str]:
        """The files that `train` names, where it lists no sources."""
        if isinstance(self.train, str):
            return self.train
        return [item for item in self.train if isinstance(item, str)]

    def of_source(self, source: SourceConfig) -> "DataConfig":
        """This section with the files of one source, and its columns if it has any."""
        return self.model_copy(update={"train": source.path, "columns": source.columns or self.columns})

    def rules(self) -> Rules:
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            yield f"two sources are called {''.join(twice[:1])!r}; give each a name of its own"
