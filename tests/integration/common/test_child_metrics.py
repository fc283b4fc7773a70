"""What children count is on their parent's /metrics, after their end too, and after that of their forks."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.support.preloaded import REPO
from tidemill.common.telemetry.batched import ChildMetrics

CHILD = """
import os
from tidemill.common.telemetry import metrics
metrics.DEAD_LETTERS.labels("prompts").inc(2)
metrics.REQUESTS_RUNNING.set(7)
pid = os.fork()
metrics.DEAD_LETTERS.labels("prompts" if pid else "scores").inc()
metrics.STEP_SECONDS.observe(3.0)
if pid:
    os.waitpid(pid, 0)
os._exit(0)
"""


@pytest.fixture
def own() -> CollectorRegistry:
    """Metrics of the parent, of the same names as those that the child counts."""
    return CollectorRegistry()


@pytest.fixture
def children(own: CollectorRegistry) -> Iterator[ChildMetrics]:
    children = ChildMetrics(own)
    yield children
    children.close()


def run_child(children: ChildMetrics) -> None:
    env = os.environ | children.environment
    subprocess.run([sys.executable, "-c", CHILD], env=env, cwd=REPO, check=True, timeout=120)


def values(children: ChildMetrics) -> dict[tuple[str, str], float]:
    """Samples by name and value of their only label, if they have one; each must come once."""
    found: dict[tuple[str, str], float] = {}
    for family in children.collect():
        for sample in family.samples:
            key = (sample.name, "".join(sample.labels.values()))
            assert key not in found, key
            found[key] = sample.value
    return found


def test_parent_children_and_forks_are_added_up(children: ChildMetrics, own: CollectorRegistry) -> None:
    dead = Counter("tidemill_dead_letters_total", "help", ["stream"], registry=own)
    dead.labels("prompts").inc(10)
    Histogram("tidemill_step_seconds", "help", buckets=(2, 4), registry=own).observe(1.0)
    Gauge("tidemill_requests_running", "help", registry=own).set(1)
    run_child(children)
    run_child(children)
    found = values(children)
    assert found["tidemill_dead_letters_total", "prompts"] == 10 + 2 * 3
    assert found["tidemill_dead_letters_total", "scores"] == 2
    assert found["tidemill_step_seconds_count", ""] == 1 + 2 * 2
    assert found["tidemill_step_seconds_sum", ""] == 1 + 2 * 2 * 3.0
    assert found["tidemill_requests_running", ""] == 1, "a gauge of a process that is gone says nothing"


def test_what_only_children_have_is_there_too_until_they_are_forgotten(children: ChildMetrics) -> None:
    run_child(children)
    assert values(children)["tidemill_step_seconds_count", ""] == 2
    children.close()
    assert not os.path.exists(children.environment["PROMETHEUS_MULTIPROC_DIR"])
