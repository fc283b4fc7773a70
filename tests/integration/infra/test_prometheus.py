"""A real Prometheus scrapes a real run.

Every expression of every panel, rule and alert answers with data, or is listed with the reason why it cannot.
"""

import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.misbehaving import MisbehavingServer, answers, says
from tests.support.prometheus import (
    ALERTS,
    MISSING,
    PROMETHEUS,
    PROMTOOL,
    RULES,
    PrometheusServer,
    expressions,
    metric_names,
    panel_expressions,
    selectors,
    start_exporter,
    substituted,
)
from tests.support.reward_models import tiny_classifier
from tests.support.runs import ServiceRun, simulated_config
from tests.support.waiting import wait_until
from tidemill.common.config import RunConfig

EMPTY = {
    r"vllm:": "the engine is simulated; test_vllm_engine.py sees to vLLM's own metrics",
    r"DCGM_": "there is no GPU",
    r"redis_(up|memory|cpu|connected)": "there is no exporter of the Redis server beside the test",
    r"tidemill_sandbox_": "no reward runs code",
    r"tidemill_session_|tidemill_environment_|tidemill_agent_": "samples are single turns",
    r"tidemill_(duplicates_|leases_lost|handed_back)": "no worker loses or gives back what it holds",
    r"tidemill_unexpected_entries_": "nobody writes into the numbered streams by hand",
    r"tidemill_redis_wait_": "Redis is never away",
}
"""What has no data in this run, and why, by the metrics that an expression reads."""
EMPTY_LABELS = {
    'cause="environment"': "samples are single turns",
    'metric="selection/': "every token is trained",
    'metric=~"teacher/': "nothing is distilled",
    'metric=~"source/': "there is one training set",
    'metric=~"experts/': "the model is no mixture of experts",
    'metric="routes/': "the model is no mixture of experts",
    'metric="logprob_gap/unmasked_mean"': "nothing is sampled with masks",
    'metric="perf/mfu"': "the trainer is simulated",
    'metric="perf/peak_gib"': "the trainer is simulated",
    'metric="forward/fill"': "the trainer is simulated",
}
"""The same by a label of a metric that has data otherwise."""
WINDOW = "20s"
needs_prometheus = pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason=MISSING)


