"""What a visitor asks of the browser of groups: filters, order and page, as the address holds them.

The address says everything, so that it can be kept and sent. What cannot be understood is ignored and told.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from tidemill.common.streams.selection import Range
from tidemill.common.wire.messages import Lane
from tidemill.services.console.records.selection import parse_range
from tidemill.services.console.web.group_index import STATES, GroupRow, Spread

PAGE_ROWS = 100
MAX_NEEDLE_CHARACTERS = 200

RANGES: dict[str, tuple[Callable[[GroupRow], float | None], Callable[[GroupRow], float | None]]] = {
    "step": (lambda row: row.at_step,) * 2,
    "reward": (lambda row: _mean_of(row.rewards),) * 2,
    "length": (lambda row: _mean_of(row.lengths),) * 2,
    "version": (lambda row: row.min_version, lambda row: row.max_version),
}
"""Filters on numbers, with the least and the greatest that a row has of them: they must overlap."""

SORTS: dict[str, Callable[[GroupRow], float]] = {
    "ticket": lambda row: row.ticket,
    "step": lambda row: row.at_step,
    "reward": lambda row: row.rewards.mean,
    "std": lambda row: row.rewards.std,
    "length": lambda row: row.lengths.mean,
    "version": lambda row: row.min_version,
    "time": lambda row: row.finished_at or row.issued_at,
}
EXTRA_STATES = {"failed": "with failed scores", "flat": "all rewards equal"}


@dataclass(frozen=True, slots=True)
class GroupQuery:
    lane: Lane = Lane.TRAIN
    ranges: Mapping[str, str] = field(default_factory=dict)
    """As they were typed."""
    state: str = ""
    worker: str = ""
    text: str = ""
    sort: str = "ticket"
    is_ascending: bool = False
    page: int = 1
    problems: tuple[str, ...] = ()
    """What was not understood, in words."""

    @classmethod
    def parse(cls, values: Mapping[str, str]) -> "GroupQuery":
        """The query of an address."""
        problems = []
        ranges = {}
        for name in RANGES:
            if typed := values.get(name, "").strip()[:60]:
                ranges[name] = typed
                if range_of(typed) is None:
                    problems.append(f"{name} must be a number such as 12 or a range such as 10..20 or ..20")
        state = values.get("state", "")
        sort = values.get("sort", "ticket")
        page = values.get("page", "1")
        return cls(
            Lane.EVAL if values.get("lane") == Lane.EVAL else Lane.TRAIN,
            ranges,
            state if state in (*STATES, *EXTRA_STATES) else "",
            values.get("worker", "")[:MAX_NEEDLE_CHARACTERS],
            values.get("text", "")[:MAX_NEEDLE_CHARACTERS],
            sort if sort in SORTS else "ticket",
            values.get("order") == "up",
            max(1, int(page)) if page.isascii() and page.isdigit() and len(page) < 9 else 1,
            tuple(problems),
        )

    def address(self, **changes: object) -> str:
        """The query part of the address of this query with some things changed; defaults are left out."""
        values: dict[str, object] = {
            "lane": self.lane.value,
            **self.ranges,
            "state": self.state,
            "worker": self.worker,
            "text": self.text,
            "sort": self.sort,
            "order": "up" if self.is_ascending else "down",
            "page": self.page,
        }
        defaults = {"lane": "train", "sort": "ticket", "order": "down", "page": 1}
        changed = {**values, **changes}
        kept = {k: v for k, v in changed.items() if v not in ("", None) and v != defaults.get(k)}
        return "?" + urlencode(kept) if kept else "?"

    def select(self, rows: Iterable[GroupRow]) -> list[GroupRow]:
        """All rows that the filters leave, in order."""
        tests = self._tests()
        found = [row for row in rows if all(test(row) for test in tests)]
        key = SORTS[self.sort]
        found.sort(key=lambda row: (key(row), row.ticket), reverse=not self.is_ascending)
        return found

    def _tests(self) -> list[Callable[[GroupRow], bool]]:
        tests: list[Callable[[GroupRow], bool]] = []
        for name, typed in self.ranges.items():
            if wanted := range_of(typed):
                tests.append(_overlaps(name, wanted))
        if self.state == "failed":
            tests.append(lambda row: row.num_failed > 0)
        elif self.state == "flat":
            tests.append(lambda row: row.rewards.count > 1 and row.rewards.least == row.rewards.most)
        elif self.state:
            tests.append(lambda row: row.state == self.state)
        if self.worker:
            tests.append(lambda row: any(self.worker in worker for worker in row.workers))
        if self.text:
            needle = self.text.casefold()
            tests.append(lambda row: needle in row.text)
        return tests


def range_of(typed: str) -> Range | None:
    """`12`, `10..20`, `10..` or `..20`; None where it is neither."""
    try:
        return parse_range(typed)
    except ValueError:
        return None


def _overlaps(name: str, wanted: Range) -> Callable[[GroupRow], bool]:
    least_of, most_of = RANGES[name]
    low, high = wanted

    def test(row: GroupRow) -> bool:
        least, most = least_of(row), most_of(row)
        if least is None or most is None:
            return False
        return (low is None or most >= low) and (high is None or least <= high)

    return test


def _mean_of(spread: Spread) -> float | None:
    return spread.mean if spread.count else None
