"""The only place that spells Redis keys.

Every key of a run is `tidemill:{run_id}:<name>`; the braces are a Redis Cluster hash tag, so that one
run may use transactions and scripts over several keys.
"""

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

from tidemill.common.errors import ConfigError
from tidemill.common.wire.messages import (
    Commit,
    DeadLetter,
    Lane,
    Message,
    Score,
    Ticket,
    Trajectory,
    WeightManifest,
)

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

PREFIX = "tidemill"
ROLLOUT_GROUP = "rollout"
"""Consumer group of the rollout workers on the `prompts` streams."""
REWARD_GROUP = "reward"
"""Consumer group of the reward workers on the `trajectories` streams."""

RQ_STATES = {"queued": "rq:queue:{}", "started": "rq:wip:{}", "failed": "rq:failed:{}"}
"""Keys in which RQ keeps the jobs of a queue, by state, with the queue's name for the braces: a list, and two
sorted sets."""

RUNS = f"{PREFIX}:runs"
"""Set of the run ids this Redis knows."""


class StreamName(StrEnum):
    """The streams of a run: their keys without the run's prefix."""

    PROMPTS = "prompts"
    TRAJECTORIES = "trajectories"
    SCORES = "scores"
    WEIGHTS = "weights"
    COMMITS = "commits"
    DEAD = "dead"
    PROMPTS_EVAL = "prompts:eval"
    TRAJECTORIES_EVAL = "trajectories:eval"
    SCORES_EVAL = "scores:eval"

    @property
    def lane(self) -> Lane:
        """Training or evaluation; streams without lanes belong to training."""
        return Lane.EVAL if self.endswith(EVAL) else Lane.TRAIN

    def of(self, lane: Lane) -> "StreamName":
        """The stream with the same messages in `lane`."""
        return StreamName(_in_lane(self.removesuffix(EVAL), lane))

    @property
    def message_type(self) -> type[Message]:
        return _MESSAGES[self.of(Lane.TRAIN)]

    @property
    def group(self) -> str:
        """The consumer group that reads it; empty where all readers go by offset."""
        return {Ticket: ROLLOUT_GROUP, Trajectory: REWARD_GROUP}.get(self.message_type, "")

    def key(self, keys: "Keys") -> str:
        return keys.named(self)


_MESSAGES: dict[StreamName, type[Message]] = {
    StreamName.PROMPTS: Ticket,
    StreamName.TRAJECTORIES: Trajectory,
    StreamName.SCORES: Score,
    StreamName.WEIGHTS: WeightManifest,
    StreamName.COMMITS: Commit,
    StreamName.DEAD: DeadLetter,
}
EVAL = ":eval"
"""Suffix of streams and keys of the evaluation lane."""


def _in_lane(name: str, lane: Lane) -> str:
    return f"{name}{EVAL}" if lane is Lane.EVAL else name


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one run. Streams of the evaluation lane carry the suffix `:eval`.

    Example: of the run `a`, `prompts()` is `tidemill:{a}:prompts` and `scores(Lane.EVAL)` is
    `tidemill:{a}:scores:eval`.
    """

    run_id: str

    def __post_init__(self) -> None:
        if not RUN_ID.fullmatch(self.run_id):
            raise ConfigError(
                f"run id {self.run_id!r} must be 1 to 100 letters, digits, '.', '_' or '-', "
                "beginning with a letter or digit"
            )

    def _key(self, name: str, lane: Lane = Lane.TRAIN) -> str:
        return self.named(_in_lane(name, lane))

    def named(self, name: str) -> str:
        """The key of a name that includes its lane's suffix."""
        return f"{PREFIX}:{{{self.run_id}}}:{name}"

    def prompts(self, lane: Lane = Lane.TRAIN) -> str:
        return self._key(StreamName.PROMPTS, lane)

    def trajectories(self, lane: Lane = Lane.TRAIN) -> str:
        return self._key(StreamName.TRAJECTORIES, lane)

    def scores(self, lane: Lane = Lane.TRAIN) -> str:
        return self._key(StreamName.SCORES, lane)

    def progress(self, ticket: int, lane: Lane = Lane.TRAIN) -> str:
        """Hash of a group in flight: published indices, and the version at which it started."""
        prefix, suffix = self.progress_around(lane)
        return f"{prefix}{ticket}{suffix}"

    def progress_around(self, lane: Lane = Lane.TRAIN) -> tuple[str, str]:
        """Prefix and suffix around the ticket's number in `progress`: `trim.lua` makes these keys itself."""
        return self.named("group:"), EVAL if lane is Lane.EVAL else ""

    @staticmethod
    def parts(progress: str) -> str:
        """Hash beside that of `progress`: recorded parts of samples that are not published yet, the first
        one of sample 3 in the field `3:0` (`rollout/sessions/parts.py`). `trim.lua` makes this key, too."""
        return f"{progress}:parts"

    def results(self, ticket: int, lane: Lane = Lane.TRAIN) -> str:
        """Hash: results of the samples of a group that is scored as a whole, until all are there."""
        return self._key(f"results:{ticket}", lane)

    def result_tickets(self, lane: Lane = Lane.TRAIN) -> str:
        """Set of the tickets that have a hash of results."""
        return self._key("results", lane)

    @property
    def reward_cache(self) -> tuple[str, str, str]:
        """Hash of cached rewards, sorted set of when each was used, and hash of its size and clock."""
        return self._key("reward_cache"), self._key("reward_cache:used"), self._key("reward_cache:size")

    def sandbox_result(self, job_id: str) -> str:
        """String: the result of one sandboxed run, as JSON."""
        return self._key(f"sandbox:{job_id}")

    @property
    def sandbox_queue(self) -> str:
        """Name of the run's RQ queue. RQ puts `rq:` keys of its own around it, shared by all runs."""
        return f"{PREFIX}:{self.run_id}:sandbox"

    @property
    def sandbox_names(self) -> str:
        """Prefix of job ids and RQ workers' names of the sandbox queue.

        RQ keeps all jobs below `rq:job:`; `infra/redis/users.acl` tells runs apart by this prefix. It has a
        digest of the run's id, because only letters and digits are allowed. `infra/redis/make_users.py` also
        computes it.
        """
        return f"sandbox-{hashlib.sha256(self.run_id.encode()).hexdigest()[:16]}-"

    @property
    def weights(self) -> str:
        return self._key(StreamName.WEIGHTS)

    @property
    def commits(self) -> str:
        return self._key(StreamName.COMMITS)

    @property
    def dead(self) -> str:
        return self._key(StreamName.DEAD)

    @property
    def config(self) -> str:
        """String: the resolved config as JSON."""
        return self._key("config")

    @property
    def state(self) -> str:
        """Hash: status, version and progress of the run, for people (`common/run/state.py`).

        Its other fields show what this server has lost: the registration of the server that the trainer
        knows, marks that a commit or a trim needs (`Mark`), and the ids below which streams were trimmed.
        """
        return self._key("state")

    def workers(self, role: str) -> str:
        """Hash: heartbeat of every process of a role, by name. Only the role's Redis user writes it."""
        return self._key(f"workers:{role}")

    def limits(self, servers: str) -> str:
        """Hash: the rates that are left of the limits of `servers.<name>`."""
        return self._key(f"limits:{servers}")

    def requests(self, servers: str) -> str:
        """Sorted set: requests in flight to `servers.<name>`, by when their lease ends."""
        return self._key(f"requests:{servers}")

    def name_of(self, key: str) -> str:
        """The part of a key after the run's prefix, such as `prompts:eval`: what `named` was given."""
        return key.removeprefix(self.named(""))
