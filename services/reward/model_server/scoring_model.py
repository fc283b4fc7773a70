"""A reward model or a teacher, with transformers: token ids in, scores or logprobs in float32 out.

Guarantees: the head computes in float32 whatever the trunk's precision; a row's scores do not depend on the
rows beside it (padding stands behind a row and is masked); a decoder's sequence score is that of its last
token, by length and not by looking for the padding id, so that a final EOS that doubles as padding counts.

Shapes: B rows, T tokens, H hidden, N labels.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tidemill.common.errors import ConfigError
from tidemill.common.run.model_config import exact_attention, freeze_rope
from tidemill.services.reward.model_server.options import Head, ServerOptions

HEADS = {
    "sequence": ("ForSequenceClassification", AutoModelForSequenceClassification),
    "token": ("ForTokenClassification", AutoModelForTokenClassification),
    "lm": ("ForCausalLM", AutoModelForCausalLM),
}
LOGPROB_FLOOR = -9999.0
"""Logprob of a token that the model rules out, as vLLM writes it: JSON knows no infinity."""
NO_LIMIT_TOKENS = 1 << 24


class ScoringModel:
    """One model on one device. Not thread-safe: one thread computes."""

    def __init__(self, options: ServerOptions) -> None:
        """Load the model; with `share_device` into the CPU's memory, until `restore`.

        Raises:
            ConfigError: there is no such model, it is no reward model, or the device cannot hold it.
        """
        path = options.model
        self.path = path
        with _explained(path):
            config = AutoConfig.from_pretrained(path)
        context = _context_tokens(config)
        self.max_model_len = min(options.max_model_len or context, context)
        """Longest input in tokens; the model's context if no option sets a smaller one."""
        self.kind = _kind_of(config, options.head, path)
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(default if options.device == "auto" else options.device)
        is_slow = options.dtype == "auto" and self.device.type == "cpu"  # CPUs are fast in float32
        with _explained(path):
            loaded, info = HEADS[self.kind][1].from_pretrained(
                path,
                config=freeze_rope(config, self.max_model_len),
                dtype="float32" if is_slow else options.dtype,
                output_loading_info=True,
                attn_implementation=exact_attention(config),
            )
            self._model: Any = loaded.eval()
        if info["missing_keys"]:
            missing = ", ".join(sorted(info["missing_keys"])[:4])
            raise ConfigError(
                f"{path} has no weights for {missing}: it is not a trained "
                f"{self.kind} reward model. Give a model saved with its head, or another --head."
            )
        self.config = self._model.config
        self.num_labels: int = 0 if self.kind == "lm" else self.config.num_labels
        self.labels: dict[int, str] = {} if self.kind == "lm" else dict(self.config.id2label or {})
        self.vocab_size: int = self.config.get_text_config().vocab_size
        self._pad_id = _pad_id(self.config)
        if self.kind != "lm":  # its logits would take twice the memory; `_logprobs` makes them float32
            self._compute_head_in_float32()
        if not options.share_device:
            self.restore()

    @torch.inference_mode()
    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """In the order of `rows`: raw scores without activation, [N] for a sequence or [T, N] for its tokens;
        for a language model the logprob of each token, [T], 0 for the first, which nothing predicts."""
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        ids_BT = torch.full((len(rows), longest), self._pad_id, dtype=torch.long)
        for ids_T, row in zip(ids_BT, rows, strict=True):
            ids_T[: len(row)] = torch.as_tensor(row, dtype=torch.long)
        mask_BT = None
        if min(lengths) < longest:  # without padding, attention is faster without a mask
            mask_BT = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long().to(self.device)
        ids_BT = ids_BT.to(self.device, non_blocking=True)
        if self.kind == "lm":
            return self._logprobs(ids_BT, mask_BT, lengths)
        if self.kind == "token":
            scores_BTN = self._model(input_ids=ids_BT, attention_mask=mask_BT).logits.float().cpu()
            return [scores_TN[:length] for scores_TN, length in zip(scores_BTN, lengths, strict=True)]
        return list(self._score_sequences(ids_BT, mask_BT, lengths).float().cpu())

    def offload(self) -> None:
        """Move the weights to the CPU's memory and give the device's back."""
        self._model.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            # Or torch keeps the memory for itself, and no other process can have it.
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Move the weights to the device. Raises ConfigError: they do not fit, or there is no such device."""
        try:
            self._model.to(self.device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"cannot move the reward model to {self.device}: {error}") from None

    def _logprobs(self, ids_BT: Tensor, mask_BT: Tensor | None, lengths: list[int]) -> list[Tensor]:
        """log_softmax of the model's own logits, so that its scaling and capping are included; row by row in
        float32, because vocabularies are large."""
        logits_BTV = self._model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
        rows = []
        for logits_TV, ids_T, length in zip(logits_BTV, ids_BT, lengths, strict=True):
            logprobs_TV = torch.log_softmax(logits_TV[: length - 1].float(), dim=-1)
            own_T = logprobs_TV.gather(-1, ids_T[1:length, None]).squeeze(-1).clamp(min=LOGPROB_FLOOR)
            rows.append(torch.cat([own_T.new_zeros(1), own_T]).cpu())
        return rows

    def _score_sequences(self, ids_BT: Tensor, mask_BT: Tensor | None, lengths: list[int]) -> Tensor:
        if not self._pools_last:
            scores_BN: Tensor = self._model(input_ids=ids_BT, attention_mask=mask_BT).logits
            return scores_BN
        hidden_BTH = self._model.base_model(
            input_ids=ids_BT, attention_mask=mask_BT, use_cache=False
        ).last_hidden_state
        last_B = torch.tensor(lengths, device=self.device) - 1
        scored: Tensor = self._model.score(hidden_BTH[torch.arange(len(lengths), device=self.device), last_B])
        return scored

    def _compute_head_in_float32(self) -> None:
        """Everything above the trunk gets float32 weights and inputs."""
        trunk = self._model.base_model_prefix
        for name, module in self._model.named_children():
            if name != trunk:
                module.float()
                module.register_forward_pre_hook(_to_float32)
        is_causal = not getattr(self.config, "is_encoder_decoder", False) and hasattr(self._model, "score")
        # Decoders have one linear layer called `score` and take the last token; encoders pool as they like.
        self._pools_last = is_causal and isinstance(self._model.score, nn.Linear)


def activate(scores: Tensor, config: Any) -> Tensor:
    """Sigmoid of one label, softmax over several; the config's `problem_type` goes first, as in vLLM."""
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return scores
    if problem == "multi_label_classification" or config.num_labels < 2:
        return scores.sigmoid()
    return scores.softmax(dim=-1)


