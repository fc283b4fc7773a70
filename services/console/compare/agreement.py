"""How the scores of two rewards for the same trajectories agree: numbers, and the groups that would flip.

Advantages depend only on the order and the spread within a group, so agreement is measured there as well.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill.common.wire.messages import Score, TrajectoryKey
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.text.formats import took
from tidemill.services.console.text.tree import Node, part, table

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

CLOSE = 1e-9
"""Scores that differ by less are the same."""
NUM_EXAMPLES = 10


@dataclass(slots=True)
class Agreement:
    """The result of a comparison. Correlations are None where one side does not vary; means and shares where
    nothing could be compared."""

    compared: int = 0
    """Trajectories that have a value on both sides."""
    failed_before: int = 0
    failed_now: int = 0
    failures_now: dict[str, int] = field(default_factory=dict)
    """The most frequent errors of the new failures, with their counts."""
    mean_before: float | None = None
    mean_now: float | None = None
    equal_share: float | None = None
    """Share of trajectories with the same score."""
    pearson: float | None = None
    spearman: float | None = None
    spearman_within_groups: float | None = None
    """Mean of the rank correlations within groups, over those groups in which both sides vary."""
    sign_flips: int = 0
    """Trajectories better than their group's mean on one side, and worse on the other."""
    groups: int = 0
    groups_with_another_best: list[int] = field(default_factory=list)
    """Tickets of which no completion is the best on both sides."""
    groups_without_variance_before: int = 0
    groups_without_variance_now: int = 0
    farthest: list[tuple[int, int, float, float]] = field(default_factory=list)
    """(ticket, index, before, now) of those with another score that moved most in rank."""


def compare(before: Mapping[TrajectoryKey, Score], now: Mapping[TrajectoryKey, Score]) -> Agreement:
    keys = sorted(now)
    # A failure counts by its first line: what follows makes each of them different.
    failures = Counter(
        (score.error.strip().splitlines() or [str(score.status)])[0][:160]
        for score in now.values()
        if score.value is None
    )
    result = Agreement(
        failed_before=sum(before[key].value is None for key in keys if key in before),
        failed_now=failures.total(),
        failures_now=dict(failures.most_common(NUM_EXAMPLES)),
    )
    pairs = [(key, before[key].value, now[key].value) for key in keys if key in before]
    both = [(key, old, new) for key, old, new in pairs if old is not None and new is not None]
    result.compared = len(both)
    if not both:
        return result
    old = np.array([value for _, value, _ in both], dtype=np.float64)
    new = np.array([value for _, _, value in both], dtype=np.float64)
    result.mean_before = float(old.mean())
    result.mean_now = float(new.mean())
    result.equal_share = float((np.abs(old - new) <= CLOSE).mean())
    result.pearson = correlation(old, new)
    result.spearman = rank_correlation(old, new)
    result.farthest = _farthest([key for key, _, _ in both], old, new)
    _compare_groups(result, both)
    return result


def correlation(first: Floats, second: Floats) -> float | None:
    """Pearson's r; None where one of them does not vary."""
    if len(first) < 2 or np.ptp(first) <= CLOSE or np.ptp(second) <= CLOSE:
        return None
    return float(np.clip(np.corrcoef(first, second)[0, 1], -1.0, 1.0))


def rank_correlation(first: Floats, second: Floats) -> float | None:
    """Spearman's rho: Pearson's r of the ranks, ties at their mean rank. None where one does not vary."""
    return correlation(ranks(first), ranks(second))


