"""The Helm chart as objects, with given values; a reader of the few expressions that its templates have."""

import json
import re
from functools import reduce
from typing import Any

import yaml

from infra.release.__main__ import CHART

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
EVERYTHING = VALUES | {"rewardModel": VALUES["rewardModel"] | {"enabled": True}}
Objects = dict[tuple[str, str], Any]


def value_of(expression: str, values: dict[str, Any]) -> str:
    """What helm puts in place of one expression."""
    words = [word.strip() for word in expression.split("|")]
    source, *functions = words
    scope = {"Values": values, "Release": {"Namespace": "tidemill"}}

    def lookup(word: str) -> Any:
        return (
            word[1:-1]
            if word[0] == '"'
            else reduce(lambda tree, name: tree[name], word[1:].split("."), scope)
        )

    words = source.split()
    value = "".join(lookup(word) for word in words[1:]) if words[0] == "print" else lookup(words[0])
    for function in functions:
        value = {"quote": lambda x: f'"{x}"', "toJson": json.dumps}[function](value)
    return str(value)


def rendered(values: dict[str, Any]) -> str:
    parts = []
    for path in sorted((CHART / "templates").iterdir()):
        text = path.read_text()
        if match := re.search(r"\{\{- if (\S+) \}\}\n(.*)\{\{- end \}\}", text, re.DOTALL):
            text = match[2] if value_of(match[1], values) == "True" else ""
        parts.append(re.sub(r"\{\{ (.+?) \}\}", lambda match: value_of(match[1], values), text))
    return "\n---\n".join(parts)


def pruned(tree: Any) -> Any:
    """The tree without empty values: `nodeSelector: {}` means the same as no field."""
    if isinstance(tree, dict):
        return {key: pruned(value) for key, value in tree.items() if value not in (None, {}, [])}
    return [pruned(value) for value in tree] if isinstance(tree, list) else tree


def objects(text: str) -> Objects:
    return {(t["kind"], t["metadata"]["name"]): pruned(t) for t in yaml.safe_load_all(text) if t}
