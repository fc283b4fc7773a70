"""One run of the simulation: its config and its faults. All of it follows from a seed."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tidemill.common.config import RunConfig, parse_config
from tidemill.common.streams.log import KEPT_COMMITS

LEASE_S = 4.0
REISSUE_AFTER_S = 60.0
ENVIRONMENTS = {"restore": "RestoredGuessing", "repeat": "RepeatedGuessing"}
BOUND = "trainer.max_staleness"


@dataclass(frozen=True)
class Setup:
    """The part of a run's config that differs between schedules."""

    steps: int = 5
    groups_per_step: int = 2
    group_size: int = 3
    max_staleness: int = 1
    batch_order: str = "in_order"
    checkpoint_every: int = 2
    keep_checkpoints: int = 2
    trim: bool = True
    archive: bool = False
    segment_mb: float = 0.004
    """Size of a file of the archive: Redis keeps that much beyond what is in flight."""
    evaluation: bool = False
    rollouts: int = 2
    rewards: int = 2
    reward_slots: int = 256
    """Slots of each reward worker; while all are in use, it reads ahead."""
    sample_s: float = 1.0
    """Mean seconds of a sample. Above a lease, its reward takes at most as long: both need renewals."""
    per_group: bool = False
    """Whether the reward is given all samples of a group at once."""
    sessions: bool = False
    """Whether samples are sessions of several turns, with an environment that fails now and then."""
    parts: str = ""
    """Which samples leave parts, every two tokens: single turns (`turns`), or sessions that are restored from
    their mark (`restore`) or played again (`repeat`); empty for none."""
    shares_lines: bool = False
    """Whether calls of a process arrive and are answered in order, as on one connection."""
    kept_commits: int = KEPT_COMMITS
    """Commits that stay when their stream is trimmed."""
    claims: bool = False
    """Whether every trajectory lies in a file of the run, and its entry is a claim."""
    choices: bool = False
    """Whether sampling is filtered, and the ids that it left lie in a file of the run too."""
    keep_choices: bool = True
    """Whether the archive has them too."""
    max_attempts: int = 5
    """Deliveries of a ticket without progress."""
    mixed: bool = False
    """Two sources, a curriculum, and groups without variance replaced."""

    def config(self, folder: Path, run_id: str, seed: int = 0) -> RunConfig:
        """The whole config, for a run whose data lie in `folder`."""
        tree: dict[str, Any] = {
            "run_id": run_id,
            "seed": seed % 100_000,
            "model": {"path": str(folder / "model"), "max_model_len": 64},
            "data": {
                "train": str(folder / "train.jsonl"),
                "eval": {"held-out": str(folder / "eval.jsonl")} if self.evaluation else {},
                "max_prompt_tokens": 16,
            },
            "rollout": {
                "engine": "simulated",
                "workers": self.rollouts,
                "max_groups_in_flight": 4,
                "sampling": {"max_tokens": 16, "top_k": 2 * self.choices},
                "simulated": {
                    "tokens": 6,
                    "vocab_size": 32,
                    "group_s": self.sample_s,
                    "jitter": 0.8,
                    "load_s": 0.1,
                },
            },
            "reward": {
                "function": "reward.py:compute_score",
                "workers": self.rewards,
                "processes": 1,
                "max_in_flight": self.reward_slots,
            },
            "trainer": {
                "policy": "simulated",
                "steps": self.steps,
                "groups_per_step": self.groups_per_step,
                "group_size": self.group_size,
                "max_staleness": self.max_staleness,
                "batch_order": self.batch_order,
                "checkpoint_every": self.checkpoint_every,
                "keep_checkpoints": self.keep_checkpoints,
                "keep_weights": 2,
                "reissue_after_s": REISSUE_AFTER_S,
                "loggers": [],
                "simulated": {"group_s": 0.2, "update_s": 0.1},
                "evaluation": {"every": 2, "samples": 1},
            },
            "streams": {
                "lease_s": LEASE_S,
                "trim": self.trim,
                "max_attempts": self.max_attempts,
                "claim_check_bytes": int(self.claims),
                "archive": {
                    "enabled": self.archive,
                    "segment_mb": self.segment_mb,
                    "keep_choices": self.keep_choices,
                },
            },
        }
        if self.sample_s > LEASE_S:
            tree["reward"] |= {"delay_s": [0.0, self.sample_s]}
            tree["streams"]["drain_s"] = 1.0
        if self.per_group:
            tree["reward"]["per"] = "group"
        if self.sessions or self.parts in ENVIRONMENTS:
            use = f"{Path(__file__).with_name('guessing.py')}:{ENVIRONMENTS.get(self.parts, 'Guessing')}"
            tree["rollout"]["environment"] = {"use": use, "max_turns": 4}
            tree["rollout"]["simulated"] |= {"tokens": 3, "group_s": self.sample_s / 2}
        if self.mixed:
            tree["data"] |= {
                "train": [
                    {"name": "many", "path": str(folder / "many.jsonl"), "weight": 2},
                    {"name": "few", "path": str(folder / "few.jsonl"), "group_size": self.group_size + 1},
                ],
                "curriculum": {"revisit": 2, "easy": 0.7, "hard": 0.3, "focus": 0.5},
            }
            tree["trainer"]["algorithm"] = {"filter_zero_variance": True}
        return parse_config(tree, "the simulated run's config")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong. `how` has its parameters; `faults.py` says what the kinds mean."""

    at_s: float
    kind: str
    target: str = ""
    how: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        how = f", {self.how!r}" if self.how else ""
        return f"Fault({self.at_s!r}, {self.kind!r}, {self.target!r}{how})"


@dataclass(frozen=True)
class Schedule:
    """Runs the same whenever seed, setup and faults are the same."""

    seed: int
    setup: Setup = Setup()
    faults: tuple[Fault, ...] = ()

    def __repr__(self) -> str:
        default = asdict(Setup())
        setup = ", ".join(f"{k}={v!r}" for k, v in asdict(self.setup).items() if v != default[k])
        faults = "".join(f"\n        {fault!r}," for fault in self.faults)
        return f"Schedule(\n    {self.seed},\n    Setup({setup}),\n    ({faults}\n    ),\n)"

    @property
    def bounds(self) -> list[int]:
        """Every `max_staleness` that the run has had or will have."""
        changed = [fault.how["set"].get(BOUND) for fault in self.faults if fault.kind == "config"]
        return [self.setup.max_staleness, *(bound for bound in changed if bound is not None)]

    def without(self, fault: Fault) -> "Schedule":
        return replace(self, faults=tuple(item for item in self.faults if item is not fault))