def ranks(values: Floats) -> Floats:
    """Rank of each value from 1; equal values share the mean of their ranks. Shape [N]."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    result: Floats = ((2 * last - counts + 1) / 2)[inverse].astype(np.float64)
    return result


def _compare_groups(result: Agreement, both: list[tuple[TrajectoryKey, float, float]]) -> None:
    groups: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for (ticket, _), old, new in both:
        groups[ticket].append((old, new))
    rhos: list[float] = []
    for ticket, pairs in groups.items():
        before = np.array([old for old, _ in pairs], dtype=np.float64)
        now = np.array([new for _, new in pairs], dtype=np.float64)
        varies_before = np.ptp(before) > CLOSE
        varies_now = np.ptp(now) > CLOSE
        result.groups_without_variance_before += not varies_before
        result.groups_without_variance_now += not varies_now
        rho = rank_correlation(before, now)
        if rho is not None:
            rhos.append(rho)
        centred_old = before - before.mean()
        centred_new = now - now.mean()
        opposite = (centred_old * centred_new < 0) & (np.abs(centred_old) > CLOSE)
        result.sign_flips += int((opposite & (np.abs(centred_new) > CLOSE)).sum())
        is_best = (before >= before.max() - CLOSE) & (now >= now.max() - CLOSE)
        if varies_before and varies_now and not is_best.any():
            result.groups_with_another_best.append(ticket)
    result.groups = len(groups)
    result.spearman_within_groups = float(np.mean(rhos)) if rhos else None


def _farthest(keys: list[TrajectoryKey], old: Floats, new: Floats) -> list[tuple[int, int, float, float]]:
    # A row with the score it had may change its rank because others moved past it: that does not count.
    moved = np.where(np.abs(old - new) > CLOSE, np.abs(ranks(old) - ranks(new)), 0.0)
    order = np.argsort(-moved, kind="stable")[:NUM_EXAMPLES]
    return [(*keys[at], float(old[at]), float(new[at])) for at in order if moved[at] > 0]


MAX_TICKETS = 12


def rescore_tree(report: dict[str, Any], run: RunFolder) -> Node:
    """`run` is the one whose history was scored again."""
    agreement = report["agreement"]
    parts = [part("cost", _cost_lines(report["cost"]))]
    if agreement["failures_now"]:
        failures = [{"times": count, "error": error} for error, count in agreement["failures_now"].items()]
        parts.append(part("failures now", table(failures)))
    if agreement["farthest"]:
        rows = [
            {"trajectory": f"{ticket}.{index}", "score before": before, "score now": now}
            for ticket, index, before, now in agreement["farthest"]
        ]
        parts.append(part(f"farthest in rank; see `{run.command('trace', 'TRAJECTORY')}`", table(rows)))
    head = f"{report['run']} scored again by {', '.join(report['reward'])}"
    return part(head, _agreement_lines(agreement), parts)


def _agreement_lines(agreement: dict[str, Any]) -> Iterator[Node]:
    flipped = agreement["groups_with_another_best"]
    named = ", ".join(map(str, flipped[:MAX_TICKETS])) + (", ..." if len(flipped) > MAX_TICKETS else "")

    def both(name: str, form: str = ",") -> str:
        return f"{agreement[f'{name}_before']:{form}} before, {agreement[f'{name}_now']:{form}} now"

    def compared(value: object) -> object:
        """The value; None, which is a dash, where nothing was compared."""
        return value if agreement["compared"] else None

    yield Node("compared", f"{agreement['compared']:,} trajectories in {agreement['groups']:,} groups")
    yield Node("failed", both("failed"))
    yield Node("mean", both("mean", ".4f") if agreement["compared"] else None)
    yield Node("same score", agreement["equal_share"], "share")
    yield Node("correlation (Pearson)", agreement["pearson"])
    yield Node("rank correlation (Spearman)", agreement["spearman"])
    yield Node("rank correlation within groups", agreement["spearman_within_groups"])
    yield Node("advantages that change sign", compared(agreement["sign_flips"]))
    another_best = f"{len(flipped):,}" + (f": tickets {named}" if flipped else "")
    yield Node("groups with another best", compared(another_best))
    yield Node("groups without variance", compared(both("groups_without_variance")))


def _cost_lines(cost: dict[str, Any]) -> Iterator[Node]:
    yield Node("scores", f"{cost['trajectories']:,} in {took(cost['scoring_s'])}")
    yield Node("speed", f"{cost['scores_per_s']:,.0f}/s ({took(cost['wall_s'])} with starting and stopping)")
    yield Node("attempts", cost["attempts"])
    for label, name in (("time of one", "latency"), ("with waiting", "wait")):
        middle = took(cost[f"{name}_p50_s"])
        high = took(cost[f"{name}_p95_s"])
        yield Node(label, f"median {middle}, 95% {high}")
    for name, tokens in cost["tokens"].items():
        yield Node(f"tokens of {name}", tokens)
