"""Dashboards and alerts as they are committed: complete, current, and each with a way to the runbook."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import Counter
from prometheus_client.metrics import MetricWrapperBase

from infra.docs.pages import anchor_of
from infra.grafana.__main__ import DASHBOARDS, main
from infra.grafana.build import as_json
from infra.grafana.panels import BOARDS, Board
from infra.grafana.runbook import read_runbook
from tests.support.prometheus import ALERTS, RULES, Rule, expressions, metric_names, substituted
from tidemill.common.telemetry import metrics

ANCHORS = {paragraph.anchor for paragraph in read_runbook()}
PROMTOOL_TESTS = sorted((RULES.parent / "tests").glob("*.yml"))


def exported_families() -> set[str]:
    """Every metric of the project, as expressions name it; a histogram without its endings."""
    collectors = [item for item in vars(metrics).values() if isinstance(item, MetricWrapperBase)]
    return {f"{item._name}_total" if isinstance(item, Counter) else item._name for item in collectors}


def family(name: str) -> str:
    """A series without what a histogram appends."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def used_names() -> set[str]:
    """Every series that a panel, an alert or a rule reads."""
    return {name for expression in expressions() for name in metric_names(expression.promql)}


def test_the_committed_dashboards_are_current() -> None:
    assert main(["--check"]) == 0


@pytest.mark.parametrize("path", sorted(DASHBOARDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_dashboard_survives_a_round_trip_through_grafanas_types(path: Path) -> None:
    text = path.read_text()
    assert as_json(Dashboard.from_json(json.loads(text))) == text


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_panel_says_what_it_tells_links_to_what_to_do_and_lies_beside_the_others(board: Board) -> None:
    runbook: dict[str, Any] = json.loads((DASHBOARDS / "runbook.json").read_text())
    titles = {item["id"]: item["title"] for item in runbook["panels"]}
    built: dict[str, Any] = json.loads((DASHBOARDS / f"{board.name}.json").read_text())
    linked = [item for item in built["panels"] if item["type"] != "row"]
    for panel, item in zip(board.panels, linked, strict=True):
        assert panel.tells.endswith(".") and panel.act.endswith("."), panel.title
        assert panel.unit and panel.queries and all(query.legend for query in panel.queries), panel.title
        assert anchor_of(panel.runbook) in ANCHORS, panel.title
        number = int(item["links"][0]["url"].partition("viewPanel=panel-")[2])
        assert titles[number] == panel.runbook
    covered: set[tuple[int, int]] = set()
    for item in built["panels"]:
        x = item["gridPos"]["x"]
        y = item["gridPos"]["y"]
        width = item["gridPos"]["w"]
        height = item["gridPos"]["h"]
        cells = {(column, line) for column in range(x, x + width) for line in range(y, y + height)}
        assert x + width <= 24 and not cells & covered, item["title"]
        covered |= cells
    others = {f"/d/{each.uid}" for each in BOARDS if each is not board}
    assert {link["url"] for link in built["links"]} == others | {"/d/tidemill-runbook"}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_a_severity_a_summary_a_paragraph_and_a_test_that_fires_it(alert: Rule) -> None:
    assert alert.labels["severity"] in ("critical", "warning")
    assert alert.annotations["summary"]
    page, _, anchor = alert.annotations["runbook_url"].partition("#")
    assert page == "{{ $externalLabels.docs }}/troubleshooting.md"
    assert anchor in ANCHORS
    assert any(f'alertname="{alert.name}"' in path.read_text() for path in PROMTOOL_TESTS)


def test_every_paragraph_on_an_alert_is_of_one() -> None:
    dashboards = {anchor_of(board.question) for board in BOARDS}
    alerts = {alert.annotations["runbook_url"].partition("#")[2] for alert in ALERTS}
    assert dashboards | alerts == ANCHORS


def test_every_metric_that_is_shown_exists() -> None:
    recorded = {rule.name for rule in expressions() if rule.name.startswith("tidemill:")}
    unknown = {
        name
        for name in used_names()
        if name.startswith("tidemill") and name not in recorded and family(name) not in exported_families()
    }
    assert unknown == set()


def test_every_metric_of_vllm_that_is_shown_is_one_of_the_installed_vllm() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    families = {family(name) for name in used_names() if name.startswith("vllm:")}
    assert {name for name in families if not is_named_in(source, name)} == set()


def is_named_in(source: str, name: str) -> bool:
    """Whether a metric is declared; a counter's declaration leaves `_total` out."""
    return any(f'"{declared}"' in source for declared in (name, name.removesuffix("_total")))


@pytest.mark.parametrize("expression", expressions(), ids=lambda expression: expression.where)
def test_every_expression_is_promql(expression: Any) -> None:
    promql_parser.parse(substituted(expression.promql, "1m", "any"))


def test_provisioning_names_what_is_there() -> None:
    provisioning = DASHBOARDS.parent / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())
    assert [item["type"] for item in source["datasources"]] == ["prometheus"]
    provider = yaml.safe_load((provisioning / "dashboards" / "tidemill.yml").read_text())
    assert provider["providers"][0]["options"]["path"] == "/etc/grafana/dashboards"
