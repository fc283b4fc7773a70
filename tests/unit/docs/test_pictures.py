"""The picture of the dashboard has the panels of the board, and refuses to be drawn from nothing."""

import json
from pathlib import Path

import httpx
import pytest

from infra.docs import pictures


def answer(monkeypatch: pytest.MonkeyPatch, result: list[object]) -> list[str]:
    """Put a Prometheus in place that has one answer; returns what it will be asked."""
    asked: list[str] = []

    def get(url: str, params: dict[str, str]) -> httpx.Response:
        asked.append(params["query"])
        return httpx.Response(200, json={"data": {"result": result}}, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    return asked


def test_every_panel_is_asked_for_with_the_boards_own_expressions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(monkeypatch, [{"metric": {"metric": "m"}, "values": [[60, "0.5"], [120, "0.75"]]}])
    pictures.dashboard("http://host", "mine", (0.0, 120.0), tmp_path / "board.png")
    assert (tmp_path / "board.png").read_bytes().startswith(b"\x89PNG")
    panels = {panel["title"]: panel for panel in json.loads(pictures.BOARD.read_text())["panels"]}
    wanted = [target["expr"] for title in pictures.PANELS for target in panels[title]["targets"]]
    assert asked == [expression.replace("$run_id", "mine") for expression in wanted]


def test_a_panel_without_data_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, [])
    with pytest.raises(ValueError, match="panel 'Reward' has no data of run 'mine'"):
        pictures.dashboard("http://host", "mine", (0.0, 120.0), tmp_path / "board.png")


def test_a_legend_is_filled_in_as_grafana_does() -> None:
    assert pictures.legend("{{dataset}} {{metric}}", {"dataset": "easy"}) == "easy "
