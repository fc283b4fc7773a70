"""The section `trainer.lora`: train low-rank adapters and leave the model's own weights as they are."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from common.config.section import Section


class LoraConfig(Section):
    """LoRA adapters (arXiv 2106.09685) on the model's linear layers, through PEFT."""

    rank: int = Field(16, ge=1, le=4096)
    """Rank of each adapter."""
    alpha: float = Field(32.0, gt=0.0, le=1e6)
    """An adapter's output is multiplied by alpha / rank."""
    rank_stabilized: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732): for ranks above 64."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of the linear layers that get an adapter, for instance `[q_proj, v_proj]`; `all-linear` takes all
    but the output head."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Only 0: the engine samples without dropout."""

    @field_validator("dropout")
    @classmethod
    def _is_off(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(
                f"dropout {dropout} would change the trainer's logprobs at random: they would no longer be "
                "those of the model that sampled, nor the same however a batch is split; leave it at 0"
            )
        return dropout
