"""docs/api.md: what `import tidemill` offers, from its signatures and docstrings."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import tidemill

HEADING = "# Python API"
PREAMBLE = f"""{HEADING}

`import tidemill` offers these names, and no others stay the same between releases. The notebook
[a_run.ipynb](../examples/python/a_run.ipynb) uses most of them. This page is generated:
`python -m infra.docs.reference`.
"""
ORDER = ("load_config", "check", "run", "run_async", "RunResult", "metrics", "History", "Records", "rescore")
_MODULES = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Z])|\btyping\.|\bcollections\.abc\.|\bpathlib\.")


def as_markdown() -> str:
    """The page."""
    parts = [PREAMBLE]
    for name in ORDER:
        item = getattr(tidemill, name)
        parts.append(f"## {name}\n\n{_described(name, item)}")
        if inspect.isclass(item):
            parts += [f"### {name}.{member}\n\n{text}" for member, text in _members(item)]
    parts.append(
        "## Errors and configs\n\n`TidemillError` is the root of all errors; `ConfigError` is a mistake in "
        "what was given, and says what, where and what to do. `RunConfig` is a config: its fields are those "
        "of the [config reference](config.md), by dots, such as `config.trainer.steps`.\n"
    )
    return "\n".join(parts)


def _described(name: str, item: Any) -> str:
    is_made = item is tidemill.Records  # by the others only
    shown = "" if is_made or name == "run_async" else f"```python\n{_signature(name, item)}\n```\n\n"
    return f"{shown}{_docstring(item)}\n"


def _members(item: type) -> Iterator[tuple[str, str]]:
    """Public methods, properties and fields that have a docstring of their own."""
    for name, member in vars(item).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield name, f"{_docstring(member)}\n"
        elif inspect.isfunction(member):
            yield name, f"```python\n{_signature(name, member)}\n```\n\n{_docstring(member)}\n"


def _signature(name: str, item: Any) -> str:
    """One line, or one for each argument where it is long."""
    found = inspect.signature(item)
    given = [str(p) for p in found.parameters.values() if p.name != "self"]
    if keywords := [n for n, p in enumerate(found.parameters.values()) if p.kind is p.KEYWORD_ONLY]:
        given.insert(keywords[0], "*")
    result = found.return_annotation
    ending = "" if result is inspect.Signature.empty or inspect.isclass(item) else f" -> {_type(result)}"
    given = [_MODULES.sub("", text) for text in given]
    line = f"{name}({', '.join(given)}){ending}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {text},\n" for text in given) + f"){ending}"


def _type(annotation: Any) -> str:
    return _MODULES.sub("", inspect.formatannotation(annotation)).strip("'")


def _docstring(item: Any) -> str:
    """Without the indentation; the names of errors as code."""
    return re.sub(r"^Raises:\n    (\w+):", r"Raises `\1`:", inspect.getdoc(item) or "", flags=re.MULTILINE)
