"""The `data` section: what is trained on, in which proportions, and which prompts come up again."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, PrivateAttr, Tag

from tidemill.common.config.section import PathText, Rules, Section
from tidemill.common.wire.sampling import FILTERS

SOURCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


Columns = dict[
    Literal["prompt", "ground_truth", "data_source", "extra_info", "completion", "images"],
    Annotated[str, Field(min_length=1)],
]

if TYPE_CHECKING:
    SamplingField = str
else:
    SamplingField = Literal[("max_tokens", *FILTERS)]


class SourceConfig(Section):
    """One of several training sets."""

    name: str = Field(pattern=SOURCE_NAME)
    """Its name in metrics and records, and in `sources` of rewards."""
    kind: Literal["prompts", "demonstrations"] = "prompts"
    """Prompts to sample completions for, or demonstrations, which are trained as they are."""
    path: PathText | list[PathText]
    """Like `data.train`; for demonstrations also folders of runs (`runs/NAME`)."""
    weight: float = Field(1.0, gt=0.0, le=1e6)
    """Its share of the groups, relative to other sources."""
    epochs: int | None = Field(None, ge=1, le=1_000_000)
    """Most passes over its rows; after them the other sources take its share."""
    columns: Columns = Field(default_factory=dict)
    """Like `data.columns`, which is the default."""
    data_source: str = ""
    """The `data_source` of rows that have none; empty: the source's name."""
    environment: str = ""
    """The `environment` of rows without one, where `rollout.environment.use` offers several."""
    group_size: int | None = Field(None, ge=1, le=4096)
    """Completions of a group; null takes `trainer.group_size`."""
    sampling: dict[SamplingField, float] = Field(default_factory=dict)
    """Fields of `rollout.sampling` that differ; not the temperature."""
    imitation: float = Field(1.0, gt=0.0, le=1e6)
    """For demonstrations: weight of each token in the loss."""
    min_reward: float | None = Field(None, ge=-1e6, le=1e6)
    """For folders of runs: least reward of an imitated completion."""

    @property
    def is_imitated(self) -> bool:
        return self.kind == "demonstrations"

    def rules(self) -> Rules:
        for name in ("group_size", "sampling", "environment"):
            if self.is_imitated and getattr(self, name):
                yield (
                    f"{name} of source {self.name!r} is of completions that are sampled, and demonstrations "
                    "are trained as they are; leave it out"
                )
        for name, default in (("imitation", 1.0), ("min_reward", None)):
            if not self.is_imitated and getattr(self, name) != default:
                yield f"{name} of source {self.name!r} needs kind: demonstrations"


class CurriculumConfig(Section):
    """Chooses prompts by how often they were solved in committed steps
    (`trainer.algorithm.success_threshold`)."""

    easy: float = Field(0.9, gt=0.0, le=1.0)
    """Prompts solved at least so often are left out (ScaleRL, arXiv 2510.13786)."""
    hard: float = Field(0.0, ge=0.0, lt=1.0)
    """Prompts solved at most so often are left out."""
    revisit: int = Field(10, ge=1, le=1_000_000)
    """Epochs after which a prompt that was left out is tried again."""
    focus: float = Field(0.25, ge=0.0, le=0.9)
    """Share of the groups for prompts between `hard` and `easy`, ahead of their order."""

    def rules(self) -> Rules:
        if self.hard >= self.easy:
            yield f"hard ({self.hard}) must be below easy ({self.easy}): prompts between them are kept"


FILE = "<file>"
FILES = "<files>"
SOURCES = "<sources>"
"""Tags of the forms that `data.train` can have."""


def _kind_of_train(train: Any) -> str:
    if not isinstance(train, list | tuple):
        return FILE
    return SOURCES if any(isinstance(item, dict | SourceConfig) for item in train) else FILES


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
        return tuple(item for item in self.train if isinstance(item, SourceConfig))

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
