"""What the server is told on its command line."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

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


def _number(kind: type[T], low: float, high: float) -> Callable[[str], T]:
    """Reads a number within bounds."""

    def read(text: str) -> T:
        number = kind(text)
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{number} is not from {low} to {high}")
        return number

    read.__name__ = kind.__name__  # argparse shows it: "invalid int value"
    return read


OPTIONS: dict[str, tuple[Any, str]] = {
    "host": (str, "address to listen on"),
    "port": (_number(int, 0, 65535), "port, 0 for a free one"),
    "served_model_name": (str, "name in requests and answers (default: what --model says)"),
    "head": (
        get_args(Head),
        "one score a sequence or a token, or a language model's logprobs (never by auto)",
    ),
    "dtype": (get_args(Dtype), "of the trunk"),
    "device": (str, "auto takes the first GPU, else the CPU"),
    "num_threads": (_number(int, 0, 1 << 24), "CPU threads of torch; 0 leaves its default"),
    "max_model_len": (_number(int, 0, 1 << 24), "longest input in tokens; 0 is the model's"),
    "chat_template": (str, "Jinja file in place of the tokenizer's chat template"),
    "max_batch_tokens": (_number(int, 1, 1 << 24), "padded tokens in a batch"),
    "max_batch_rows": (_number(int, 1, 1 << 24), "sequences in a batch"),
    "flush_ms": (_number(float, 0.0, 3_600_000.0), "longest wait to fill a batch"),
    "max_padding": (_number(float, 0.0, 1.0), "share of padding a batch may have"),
    "max_queued_rows": (_number(int, 1, 1 << 24), "beyond: 429 with Retry-After"),
    "drain_s": (_number(float, 0.0, 3600.0), "grace period after SIGTERM"),
    "turn_s": (_number(float, 0.0, 3600.0), "longest turn while another waits"),
}
"""Field -> how it is read, and its line of help."""


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
    for name, (read, text) in OPTIONS.items():
        known = {"choices": read} if isinstance(read, tuple) else {"type": read}
        shown = f"{text} (default: %(default)s)" if getattr(defaults, name) else text
        add(f"--{name.replace('_', '-')}", default=getattr(defaults, name), help=shown, **known)
    add("--share-device", action="store_true", help="take turns on the device with a rollout worker")
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
