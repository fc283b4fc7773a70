"""A teacher: a model whose logprobs of what the policy sampled are learned from (on-policy distillation)."""

from typing import Literal, Self

from pydantic import model_validator

from tidemill.common.config.reward_kinds import RemoteConfig


class TeacherConfig(RemoteConfig):
    """A language model with the policy's tokenizer. It gives the logprob of every token that the policy
    sampled; `trainer.algorithm.teacher` says what is made of them, and `weight` how much they count.

    Its servers speak OpenAI's completions with `prompt_logprobs`: vLLM, or this project's model server.
    """

    server: Literal["vllm", "transformers"] = "vllm"
    """What local replicas run: vLLM's OpenAI server, or the model server of this project."""
    served_name: str = ""
    """Name of the model in requests; empty leaves it out, which suits servers with one model."""
    prompt_column: str = ""
    """Column of the row with the prompt that the teacher reads in place of the policy's, text or chat
    messages: what only the teacher knows (self-distillation, arXiv 2601.19897). Empty: the policy's own
    prompt."""
    template: str = ""
    """Or a Jinja template of it, from the same as a judge's: prompt, messages, ground_truth, extra, ..."""
    template_file: str = ""
    """Or a file with that, relative to the config; its text is taken when the config is read."""
    chat: bool = False
    """Put the text of `prompt_column` or `template` into the teacher's chat template, as the user's message.
    Messages always go into it."""
    gpus: tuple[int, ...] = ()
    """GPUs of this machine for local replicas, dealt out in turn; empty takes some that nobody has."""

    @property
    def has_own_prompt(self) -> bool:
        """Whether it reads another prompt than the policy did."""
        return bool(self.prompt_column or self.template)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.prompt_column and self.template:
            raise ValueError("give prompt_column or template, not both: each is the prompt of the teacher")
        if self.chat and not self.has_own_prompt:
            raise ValueError(
                "chat is about the teacher's own prompt, and there is none: the teacher reads the policy's "
                "token ids. Give prompt_column or template, or leave chat out"
            )
        if self.gpus and self.local_replicas is None:
            raise ValueError("gpus are those of local_replicas, and there are none")
        return self