def _to_float32(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.float() if isinstance(value, Tensor) else value for value in inputs)


def _kind_of(config: Any, head: Head, path: str) -> Literal["sequence", "token", "lm"]:
    if head != "auto":
        return head
    named = " ".join(config.architectures or ["none"])
    if HEADS["token"][0] in named:
        return "token"
    if HEADS["sequence"][0] in named:
        return "sequence"
    raise ConfigError(
        f"{path} is a {named}; expected ...ForSequenceClassification or ...ForTokenClassification. "
        "Say --head sequence or --head token if transformers can load it as such, --head lm for the logprobs "
        "of a language model."
    )


def _context_tokens(config: Any) -> int:
    """Longest input the positions allow; very large where they set no limit."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or NO_LIMIT_TOKENS
    # RoBERTa and related models start positions after the padding id.
    is_offset = "roberta" in text.model_type or text.model_type in ("camembert", "longformer")
    return int(positions) - (_pad_id(config) + 1 if is_offset else 0)


def _pad_id(config: Any) -> int:
    """Any valid id will do: what stands there is masked."""
    pad_id = config.get_text_config().pad_token_id
    return pad_id if isinstance(pad_id, int) and pad_id >= 0 else 0


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        is_missing = path.startswith((".", "/")) and not Path(path).exists()
        reason = "does not exist" if is_missing else str(error)
        raise ConfigError(f"cannot load the reward model {path}: {reason}") from None
