"""Pages of answers against the code: messages are those that it prints, settings are fields, examples run."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.docs.pages import FENCE, REPO
from tidemill.common.config import RunConfig
from tidemill.common.config.diagnostics import CHECKS
from tidemill.services.console.check.explain import read_sections

PAGES = [REPO / "docs" / f"{name}.md" for name in ("troubleshooting", "operations/sizing", "metrics")]
LEAST_OWN = 14
"""Characters of a text in the code, less its values, with which it counts as a message."""
FAILING = "failing: "
"""What `up` and `status` put before a failure in words."""
REST = {
    "model": {"path": "m"},
    "data": {"train": "t.jsonl"},
    "reward": {"function": "gsm8k"},
    "trainer": {"steps": 100, "optimizer": {"lr": 1e-5}},
}


def blocks(language: str) -> list[tuple[str, str]]:
    """Page and text of every block in a language."""
    return [
        (path.stem, block[3])
        for path in PAGES
        for block in FENCE.finditer(path.read_text(encoding="utf-8"))
        if block[2] == language
    ]


@cache
def texts_of_the_code() -> frozenset[tuple[str, ...]]:
    """The texts in the product's code, each in the parts between its values."""
    texts = {(text,) for check in CHECKS.values() for text in (check.problem, check.problem_low) if text}
    for room in ("common", "services"):
        for path in (REPO / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                items = node.values if isinstance(node, ast.JoinedStr) else [node]
                constants = [item.value if isinstance(item, ast.Constant) else None for item in items]
                if sum(len(text) for text in constants if isinstance(text, str)) >= LEAST_OWN:
                    texts.add(tuple(text if isinstance(text, str) else "" for text in constants))
    return frozenset(texts)


def is_printed(message: str) -> bool:
    """Whether a text of the code says this, with anything for its values."""
    for texts in texts_of_the_code():
        if not all(text in message for text in texts):
            continue
        pattern = "".join(re.escape(text) if text else ".+" for text in texts)
        if re.fullmatch(pattern, message, re.DOTALL):
            return True
    return False


@pytest.mark.parametrize(("page", "message"), blocks("text"), ids=lambda text: text.strip()[:40])
def test_a_message_of_a_page_is_one_that_the_program_prints(page: str, message: str) -> None:
    assert is_printed(message.strip().removeprefix(FAILING))


def test_a_message_that_was_changed_is_noticed() -> None:
    remainder = " at redis://head:6379/0: refused. Is it running, and is TIDEMILL_REDIS_URL right?"
    assert is_printed(f"cannot reach Redis{remainder}")
    assert not is_printed(f"cannot reach Valkey{remainder}") and not is_printed(remainder)


def merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {key: merged(base.get(key), value) for key, value in over.items()}
    return over


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_settings_of_a_page_are_a_part_of_a_config(page: str, text: str) -> None:
    settings = yaml.safe_load(text)
    base = {**REST, "reward": {}} if "reward" in settings else REST
    RunConfig.model_validate(merged(base, settings))


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_an_example_of_a_page_runs(page: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(text, page, "exec"), names)
    if score := names.get("compute_score"):
        assert score("", "It is 26", "26") == {"score": 1.0, "words": 3, "has_number": 1.0}
        assert score("", "none", "26") == {"score": 0.0, "words": 1, "has_number": 0.0}
    else:
        assert capsys.readouterr().out


def test_every_field_that_a_page_names_is_there() -> None:
    sections = set(RunConfig.model_fields)
    fields = {field.name for section in read_sections() for field in section.fields}
    fields |= {section.name for section in read_sections()}
    for path in PAGES:
        for name in re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)", Path(path).read_text(encoding="utf-8")):
            if name.partition(".")[0] in sections - {"run"}:
                assert name in fields, f"{path.name}: {name}"
