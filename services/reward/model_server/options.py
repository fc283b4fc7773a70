"""What the server is told on its command line."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from tidemill.common.errors import ConfigError

T = TypeVar("T", int, float)

Head = Literal["auto", "sequence", "token", "lm"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Bounds are checked by `parse_options`."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8100
    served_model_name: str = ""
    head: Head = "auto"
    dtype: Dtype = "auto"
    device: str = "auto"
    num_threads: int = 0
    max_model_len: int = 0
    chat_template: str = ""
    max_batch_tokens: int = 16_384
    max_batch_rows: int = 256
    flush_ms: float = 5.0
    max_padding: float = 0.3
    max_queued_rows: int = 4096
    drain_s: float = 20.0
    share_device: bool = False
    turn_s: float = 5.0


def parse_options(arguments: Sequence[str] | None = None) -> ServerOptions:
    """Read the command line; a mistake is said in one line and ends the process with 2."""
    defaults = ServerOptions(model="")
    parser = argparse.ArgumentParser(
        prog="python -m tidemill.services.reward.model_server",
        description="Serves a sequence classifier or a token-reward model, as vLLM's pooling API does, or a "
        "language model's logprobs of given tokens.",
    )
    add = parser.add_argument
    add("--model", required=True, help="folder (or hub name) of the reward model")
    add("--host", default=defaults.host, help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=defaults.port, help="port, 0 for a free one (default: %(default)s)")
    add("--served-model-name", default="", help="name in requests and answers (default: what --model says)")
    add(
        "--head",
        choices=("auto", "sequence", "token", "lm"),
        default="auto",
        help="one score a sequence or a token, or a language model's logprobs (never by auto)",
    )
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="of the trunk")
    add("--device", default="auto", help="auto takes the first GPU, else the CPU")
    add("--num-threads", type=_count, default=0, help="CPU threads of torch; 0 leaves its default")
    add("--max-model-len", type=_count, default=0, help="longest input in tokens (default: the model's)")
    add("--chat-template", default="", help="Jinja file in place of the tokenizer's chat template")
    add(
        "--max-batch-tokens",
        type=_positive,
        default=defaults.max_batch_tokens,
        help="padded tokens in a batch",
    )
    add("--max-batch-rows", type=_positive, default=defaults.max_batch_rows, help="sequences in a batch")
    add("--flush-ms", type=_milliseconds, default=defaults.flush_ms, help="longest wait for company")
    add("--max-padding", type=_share, default=defaults.max_padding, help="share of padding a batch may have")
    add("--max-queued-rows", type=_positive, default=defaults.max_queued_rows, help="beyond: 429 Retry-After")
    add("--drain-s", type=_seconds, default=defaults.drain_s, help="grace period after SIGTERM")
    add("--share-device", action="store_true", help="take turns on the device with a rollout worker")
    add("--turn-s", type=_seconds, default=defaults.turn_s, help="longest turn while another waits")
    return ServerOptions(**vars(parser.parse_args(arguments)))


def check_model(options: ServerOptions) -> None:
    """Find a wrong path before anything heavy is imported.

    Raises:
        ConfigError: the path is no model folder.
    """
    path = Path(options.model)
    looks_like_path = options.model.startswith((".", "/", "~")) or options.model.count("/") > 1
    if (path.exists() or looks_like_path) and not (path / "config.json").is_file():
        problem = "has no config.json" if path.exists() else "does not exist"
        raise ConfigError(
            f"cannot load the reward model {options.model}: the folder {problem}. Give that of a saved model."
        )


def template_of(options: ServerOptions) -> str | None:
    """The chat template that replaces the tokenizer's, if one was given.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return Path(options.chat_template).read_text(encoding="utf-8") if options.chat_template else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {options.chat_template}: {error}") from None


def _number(kind: type[T], low: float, high: float) -> Callable[[str], T]:
    """Reads a number within bounds."""

    def read(text: str) -> T:
        number = kind(text)
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{number} is not from {low} to {high}")
        return number

    read.__name__ = kind.__name__  # argparse shows it: "invalid int value"
    return read


_count, _positive, _port = _number(int, 0, 1 << 24), _number(int, 1, 1 << 24), _number(int, 0, 65535)
_milliseconds, _seconds = _number(float, 0.0, 3_600_000.0), _number(float, 0.0, 3600.0)
_share = _number(float, 0.0, 1.0)
