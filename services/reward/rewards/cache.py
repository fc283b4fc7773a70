"""Cache of rewards in Redis, so that no replay, retry or takeover pays a judge twice.

The key is a digest of all that decides the result: the reward's name, config and source, what its servers or
its router's serve, lane, prompt, completion, ground truth and the row's other columns. Only results are kept,
never failures. Their total size is bounded; the least recently used go first. In one worker, equal requests
share one call.
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.servers import ServersConfig
from tidemill.common.redis import reward_scripts
from tidemill.common.redis.broker import Broker
from tidemill.common.telemetry import metrics
from tidemill.common.wire.codec import as_plain, pack
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.outcome import RewardOutcome
from tidemill.services.reward.sample import RewardSample

_NOT_OF_THE_RESULT = {"weight", "applies_to", "timeout_s", "max_attempts", "backoff_s", "max_concurrent"}
_NOT_OF_THE_RESULT |= {"on_failure", "cache", "sources"}
"""Fields of a reward that do not change what it returns."""
_OF_THE_RESULT: dict[str, Any] = {"base_urls": True, "model": True, "local": {"command", "args"}}
"""Fields of its servers that do."""


def version_of(name: str, config: NamedRewardConfig, servers: ServersConfig | None = None) -> str:
    """A digest of all that decides what a reward returns: the source file of its function, and what its
    servers serve, included."""
    tree = config.model_dump(mode="json", exclude=_NOT_OF_THE_RESULT)
    if servers is not None:
        tree["served"] = servers.model_dump(mode="json", include=_OF_THE_RESULT)
    digest = hashlib.blake2b(json.dumps([name, tree]).encode(), digest_size=16)
    for text in _texts(tree):
        file = _file_of(text)
        if file:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(value)


def _file_of(text: str) -> Path | None:
    """The file that a value of the config names: a source file, a template, an installed module."""
    origin = text.rpartition(":")[0] or text
    if len(origin) > 1024 or "\n" in origin or "\0" in origin:
        return None
    if Path(origin).is_file():
        return Path(origin)
    module, colon, _ = text.rpartition(":")
    if colon and module.replace(".", "").replace("_", "").isalnum():
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(module)
            if spec and spec.origin and Path(spec.origin).is_file():
                return Path(spec.origin)
    return None


class RewardCache:
    def __init__(self, broker: Broker, keys: Keys, max_bytes: int) -> None:
        self._broker = broker
        self._rewards, self._uses, self._totals = keys.reward_cache
        self._max_bytes = max_bytes
        self._calls: dict[str, asyncio.Task[RewardOutcome]] = {}

    async def get_or_make(
        self, version: str, sample: RewardSample, make: Callable[[], Awaitable[RewardOutcome]]
    ) -> RewardOutcome:
        """The cached outcome for this sample, else that of `make`, which is kept if it succeeded.

        Cancelling one caller does not cancel the call for others that wait for it.
        """
        digest = _digest(version, sample)
        call = self._calls.get(digest)
        if call is not None:
            metrics.REWARD_CACHE.labels("shared").inc()
        else:
            call = asyncio.create_task(self._look_or_make(digest, make))
            self._calls[digest] = call
            # From here on what succeeded is in Redis, and what failed is tried again.
            call.add_done_callback(lambda _: self._calls.pop(digest))
        return await asyncio.shield(call)

    async def _look_or_make(self, digest: str, make: Callable[[], Awaitable[RewardOutcome]]) -> RewardOutcome:
        cached = await reward_scripts.cache_get(
            self._broker, rewards=self._rewards, uses=self._uses, totals=self._totals, digest=digest
        )
        if cached is not None:
            metrics.REWARD_CACHE.labels("hit").inc()
            return RewardOutcome.from_wire(msgpack.unpackb(cached))
        metrics.REWARD_CACHE.labels("miss").inc()
        outcome = await make()
        if outcome.is_ok:  # a failure is worth another attempt
            # Attempts belong to this call, not to later ones that find the result.
            await reward_scripts.cache_put(
                self._broker,
                rewards=self._rewards,
                uses=self._uses,
                totals=self._totals,
                digest=digest,
                payload=pack(replace(outcome, tries=[]).to_wire(), as_plain),
                max_bytes=self._max_bytes,
            )
        return outcome


def _digest(version: str, sample: RewardSample) -> str:
    """Digest of all that decides the result. msgpack stores lengths, so no two samples give equal bytes."""
    trajectory = sample.trajectory
    last = sample.last
    parts = [
        version,
        sample.is_evaluation,
        trajectory.data_source,
        trajectory.prompt_text,
        trajectory.own_text,
        trajectory.text,
        last.completion_ids.tobytes(),
        trajectory.ground_truth,
        trajectory.extra,
    ]
    if trajectory.thought is not None:
        parts.append(("thought", trajectory.thought))
    if trajectory.images:
        parts.append(("images", [image.digest for image in trajectory.images]))
    session = trajectory.session
    if session is not None:
        parts += [session.environment, session.messages, session.reward, session.metrics, session.end]
        parts += [sample.turn_rewards, last.mask.tobytes()]
        if session.row_images is not None:
            parts.append(("row_images", [image.digest for image in session.row_images]))
    for segment in trajectory.segments[:-1]:  # of a session whose history was rewritten
        parts += [segment.prompt_ids.tobytes(), segment.completion_ids.tobytes(), segment.mask.tobytes()]
    return hashlib.blake2b(pack(parts, str), digest_size=16).hexdigest()
