"""A row as the model reads it, as text or as a chat; and what becomes of prompts that are too long."""

from collections.abc import Sequence
from typing import Any

from tidemill.common.config.data import DataConfig
from tidemill.common.data.dataset import ChatMessage, Row
from tidemill.common.errors import ConfigError


def plain_prompt(row: Row, data: DataConfig) -> str:
    """The text of a prompt without a chat template. Raises ConfigError: the prompt is a chat."""
    if row.images:
        raise ConfigError(
            f"{row.origin}: it has pictures, whose places only a chat template writes; use "
            "data.chat_template 'auto' with a model that has one."
        )
    if isinstance(row.prompt, str):
        return row.prompt + data.prompt_suffix
    if len(row.prompt) == 1:
        content = row.prompt[0]["content"]
        if data.has_images:
            from tidemill.common.data.image_columns import text_of

            content = text_of(content)
        return f"{content}{data.prompt_suffix}"
    raise ConfigError(
        f"{row.origin}: the prompt is a chat of {len(row.prompt)} messages, but no chat template is in "
        "use; use data.chat_template 'auto' with a model that has one, or give the prompt as text."
    )


def chat_messages(row: Row, data: DataConfig) -> list[ChatMessage]:
    """The row as a chat: system prompt first unless it has its own, suffix on the last question. Where rows
    may have pictures, contents are lists of parts.

    Raises:
        ConfigError: there is no question for the suffix.
        BrokenImageError: there are more or fewer places for pictures than pictures.
    """
    prompt = row.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if data.has_images:
        from tidemill.common.data.image_columns import with_parts

        messages = with_parts(messages, len(row.images))
    if data.prompt_suffix:
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if not users:
            raise ConfigError(
                f"{row.origin}: no message has the role user, so data.prompt_suffix has no place."
            )
        last = messages[users[-1]]
        suffix = _content(data.prompt_suffix, data)
        messages[users[-1]] = {**last, "content": last["content"] + suffix}
    if data.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _content(data.system_prompt, data)})
    return messages


def _content(text: str, data: DataConfig) -> Any:
    """A text as the content of a message, or as its end."""
    if not data.has_images:
        return text
    from tidemill.common.data.image_columns import text_part

    return text_part(text)


def fate_of_overlong(overlong: Sequence[tuple[int, str]], num_rows: int, data: DataConfig) -> str:
    """How prompts above the limit are treated, as text for people; `overlong` has their lengths and origins.

    Raises:
        ConfigError: `data.overlong_prompts` is `error`, or no prompt would be left.
    """
    limit = data.max_prompt_tokens
    length, origin = overlong[0]
    longest, _ = max(overlong)
    if data.overlong_prompts == "error":
        raise ConfigError(
            f"{origin}: the prompt has {length:,} tokens, data.max_prompt_tokens is {limit:,}. "
            f"{len(overlong):,} of {num_rows:,} prompts are too long, the longest has {longest:,} tokens. "
            "Raise the limit (and model.max_model_len), or set data.overlong_prompts to drop, or to left, "
            "right or middle, which cut."
        )
    if data.overlong_prompts != "drop":
        return f"cut: {data.overlong_prompts}"
    if len(overlong) == num_rows:
        raise ConfigError(
            f"all {num_rows:,} prompts have more than data.max_prompt_tokens ({limit:,}) tokens, the first "
            f"is {origin} with {length:,}; nothing is left. Raise the limit."
        )
    return "left out"
