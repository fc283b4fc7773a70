"""A discriminative reward model: `reward.rewards.<name>.model`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from common.config.remote import RemoteConfig


class RewardModelConfig(RemoteConfig):
    """A classifier that scores sequences or tokens, behind vLLM's pooling API or this project's own server.

    Local replicas run `python -m services.reward.model_server`, or vLLM with `server: vllm`.
    """

    server: Literal["transformers", "vllm"] = "transformers"
    """What local replicas run: the reward model server of this project, or vLLM's pooling server."""
    served_name: str = ""
    """Name of the model in requests; empty leaves it out, which suits servers with one model."""
    head: Literal["sequence", "token"] = "sequence"
    """One score for the whole sequence (/classify), or one for every token (/pooling)."""
    input: Literal["ids", "chat", "text"] = "chat"
    """What is sent: the policy's token ids (only where the reward model has the policy's tokenizer), the
    row's own conversation for the reward model's chat template, or as text what the policy read and wrote."""
    label: int = Field(0, ge=0, le=65535)
    """Which of several labels is the reward."""
    token_reward: Literal["last", "mean", "min", "sum", "all_mean"] = "last"
    """How scores of tokens become one: those of the completion; `all_mean` counts the prompt's tokens too.
    With `input: chat` or `text`, where the completion begins is unknown: use `last` or `all_mean`."""
    keep_token_rewards: bool = False
    """Keep the score of every token in the score's detail."""
    normalise: Literal["none", "sigmoid", "standardise", "clip"] = "none"
    """`sigmoid` maps to 0 to 1; `standardise` subtracts `mean` and divides by `std`; `clip` only clips."""
    mean: float = Field(0.0, ge=-1e9, le=1e9)
    """With `standardise`: the mean of raw scores on data of yours. Fixed, so that a score never depends on
    what was scored before it."""
    std: float = Field(1.0, gt=0.0, le=1e9)
    """With `standardise`: their standard deviation."""
    clip: tuple[float, float] | None = None
    """Lowest and highest value after normalisation."""
    max_tokens: int = Field(0, ge=0, le=1 << 20)
    """Longer inputs lose their beginning; 0 refuses what the model cannot take, and never cuts."""
    gpus: tuple[int, ...] = ()
    """GPUs of this machine for local replicas, dealt out in turn; empty leaves it to the environment."""
    shares_rollout_gpus: bool = False
    """Local replica i takes turns with rollout worker i on its GPUs: one generates, or the other scores."""
    turn_s: float = Field(5.0, ge=0.05, le=3600.0)
    """With `shares_rollout_gpus`: the longest turn while the other one waits, what is running aside."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip must be [lowest, highest], got {list(self.clip)}")
        if self.normalise == "clip" and self.clip is None:
            raise ValueError("normalise: clip needs clip: [lowest, highest]")
        if self.normalise != "standardise" and (self.mean, self.std) != (0.0, 1.0):
            raise ValueError("mean and std belong to normalise: standardise")
        if self.head == "token" and self.input != "ids" and self.token_reward not in ("last", "all_mean"):
            raise ValueError(
                f"token_reward: {self.token_reward} needs input: ids, because only then is it known which "
                "tokens are the completion's; or take last or all_mean"
            )
        if self.gpus and self.shares_rollout_gpus:
            raise ValueError("give gpus of its own, or shares_rollout_gpus, not both")
        if (self.gpus or self.shares_rollout_gpus) and self.local_replicas is None:
            raise ValueError("gpus and shares_rollout_gpus are about local_replicas, and there are none")
        if self.shares_rollout_gpus and self.server == "vllm":
            raise ValueError("shares_rollout_gpus needs server: transformers, which takes turns by itself")
        return self
