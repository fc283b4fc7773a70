"""A run in virtual time: what a step takes where lengths differ and staleness is bounded.

Formulas of means are too low where stages wait for each other: the mean of the later of two is later than the
later of the means. This plays the run instead, completion by completion, in less than a second.

The engines share their speed: each of N completions under way goes on at `min(1 / alone_s, rate / N)`
completions of mean length a second. A group is there when its last completion is. The trainer takes a step's
groups in `fetches` parts, works on each for its share of `train_s`, and `rest_s` later the next version is
there, which lets in `groups` more: at most `(version + 1 + staleness) * groups` are ever begun.
"""

import math
import random
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

CUT = 16.0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A run. Times in seconds; lengths are told in means."""

    groups: int
    """In a step."""
    group_size: int
    staleness: float
    """Steps that generation may be ahead; need not be whole."""
    held: int
    """Completions under way at most: all of a group begin together where `by_group`."""
    rate: float
    """Completions of mean length in a second, with so many under way that there is no more to gain."""
    alone_s: float
    """What a completion of mean length takes by itself."""
    train_s: float
    sigma: float = 0.0
    """Of the lengths: log-normal, cut at `cut` times the median."""
    cut: float = CUT
    fetches: int = 1
    rest_s: float = 0.0
    score_s: float = 0.0
    """From the end of a group to its last score."""
    by_group: bool = True
    in_order: bool = False
    """A step takes its own groups; otherwise those that are there first."""
    steps: int = 10
    warm_up: int = 2
    """Steps at the start that do not count."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Flow:
    """Means over the steps that count."""

    step_s: float
    wait_s: float
    """What the trainer waits for groups."""
    rollout_idle: float
    """Share of the engines' speed that nobody used."""
    staleness: float
    """Steps from the begin of a group to its training."""


class _Engines:
    """Completions that share a speed. `done_work` is what each has been given since the beginning."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.chance = pipeline, random.Random(pipeline.seed)
        self.mean = mean_of_lengths(pipeline.sigma, pipeline.cut)
        self.now = self.done_work = self.used_s = 0.0
        self.running: list[tuple[float, int]] = []
        """When each will have been given enough, and its group."""

    def begin(self, group: int) -> None:
        """One more completion."""
        sigma = self.pipeline.sigma
        length = min(math.exp(sigma * self.chance.gauss(0.0, 1.0)), self.pipeline.cut) if sigma else 1.0
        heappush(self.running, (self.done_work + length / self.mean, group))

    @property
    def speed(self) -> float:
        """Of each completion."""
        return min(1.0 / self.pipeline.alone_s, self.pipeline.rate / max(1, len(self.running)))

    @property
    def next_s(self) -> float:
        """When the next one ends."""
        if not self.running:
            return math.inf
        return self.now + max(0.0, self.running[0][0] - self.done_work) / self.speed

    def go_on(self, until_s: float) -> None:
        """Work up to a time."""
        given = (until_s - self.now) * self.speed
        self.used_s += given * len(self.running) / self.pipeline.rate
        self.done_work += given
        self.now = until_s


class _Run:
    """One run, event by event."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.p, self.engines = pipeline, _Engines(pipeline)
        self.begun = self.version = self.num_free_begun = 0
        self.left: dict[int, int] = {}
        self.born: dict[int, int] = {}
        self.ready: defaultdict[int, deque[tuple[float, int]]] = defaultdict(deque)
        """Complete groups with the time of their last score, by the step that takes them; -1 is any."""

    def admit(self) -> None:
        """Begin what the bound and the engines' places allow."""
        p, engines = self.p, self.engines
        limit = int((self.version + 1 + p.staleness) * p.groups)
        if p.by_group:
            while self.begun < limit and (len(self.left) + 1) * p.group_size <= p.held:
                for _ in range(p.group_size):
                    engines.begin(self.begun)
                self._open()
            return
        while len(engines.running) < p.held:
            if self.num_free_begun == 0:
                if self.begun >= limit:
                    return
                self._open()
                self.num_free_begun = p.group_size
            self.num_free_begun -= 1
            engines.begin(self.begun - 1)

    def _open(self) -> None:
        self.left[self.begun], self.born[self.begun] = self.p.group_size, self.version
        self.begun += 1

    def finish_one(self) -> None:
        """The next completion ends."""
        engines = self.engines
        engines.go_on(engines.next_s)
        _, group = heappop(engines.running)
        self.left[group] -= 1
        if self.left[group] == 0:
            del self.left[group]
            step = group // self.p.groups if self.p.in_order else -1
            self.ready[step].append((engines.now + self.p.score_s, group))
        self.admit()

    def go_on(self, until_s: float) -> None:
        """Generate up to a time."""
        while self.engines.next_s <= until_s:
            self.finish_one()
        self.engines.go_on(until_s)

    def take(self, step: int, count: int) -> tuple[float, list[int]]:
        """Wait for so many groups; returns how long, and which."""
        since, ready = self.engines.now, self.ready[step if self.p.in_order else -1]
        while len(ready) < count:
            if not self.engines.running:
                raise ValueError(f"no group is under way, and {count - len(ready)} are waited for")
            self.finish_one()
        taken = [ready.popleft() for _ in range(count)]
        self.go_on(max(self.engines.now, taken[-1][0]))
        return self.engines.now - since, [group for _, group in taken]


@cache
def play(pipeline: Pipeline) -> Flow:
    """Play a run of `warm_up + steps` steps.

    Raises:
        ValueError: a step's part is no whole number of groups, or the engines hold no whole group.
    """
    p = pipeline
    if p.groups % p.fetches or p.held < (p.group_size if p.by_group else 1):
        raise ValueError(
            f"{p.groups} groups in {p.fetches} parts, and {p.held} places: neither may leave a rest"
        )
    run = _Run(p)
    run.admit()
    begun_s = used_s = waited_s = stale = 0.0
    for step in range(p.warm_up + p.steps):
        if step == p.warm_up:
            begun_s, used_s, waited_s, stale = run.engines.now, run.engines.used_s, 0.0, 0.0
        for _ in range(p.fetches):
            waiting_s, groups = run.take(step, p.groups // p.fetches)
            waited_s += waiting_s
            stale += sum(step - run.born.pop(group) for group in groups)
            run.go_on(run.engines.now + p.train_s / p.fetches)
        run.go_on(run.engines.now + p.rest_s)
        run.version += 1
        run.admit()
    total_s = run.engines.now - begun_s
    idle = 1.0 - (run.engines.used_s - used_s) / total_s
    return Flow(total_s / p.steps, waited_s / p.steps, idle, stale / (p.steps * p.groups))


def mean_of_lengths(sigma: float, cut: float) -> float:
    """Mean length of completions: log-normal with median 1, where what is above `cut` is `cut`.

    >>> round(mean_of_lengths(0.99, 16.0), 2)
    1.61
    """
    if not sigma:
        return min(1.0, cut)
    edge = math.log(cut) / sigma
    return math.exp(sigma**2 / 2) * _below(edge - sigma) + cut * (1.0 - _below(edge))


def mean_of_later(varying_s: float, share: float, other_s: float) -> float:
    """E[max(X, other)] of a normal X with the mean `varying_s` and a standard deviation of `share` of it.

    C. E. Clark, The greatest of a finite set of random variables (1961), equation 2 with one variance of 0.
    """
    deviation = share * varying_s
    if deviation <= 0.0:
        return max(varying_s, other_s)
    z = (varying_s - other_s) / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return other_s + deviation * (density + z * _below(z))


def _below(x: float) -> float:
    """The share of a standard normal that lies below x."""
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))
