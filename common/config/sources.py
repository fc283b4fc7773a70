"""Several training sets and demonstrations (`data.train`), and the prompts that come up again
(`data.curriculum`)."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tidemill.common.config.data import Columns
from tidemill.common.config.section import PathText, Rules, Section
from tidemill.common.wire.sampling import FILTERS

SOURCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"

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
