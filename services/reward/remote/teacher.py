"""A teacher's logprobs of what the policy sampled: exact for every token, or an error, never a guess.

One attempt is one request for one sample: all its segments as prompts of OpenAI's completions API, with
vLLM's `prompt_logprobs`; ids are sent as they were sampled. Logprobs are those of temperature 1. A prompt of
the teacher's own becomes ids in the server's `/tokenize`; chats are rendered by the teacher's chat template.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.servers import ServersConfig
from tidemill.common.wire.arrays import Bits, Float32, Int32
from tidemill.services.reward.outcome import AttemptError, Reward, RewardOutcome
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.remote.faults import CHARS_PER_TOKEN
from tidemill.services.reward.remote.templates import SampleTemplate
from tidemill.services.reward.sample import IDS_READING, ChatMessages, RewardSample, lines_of

Ids = Sequence[int] | Int32

LOGPROB = "logprob"
"""Component: the mean of the teacher's logprobs over the tokens that the model sampled."""
MAX_PROMPTS = 4096
"""Most prompts of the teacher's own whose ids are cached: all samples of a group have the same one."""


class TeacherPrompt:
    """The prompt that a teacher reads in place of the policy's."""

    def __init__(self, name: str, reward: NamedRewardConfig) -> None:
        """Raises ConfigError: its template is invalid."""
        config = reward.teacher
        assert config is not None
        self._name = name
        self._config = config
        where = f"reward.rewards.{name}.teacher.template"
        self._template = SampleTemplate(config.template, where) if config.template else None

    def of(self, sample: RewardSample) -> str | ChatMessages:
        """The prompt: plain text, or chat messages for the teacher's template.

        Raises:
            AttemptError: the row lacks what the prompt is made of.
        """
        if self._template is not None:
            prompt: Any = self._template.render(sample)
        else:
            prompt = sample.trajectory.extra.get(self._config.prompt_column)
        if isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
            return prompt
        if not isinstance(prompt, str) or not prompt:
            columns = ", ".join(sorted(sample.trajectory.extra)) or "none"
            if prompt is None:
                problem = "is not there"
            elif prompt in ("", []):
                problem = "is empty"
            else:
                problem = "is no prompt"
            raise AttemptError(
                f"the prompt of teacher {self._name} {problem}: expected text or chat messages in column "
                f"{self._config.prompt_column or '(template)'}; the row's columns are {columns}",
                is_final=True,
                kind="prompt",
            )
        return [{"role": "user", "content": prompt}] if self._config.chat else prompt


class TeacherRow:
    """One segment as the teacher reads it: `ids`, of which those at `places` are what the model sampled."""

    def __init__(self, prompt_ids: Ids, completion_ids: Ids, mask: Bits | Sequence[bool]) -> None:
        # Tokens after the last sampled one do not influence its logprob, and are not sent.
        chosen = np.flatnonzero(mask)
        self.ids = [*map(int, prompt_ids), *map(int, completion_ids[: chosen[-1] + 1 if len(chosen) else 0])]
        self.places = [len(prompt_ids) + int(index) for index in chosen]


