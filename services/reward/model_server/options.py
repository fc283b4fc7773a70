"""The server's command line."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from tidemill.common.errors import ConfigError

Head = Literal["auto", "sequence", "token", "lm"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class ServerOptions(BaseModel, frozen=True):
    model: str = Field(description="folder (or hub name) of the reward model")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8100, ge=0, le=65535, description="port, 0 for a free one")
    served_model_name: str = Field("", description="name in requests and answers; empty: what --model says")
    head: Head = Field(
        "auto", description="one score a sequence or a token, or lm: logprobs, which auto never chooses"
    )
    dtype: Dtype = Field("auto", description="of the trunk")
    device: str = Field("auto", description="auto takes the first GPU, else the CPU")
    num_threads: int = Field(0, ge=0, le=1 << 24, description="CPU threads of torch; 0 leaves its default")
    max_model_len: int = Field(0, ge=0, le=1 << 24, description="longest input in tokens; 0 is the model's")
    chat_template: str = Field("", description="Jinja file in place of the tokenizer's chat template")
    max_batch_tokens: int = Field(16_384, ge=1, le=1 << 24, description="padded tokens in a batch")
    max_batch_rows: int = Field(256, ge=1, le=1 << 24, description="sequences in a batch")
    flush_ms: float = Field(5.0, ge=0.0, le=3_600_000.0, description="longest wait to fill a batch")
    max_padding: float = Field(0.3, ge=0.0, le=1.0, description="share of padding a batch may have")
    max_queued_rows: int = Field(4096, ge=1, le=1 << 24, description="beyond: 429 with Retry-After")
    drain_s: float = Field(20.0, ge=0.0, le=3600.0, description="grace period after SIGTERM")
    share_device: bool = Field(False, description="take turns on the device with a rollout worker")
    turn_s: float = Field(5.0, ge=0.0, le=3600.0, description="longest turn while another waits")


def parse_options(arguments: Sequence[str] | None = None) -> ServerOptions:
    """Read the command line; a mistake is said in one line and ends the process with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tidemill.services.reward.model_server",
        description="Serves a sequence classifier or a token-reward model, as vLLM's pooling API does, or a "
        "language model's logprobs of given tokens.",
    )
    for name, field in ServerOptions.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        text = str(field.description)
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true", help=text)
        elif field.is_required():
            parser.add_argument(flag, required=True, help=text)
        else:
            # What 0 and empty text mean stands in the description.
            with_default = f"{text} (default: %(default)s)" if field.default else text
            parser.add_argument(flag, default=field.default, help=with_default)
    try:
        return ServerOptions(**vars(parser.parse_args(arguments)))
    except ValidationError as error:
        first = error.errors()[0]
        flag = f"--{str(first['loc'][0]).replace('_', '-')}"
        parser.error(f"argument {flag}: {first['msg']}, got {first['input']}")


def template_of(options: ServerOptions) -> str | None:
    """The chat template that replaces the tokenizer's, if one was given.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not options.chat_template:
        return None
    try:
        return Path(options.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {options.chat_template}: {error}") from None