@needs_prometheus
def test_promtool_accepts_config_and_rules() -> None:
    assert PROMTOOL
    for command in (
        ["config", str(RULES.parent / "prometheus.yml")],
        ["rules", *map(str, RULES.glob("*.yml"))],
    ):
        done = subprocess.run([PROMTOOL, "check", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.parametrize("path", sorted((RULES.parent / "tests").glob("*.yml")), ids=lambda path: path.stem)
def test_rules_pass_their_unit_tests(path: Path) -> None:
    assert PROMTOOL
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
async def test_every_expression_has_data_from_a_real_run_or_a_reason(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run, PrometheusServer(tmp_path, start_exporter(run)) as prometheus:
        await cause_mishaps(run, prometheus)
        wanted = promised(run.keys.run_id)
        missing = {panel for panel, promql in wanted.items() if not reason_of(promql)}
        empty = wanted.keys() - missing

        async def all_have_data() -> bool:
            for panel in sorted(missing):
                if await prometheus.query(wanted[panel]):
                    missing.discard(panel)
            return not missing

        try:
            await wait_until(all_have_data, awaited="data for every expression")
        except AssertionError:
            lines = [f"{panel}: {wanted[panel]}" for panel in sorted(missing)]
            raise AssertionError("\n".join(["these have no data:", *lines])) from None
        for panel in sorted(empty):
            assert not await prometheus.query(wanted[panel]), f"{panel} has data: it needs no reason"
        for alert in ALERTS:
            await prometheus.query(alert.expr)
        fired = await prometheus.alerts()
        assert set(fired) == {"TidemillDeadLetters"}, fired
        said = fired["TidemillDeadLetters"]
        assert said["summary"].endswith(" messages of run test are dead letters")
        assert said["runbook_url"] == "docs/troubleshooting.md#dead-letters-waiting"


def promised(run_id: str) -> dict[str, str]:
    """What must have data, by where it stands. Of an alert, which has none in health, what it reads."""
    shown_promql = {item.where: substituted(item.promql, WINDOW, run_id) for item in panel_expressions()}
    recorded = {item.where: item.promql for item in expressions() if item.name.startswith("tidemill:")}
    read = {
        f"{alert.name} reads {selector}": selector for alert in ALERTS for selector in selectors(alert.expr)
    }
    return shown_promql | recorded | read


def test_every_reason_is_needed() -> None:
    read = {name for item in expressions() for name in metric_names(item.promql)}
    for pattern in EMPTY:
        assert any(re.match(pattern, name) for name in read), f"nothing reads {pattern}"
    for label in EMPTY_LABELS:
        assert any(label in item.promql for item in expressions()), f"nothing reads {label}"


def reason_of(promql: str) -> str:
    """Why an expression has no data here; empty where it must have some."""
    names = metric_names(promql)
    for pattern, reason in EMPTY.items():
        if any(re.match(pattern, name) for name in names):
            return reason
    for label, reason in EMPTY_LABELS.items():
        if label in promql:
            return reason
    return ""


@asynccontextmanager
async def a_run(folder: Path) -> AsyncIterator[ServiceRun]:
    """A small run with evaluation, a judge that fails at times and is slow at times, and a reward model."""
    failing = [says(500) if number % 4 == 0 else answers() for number in range(4000)]
    async with (
        MisbehavingServer(None, *failing) as failing_server,
        MisbehavingServer(answers(delay_s=0.3)) as two,
        ServiceRun(folder, make_config(folder, (failing_server.url, two.url))) as run,
    ):
        run.start("reward.replica", "replica-0", arguments=("--servers", "model", "--index", "0"))
        run.start("trainer")
        run.start("rollout")
        run.start("reward", "reward-0")
        run.start("reward", "reward-1")
        yield run


async def cause_mishaps(run: ServiceRun, prometheus: PrometheusServer) -> None:
    """Kill a worker that holds something, which others take over; send a message that nobody can read."""
    await wait_until(lambda: prometheus.query('tidemill_scores_in_flight{worker="reward-1"} > 0'))
    run.kill("reward-1")
    await run.broker.execute("XADD", run.keys.trajectories(), "*", "v", "9", "p", "?")


def make_config(folder: Path, judges: tuple[str, ...]) -> RunConfig:
    function = folder / "fails_at_times.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if int(ground_truth) % 16 == 5:\n"
        "        raise ValueError('no score for this one')\n"
        "    return float(len(solution_str) % 2)\n"
    )
    rewards = {
        "length": {"function": f"{function}:compute_score", "backoff_s": 0.01},
        "judge": {"judge": {"servers": "judge", "template": "{{ completion }}"}, "backoff_s": 0.01},
        "model": {"model": {"servers": "model"}},
    }
    judge = {
        "base_urls": judges,
        "model": "m",
        "limits": {"concurrency": 4},
        "prices": {"prompt": 1.0, "completion": 2.0},
    }
    model = {"model": str(tiny_classifier(folder / "classifier")), "local": {}}
    return simulated_config(
        folder,
        data__eval={"held-out": str(folder / "train.jsonl")},
        reward__function=None,
        reward__rewards=rewards,
        servers__judge=judge,
        servers__model=model,
        reward__group="rank",
        trainer__steps=100_000,
        trainer__evaluation={"every": 5, "max_prompts": 4},
        trainer__simulated={"update_s": 0.2},
        rollout__simulated={"tokens": 8, "vocab_size": 32, "group_s": 0.1},
        streams__trim=True,
        streams__lease_s=4.0,
    )
