"""What is recorded: short runs of small models, one for each thing that a run may have.

Each is an example of the commit with a few settings over its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

COMMIT = "80bb1c51201e5b354a6435710373d21e55ea4ee6"
"""The code that records the runs. Later code has to train their steps to the same weights, bit by bit."""

STEPS = 4
SHORT = {
    "trainer.steps": STEPS,
    "trainer.groups_per_step": 8,
    "trainer.group_size": 4,
    # Steps 0 and 1 are replayed from the starting model, and steps 2 and 3 from a checkpoint of the commit.
    "trainer.checkpoint_every": 2,
    "trainer.keep_checkpoints": STEPS,
    "trainer.micro_batch_tokens": 128,
    "trainer.deterministic": "true",
    "trainer.loggers": "[]",
    "data.eval": "{}",
    "expect.eval_gain": "null",
}
"""Settings of all recordings. The small micro-batches make several of them in each step."""


@dataclass(frozen=True)
class Recording:
    """One run. In its settings, `{source}` is a folder with the commit's files, and `{models}` one with the
    models that its scripts have made."""

    name: str
    settings: Mapping[str, str | int] = field(default_factory=dict)
    example: str = "arith"
    above: Mapping[str, float] = field(default_factory=dict)
    """Metrics that show that the run had what it is recorded for: each is above this number in some step."""

    def config(self, source: Path) -> Path:
        """The example's file."""
        return source / "examples" / self.example / "config.yaml"

    def overrides(self, source: Path, models: Path) -> list[str]:
        """Words for `--set`."""
        settings = SHORT | dict(self.settings)
        folders = {"{source}": str(source), "{models}": str(models)}
        words = []
        for name, value in settings.items():
            text = str(value)
            for placeholder, folder in folders.items():
                text = text.replace(placeholder, folder)
            words.append(f"{name}={text}")
        return words


MODEL_SCRIPTS = {
    "teacher": ("examples/distill/make_teacher.py", "--steps", "20"),
    "moe": ("examples/moe/make_model.py", "--steps", "10"),
}
"""Models that scripts of the examples make, by the name of their folder."""

PROMPTS = "{name: sums, path: '{source}/examples/arith/train.jsonl', weight: 1}"
DEMONSTRATIONS = (
    "{name: shown, kind: demonstrations, path: '{source}/examples/sft/demonstrations.jsonl', weight: 1}"
)
AGENT = "{source}/tests/support/agents.py:forking"
"""Goes on once and asks another question: two segments, the first of two turns."""

RECORDINGS = (
    Recording("grpo", above={"staleness/max": 0, "micro_batches": 1}),
    Recording(
        "dropped_groups",
        {"trainer.algorithm": "{preset: dapo, filter_zero_variance: true}"},
        above={"groups_dropped": 0},
    ),
    Recording(
        "several_updates",
        {
            "trainer.mini_batches": 2,
            "trainer.passes": 2,
            "trainer.algorithm": "{preset: grpo, top_entropy_quantile: 0.5}",
        },
        above={"mini_batches": 1, "rollout_kl": 0},
    ),
    Recording(
        "lora",
        {
            "trainer.lora": "{rank: 4, alpha: 8}",
            "trainer.optimizer": "{lr: 2.0e-3}",
            "trainer.algorithm": "{reference: {model: frozen}, kl: {place: loss, coefficient: 0.01}}",
        },
        above={"kl": 0},
    ),
    Recording(
        "value_head",
        {"trainer.algorithm": "{preset: ppo, value: {lr: 1.0e-3}}"},
        above={"value/loss": 0},
    ),
    Recording(
        "critic",
        {
            "trainer.mini_batches": 2,
            "trainer.algorithm": "{preset: ppo, value: {lr: 1.0e-3, model: own}, reference: {model: frozen},"
            " kl: {place: reward, estimator: k1, coefficient: 0.01}}",
        },
        above={"value/loss": 0, "kl": 0},
    ),
    Recording(
        "teacher",
        {"servers.teacher.model": "{models}/teacher", "trainer.groups_per_step": 32, "trainer.group_size": 1},
        example="distill",
        above={"teacher/teacher/reverse_kl": 0},
    ),
    Recording(
        "demonstrations",
        {"data.train": f"[{DEMONSTRATIONS}, {PROMPTS}]"},
        above={"imitation/token_share": 0, "reward": 0},
    ),
    Recording(
        "sampling_masks",
        {"rollout.sampling": "{max_tokens: 16, temperature: 0.9, top_p: 0.9, top_k: 8, min_p: 0.02}"},
        above={"logprob_gap/unmasked_mean": 0},
    ),
    Recording(
        "routes",
        {"model.path": "{models}/moe", "rollout.sampling.top_p": 1.0},
        example="moe",
        above={"routes/changed_tokens": 0},
    ),
    Recording("game", {"trainer.mini_batches": 2}, example="guess", above={"sessions/mean_turns": 1}),
    Recording(
        "forks",
        {
            "rollout.environment": f"{{use: agent, agent: '{AGENT}', processes: 2}}",
            "reward": "{workers: 1, rewards: {own: {environment: true}}}",
            "model.max_model_len": 128,
        },
        above={"sessions/mean_segments": 1, "sessions/mean_turns": 2},
    ),
    Recording("two_ranks", {"trainer.num_ranks": 2, "trainer.mini_batches": 2}, above={"mini_batches": 1}),
)
"""In the order in which they are made."""
