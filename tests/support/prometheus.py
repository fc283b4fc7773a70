"""Every expression of the dashboards and rules, and a real Prometheus to run them on."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import promql_parser
import yaml

from infra.grafana.panels import BOARDS, INTERVAL
from tests.support.preloaded import REPO, start_module
from tests.support.runs import ServiceRun
from tests.support.servers import free_port
from tests.support.waiting import wait_until

CONFIG = REPO / "infra" / "prometheus" / "prometheus.yml"
RULES = CONFIG.parent / "rules"
FETCHED = Path(sys.prefix) / "prometheus"
"""Where `make test` puts Debian's programs, on machines that have none."""
WHERE = os.pathsep.join((os.environ.get("PATH", os.defpath), str(FETCHED)))
PROMETHEUS = shutil.which("prometheus", path=WHERE)
PROMTOOL = shutil.which("promtool", path=WHERE)
MISSING = "prometheus and promtool are not on PATH, and infra/prometheus/fetch.sh could not get Debian's"


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    expr: str
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expression:
    """PromQL with the variables of Grafana, and where it stands."""

    where: str
    name: str
    promql: str


def read_rules() -> tuple[list[Rule], list[Rule]]:
    rules = [
        rule
        for path in sorted(RULES.glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]
    records = [
        Rule(rule["record"], rule["expr"], rule.get("labels", {})) for rule in rules if "record" in rule
    ]
    alerts = [
        Rule(rule["alert"], rule["expr"], rule["labels"], rule["annotations"])
        for rule in rules
        if "alert" in rule
    ]
    return records, alerts


RECORDS, ALERTS = read_rules()


def panel_expressions() -> list[Expression]:
    """Expressions of all panels of all dashboards."""
    return [
        Expression(f"{board.name}: {panel.title}: {query.legend}", panel.title, query.expr)
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries
    ]


def expressions() -> list[Expression]:
    """Expressions of panels, recording rules and alerts."""
    rules = [
        Expression(f"rule {rule.name}{rule.labels or ''}", rule.name, rule.expr) for rule in RECORDS + ALERTS
    ]
    return panel_expressions() + rules


def substituted(promql: str, window: str, run_id: str) -> str:
    """The expression as Grafana would send it."""
    return promql.replace(INTERVAL, window).replace("$run_id", run_id)


def metric_names(promql: str) -> set[str]:
    """The series that an expression reads."""
    return {str(selector.name) for selector in _selected(promql)}


def selectors(promql: str) -> set[str]:
    """What an expression reads, each with its labels, as PromQL."""
    return {re.sub(r" offset \w+$", "", str(selector)) for selector in _selected(promql)}


def _selected(promql: str) -> list[Any]:
    selectors: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            selectors.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            selectors.append(node.vector_selector)
        return True

    promql_parser.walk(promql_parser.parse(substituted(promql, "1m", "any")), visit)
    return [selector for selector in selectors if selector.name]


def start_exporter(run: ServiceRun) -> str:
    """Start the run's exporter as a process; gives its address."""
    port = free_port()
    words = [run.keys.run_id, "--port", str(port), "--every", "0.5"]
    env = os.environ | {"TIDEMILL_REDIS_URL": run.url}
    log = run.folder / "exporter.log"
    run.processes["exporter"] = start_module("tidemill.services.console.exporter", words, log, env)
    return f"http://127.0.0.1:{port}"


class PrometheusServer:
    """A real Prometheus with the rules of infra/, scraping what an exporter's /sd names, every second."""

    def __init__(self, folder: Path, exporter: str) -> None:
        """`exporter` is the address of a run's exporter."""
        self.folder = folder
        self.exporter = exporter
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "PrometheusServer":
        self._start()
        await wait_until(self._is_ready, awaited="Prometheus is ready")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process
        self.process.kill()
        self.process.wait()
        if error is not None:
            print((self.folder / "prometheus.log").read_text(errors="replace")[-3000:])

    def _start(self) -> None:
        assert PROMETHEUS
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(self._config()))
        command = [PROMETHEUS, "--config.file", str(self.folder / "prometheus.yml")]
        command += ["--storage.tsdb.path", str(self.folder / "tsdb")]
        command += ["--web.listen-address", f"127.0.0.1:{self.port}"]
        with open(self.folder / "prometheus.log", "wb") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, env=os.environ)

    async def query(self, promql: str) -> list[dict[str, Any]]:
        """The series that an expression has now; NaN counts as none.

        Raises:
            AssertionError: Prometheus refuses it.
        """
        answer = await asyncio.to_thread(self._get, f"/api/v1/query?query={urllib.parse.quote(promql)}")
        assert answer["status"] == "success", (promql, answer)
        data = answer["data"]
        series: list[dict[str, Any]] = data["result"] if data["resultType"] == "vector" else [data]
        return [item for item in series if item.get("value", [0, "0"])[1] != "NaN"]

    async def alerts(self) -> dict[str, dict[str, str]]:
        """Annotations of the alerts that fire, by name."""
        answer = await asyncio.to_thread(self._get, "/api/v1/alerts")
        firing = [alert for alert in answer["data"]["alerts"] if alert["state"] == "firing"]
        return {alert["labels"]["alertname"]: alert["annotations"] for alert in firing}

    async def _is_ready(self) -> bool:
        try:
            await asyncio.to_thread(urllib.request.urlopen, f"{self.url}/-/ready", timeout=5)
        except OSError:
            return False
        return True

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                reply: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            reply = json.load(error)
        return reply

    def _config(self) -> dict[str, Any]:
        """The config of infra/, but faster, and with the addresses of this test."""
        config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
        config["global"] |= {
            "scrape_interval": "1s",
            "scrape_timeout": "1s",
            "evaluation_interval": "1s",
        }
        config["rule_files"] = [str(RULES / "*.yml")]
        jobs = {job["job_name"]: job for job in config["scrape_configs"]}
        jobs["tidemill"]["http_sd_configs"] = [{"url": f"{self.exporter}/sd", "refresh_interval": "1s"}]
        jobs["prometheus"]["static_configs"] = [{"targets": [f"127.0.0.1:{self.port}"]}]
        config["scrape_configs"] = [jobs["tidemill"], jobs["prometheus"]]
        return config