class TeacherReward(Reward):
    def __init__(self, name: str, config: NamedRewardConfig, dependencies: RewardDependencies) -> None:
        assert config.teacher is not None
        self._servers = dependencies.servers(config.servers)
        self._timeout_s = config.timeout_s
        self._prompt = TeacherPrompt(name, config) if config.teacher.has_own_prompt else None
        self._ids_by_prompt: dict[str, list[int]] = {}

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """Ask the teacher once. Raises AttemptError: no replica gave all logprobs, or they make no sense."""
        rows = [row for row in await self._rows(sample) if row.places]
        if not rows:  # the model sampled nothing: there is nothing to be taught
            return RewardOutcome(None, teacher_logprobs=b"")
        body: dict[str, Any] = {
            "prompt": [row.ids for row in rows],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        logprobs = await self._servers.ask_json(
            "/v1/completions",
            body,
            lambda answer: read_logprobs(answer, rows),
            lane=sample.lane,
            tokens=sum(len(row.ids) + 1 for row in rows),
            timeout_s=self._timeout_s,
        )
        mean = float(np.mean(logprobs, dtype=np.float64))
        return RewardOutcome(None, {LOGPROB: mean}, teacher_logprobs=logprobs.astype("<f4").tobytes())

    async def _rows(self, sample: RewardSample) -> list[TeacherRow]:
        """All segments as the teacher reads them. A prompt of its own replaces the shortest prompt of the
        segments (the row's, with what an environment added before the model's first token), with which all
        of them have to begin.

        Raises:
            AttemptError: a rewritten history does not begin with the row's prompt.
        """
        if self._prompt is None:
            return [TeacherRow(s.prompt_ids, s.completion_ids, s.mask) for s in sample.trajectory.segments]
        teachers_prompt = await self._ids(self._prompt.of(sample), sample)
        # Segments are in the order of their last answers: the one that the session began with may be any.
        old = min((segment.prompt_ids for segment in sample.trajectory.segments), key=len)
        rows = []
        for number, segment in enumerate(sample.trajectory.segments):
            if not np.array_equal(segment.prompt_ids[: len(old)], old):
                raise AttemptError(
                    f"segment {number} of the session does not begin with the shortest prompt: there is "
                    "no place for the teacher's own; leave prompt_column and template out for such sessions",
                    is_final=True,
                    kind="prompt",
                )
            prompt_ids = [*teachers_prompt, *segment.prompt_ids[len(old) :].tolist()]
            rows.append(TeacherRow(prompt_ids, segment.completion_ids, segment.mask))
        return rows

    async def _ids(self, prompt: str | ChatMessages, sample: RewardSample) -> list[int]:
        key = prompt if isinstance(prompt, str) else json.dumps(prompt)
        cached = self._ids_by_prompt.get(key)
        if cached is not None:
            return cached
        asked: dict[str, Any] = {"prompt": prompt}
        if not isinstance(prompt, str):
            asked = {"messages": prompt, "add_generation_prompt": True}
        ids = await self._servers.ask_json(
            "/tokenize",
            asked,
            read_ids,
            lane=sample.lane,
            tokens=len(key) // CHARS_PER_TOKEN,
            timeout_s=self._timeout_s,
        )
        if len(self._ids_by_prompt) >= MAX_PROMPTS:
            self._ids_by_prompt.clear()
        self._ids_by_prompt[key] = ids
        return ids


def read_logprobs(answer: dict[str, Any], rows: Sequence[TeacherRow]) -> Float32:
    """The logprobs at the rows' places, end to end, from an answer of the completions API.

    Raises:
        ValueError: the answer has not one finite logprob, at most 0, for each of them.
    """
    # Servers may give them in the order in which they were done.
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    if len(choices) != len(rows):
        raise ValueError(f"{len(choices)} choices for {len(rows)} prompts")
    sampled_logprobs: list[float] = []
    for choice, row in zip(choices, rows, strict=True):
        of_prompt = choice.get("prompt_logprobs")
        if of_prompt is None or len(of_prompt) != len(row.ids):
            count = "no" if of_prompt is None else str(len(of_prompt))
            raise ValueError(f"{count} prompt_logprobs for {len(row.ids)} tokens")
        for position in row.places:
            if of_prompt[position] is None:
                raise ValueError(f"no logprob for token {position}")
            sampled_logprobs.append(float(of_prompt[position][str(row.ids[position])]["logprob"]))
    # A little above 0 is rounding.
    bad = [value for value in sampled_logprobs if not math.isfinite(value) or value > 1e-3]
    if bad:
        raise ValueError(f"a logprob of {bad[0]}")
    return np.asarray(sampled_logprobs, dtype=np.float32)


def read_ids(answer: dict[str, Any]) -> list[int]:
    """The token ids in an answer of `/tokenize`. Raises ValueError: there are none."""
    ids = [int(token) for token in answer["tokens"]]
    if not ids:
        raise ValueError("the prompt has no tokens")
    return ids


def check_teacher(name: str, config: NamedRewardConfig, _: bool = False) -> None:
    """Raises ConfigError: the template of its prompt is invalid."""
    TeacherPrompt(name, config)


def teacher_reading(name: str, config: NamedRewardConfig, sample: RewardSample, _: ServersConfig) -> str:
    """What the teacher reads about a sample. Raises AttemptError: the row lacks a part of its prompt."""
    assert config.teacher is not None
    if not config.teacher.has_own_prompt:
        return IDS_READING
    prompt = TeacherPrompt(name, config).of(sample)
    return (prompt if isinstance(prompt, str) else lines_of(prompt) + "\n") + sample.trajectory.text
