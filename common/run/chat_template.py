"""Renders a model's chat template like the model libraries, but without importing them: for quick checks.

Templates come from downloaded files, hence the sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from tidemill.common.errors import ConfigError


class RenderError(Exception):
    """The chat template cannot render this chat."""


class ChatTemplate:
    def __init__(self, source: str, settings: Mapping[str, Any]) -> None:
        self.source = source
        self._tokens = {
            name: value.get("content", "") if isinstance(value, dict) else value
            for name, value in settings.items()
            if name.endswith("_token")
        }

    @classmethod
    def of(cls, folder: Path, file: str = "") -> "ChatTemplate | None":
        """The template in `file`, else that of a model's folder (chat_template.jinja, else in
        tokenizer_config.json); None where there is none.

        Raises:
            ConfigError: tokenizer_config.json or the file cannot be read.
        """
        file_of_settings = folder / "tokenizer_config.json"
        settings = read_json(file_of_settings) if file_of_settings.is_file() else {}
        path = Path(file) if file else folder / "chat_template.jinja"
        if file or path.is_file():
            try:
                return cls(path.read_text(encoding="utf-8"), settings)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"cannot read the chat template {path}: {error}") from None
        source = settings.get("chat_template") or ""
        if isinstance(source, list):
            source = next((item["template"] for item in source if item.get("name") == "default"), "")
        return cls(str(source), settings) if source else None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The text that a model reads.

        Raises:
            RenderError: the template refuses the chat, or needs what is not here.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> NoReturn:
            raise RenderError(f"the chat template refuses a prompt ({message})")

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None}
        try:
            return environment.from_string(self.source).render(**values, **self._tokens)
        except (TemplateError, TypeError, ValueError) as error:
            raise RenderError(f"the chat template cannot be rendered here ({error})") from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ConfigError: it is missing, damaged, or something else.
    """
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(tree).__name__}.")
    return tree
