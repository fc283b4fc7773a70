"""A plain transformers model, for machines without vLLM: one batch of the waiting requests at a time.

A completion is returned when it ends, and not with its batch: it is scored while others are still generated.
A batch runs with one version from its first token to its last: `load` waits for the running batch, and
requests that come meanwhile wait for the load. All work on tensors happens on one thread of its own, so
the event loop never blocks and the model is never read while it is written.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tidemill.common.config.run import RunConfig
from tidemill.common.errors import ConfigError, EngineError, WeightsMismatchError
from tidemill.common.process.allocator import keep_freed_memory
from tidemill.common.run.model_config import check_sampling
from tidemill.common.run.routers import find_routers
from tidemill.common.weights.digest import Digest, is_additive
from tidemill.services.rollout.engines.checkpoint import check_files, checkpoint_tensors, prove, read_tensors
from tidemill.services.rollout.engines.engine import (
    Generation,
    GenerationRequest,
    StopTexts,
    WeightUpdate,
    share_cores,
)
from tidemill.services.rollout.engines.model import (
    ModelEngine,
    copy_weights,
    load_model,
    match_weights,
    open_model,
    pieces_of,
)
from tidemill.services.rollout.engines.random_numbers import request_key

if TYPE_CHECKING:
    from tidemill.services.rollout.engines.decoding import DecodingRow
    from tidemill.services.rollout.engines.held_weights import HeldWeights
    from tidemill.services.rollout.engines.images import PromptImages

Result = TypeVar("Result")
GATHER_S = 0.02
"""How long the first request of a batch waits for others."""


def choose_batch(queue: "Sequence[DecodingRow]", size: int) -> "list[DecodingRow]":
    """Which rows of the queue are decoded next, at most `size`: the first one, with those of the next two
    batches whose prompts are of like length, for shorter ones are padded. Urgent ones come before others.

    Prompts of 4, 20, 5 and 21 tokens in batches of two: those of 4 and 5, later those of 20 and 21.
    """
    # The first one is always taken, and so none waits for ever.
    candidates = sorted(queue[: 2 * size], key=lambda row: (not row.request.is_urgent, row.num_prompt))
    rank = candidates.index(queue[0])
    begin = max(0, min(rank // size * size, len(candidates) - size))
    return candidates[begin : begin + size]


class TransformersEngine(ModelEngine):
    stands_still = True

    def __init__(self, config: RunConfig, worker: str = "") -> None:
        self._config = config
        self._batch_size = config.rollout.max_num_seqs
        self._seed = config.seed
        self._model: Any = None
        self._one_length = False
        """Whether prompts of different lengths have to be decoded apart."""
        self._images: PromptImages | None = None
        self._held: HeldWeights | None = None
        self._digest: Digest | None = None
        self._queue: list[DecodingRow] = []
        self._arrived = asyncio.Event()
        # Held by a batch or by a load; asyncio's locks are fair, so a load comes after one batch.
        self._model_in_use = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._runner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        from tidemill.services.rollout.engines.decoding import RouteRecorder
        from tidemill.services.rollout.engines.states import is_recurrent
        from tidemill.services.rollout.engines.trial import takes_all_lengths

        num_threads = share_cores(self._config.rollout)
        self._folder = await asyncio.to_thread(open_model, self._config.model)
        check_sampling(self._folder.model_type)

        def load() -> Any:
            import torch

            torch.set_num_threads(num_threads)  # where torch was imported before, it has read another number
            model = load_model(self._config.model, self._config.images is not None)
            if model.device.type == "cpu":
                keep_freed_memory()
            return model

        if self._config.images is not None:
            from tidemill.services.rollout.engines.images import PromptImages

            self._images = await asyncio.to_thread(PromptImages, self._config)
        self._model = await self._on_thread(load)
        if is_recurrent(self._model):
            if self._images is not None:
                raise ConfigError(
                    f"model.path: pictures with a {self._folder.model_type}, which keeps recurrent states, "
                    "are not supported. Take a model of another kind, or leave out the section `images`"
                )
            self._one_length = not await self._on_thread(lambda: takes_all_lengths(self._model))
        records = self._config.rollout.record_routes and self._folder.is_mixture
        self._recorder = RouteRecorder([router for _, router in find_routers(self._model)] if records else ())
        self.version = 0
        self._runner = asyncio.create_task(self._run(), name="transformers-engine")

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate one completion in the next batch. Cancelling the task drops it from the batch."""
        from tidemill.services.rollout.engines.decoding import DecodingRow

        self._running_model()
        self.folder.check(request)
        pixels = None
        if self._images is not None:
            pixels = await self._images.pixels_of(request)
            self._running_model()  # it may have been closed meanwhile
        # A caller that is cancelled cancels `done`, which the decoding thread looks at.
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Generation] = loop.create_future()
        key = request_key(self._seed, request.request_id)
        stops = StopTexts(request.sampling.stop, self.decode)
        row = DecodingRow(request, key, stops, done, pixels=pixels)
        if self._config.rollout.sampling_masks and request.sampling.is_filtered:
            row.kept = []
        on_tokens = request.on_tokens
        if on_tokens is not None:

            def report(so_far: Generation) -> None:
                # A row without a caller is decoded until it pays to drop it.
                if not done.done():
                    on_tokens(so_far)

            # Copied on the decoding thread, which goes on to add tokens.
            row.report = lambda: loop.call_soon_threadsafe(report, self._so_far(row))
        if request.is_urgent:
            # Behind earlier urgent ones: in front of them, those would wait as long as others come.
            num_urgent = sum(waiting.request.is_urgent for waiting in self._queue)
            self._queue.insert(num_urgent, row)
        else:
            self._queue.append(row)
        self._arrived.set()
        self.num_running += 1
        try:
            return await done
        finally:
            self.num_running -= 1

    @property
    def can_patch(self) -> bool:
        """Whether it is known what the model holds, tensor by tensor of a checkpoint."""
        return self._held is not None

    async def load(
        self, version: int, files: Sequence[Path], deltas: Sequence[Sequence[Path]] = (), digest: str = ""
    ) -> WeightUpdate:
        """Read beside the running batch, and write the weights before the next one.

        Raises:
            WeightsMismatchError: deltas cannot be proven. Nothing has changed.
            WeightsError: nothing has changed.
            EngineError: the weights may be half replaced; the engine is closed.
        """
        started = time.perf_counter()
        self._running_model()
        check_files(files, deltas)
        # On another thread than the model's: the files are read while a batch decodes.
        write = await asyncio.to_thread(self._stage, files, deltas, digest)
        async with self._model_in_use:
            paused = time.perf_counter()
            try:
                await self._on_thread(write)
            except Exception as error:
                # Within the lock: the next batch would go on with weights that are half replaced.
                await self.close()
                raise EngineError(
                    f"version {version} could not be written into the model: {error!r}; restart this worker"
                ) from error
            # Within the lock: the next batch stamps its tokens with it.
            self.version = version
        finished = time.perf_counter()
        return WeightUpdate(version, load_s=finished - started, paused_s=finished - paused)

    async def sleep(self) -> None:
        """Stand still after the running batch. The model stays where it is."""
        await self._model_in_use.acquire()

    async def wake(self) -> None:
        self._model_in_use.release()

    async def close(self) -> None:
        """End the running batch early and free the model. Waiting requests fail."""
        runner = self._runner
        self._runner = None
        # Before anything is awaited: requests and updates that come from now on are refused.
        self._model = None
        if runner is not None:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
        self._fail(self._queue, EngineError("the engine was closed"))
        self._queue = []
        # After their failure: the batch on the thread then ends at its next token, for no caller waits.
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self) -> None:
        while True:
            await self._gather()
            async with self._model_in_use:
                # Taken within the lock: what came during an update joins this batch.
                batch = choose_batch(self._queue, self._batch_size)
                chosen = set(batch)
                self._queue = [row for row in self._queue if row not in chosen]
                if not self._queue:
                    self._arrived.clear()
                try:
                    await self._decode(batch)
                except asyncio.CancelledError:
                    self._fail(batch, EngineError("the engine was closed"))
                    raise
                except EngineError as error:
                    self._fail(batch, error)
                except Exception as error:
                    self._fail(batch, EngineError(f"the model failed: {error!r}; restart this worker"))

    async def _gather(self) -> None:
        """Wait for a first request, then a little for others, unless it has waited or a batch is full."""
        self._queue = [row for row in self._queue if not row.done.done()]
        if not self._queue:
            self._arrived.clear()
        await self._arrived.wait()
        if len(self._queue) < self._batch_size:
            await asyncio.sleep(max(0.0, self._queue[0].since + GATHER_S - time.monotonic()))

    async def _decode(self, batch: "list[DecodingRow]") -> None:
        from tidemill.services.rollout.engines.decoding import decode_batch

        model = self._running_model()
        eos_ids = frozenset(self.folder.eos_ids)
        recorder = self._recorder
        rows = [row for row in batch if not row.done.done()]
        if not rows:
            return
        one_length = self._one_length
        images = self._images
        loop = asyncio.get_running_loop()

        def answer_soon(finished: "Sequence[DecodingRow]") -> None:
            # Made on this thread: an error here fails the batch, and one in a callback would reach no caller.
            answers = [(row, self._so_far(row)) for row in finished]
            # The last ones before this batch ends, and so before a load that waits for it.
            loop.call_soon_threadsafe(self._answer, answers)

        def decode() -> None:
            decode_batch(model, rows, eos_ids, recorder, one_length, images, answer_soon)

        await self._on_thread(decode)

    def _answer(self, answers: "Sequence[tuple[DecodingRow, Generation]]") -> None:
        for row, generation in answers:
            if not row.done.done():
                row.done.set_result(generation)

    def _so_far(self, row: "DecodingRow") -> Generation:
        # The batch holds the lock, so no load has changed the version since its first token.
        spans = ((self.version, 0),)
        finish = row.finish or "length"
        return Generation([*row.token_ids], [*row.logprobs], spans, finish, choices=row.choices)

    def _stage(
        self, files: Sequence[Path], deltas: Sequence[Sequence[Path]], digest: str
    ) -> Callable[[], None]:
        """Read a version, or prove that deltas alone lead to `digest`. Returns a function that writes it."""
        if files:
            return self._stage_full(files, deltas, digest)
        from tidemill.services.rollout.engines.held_weights import apply

        if self._held is None:
            raise WeightsMismatchError("it is not known what the model holds, so no delta can be proven")
        change, changes = self._held.stage(deltas)
        proven = prove(self._digest, change, digest)

        def write() -> None:
            wrong = apply(changes)
            if wrong:
                raise EngineError(f"{wrong:,} values were not there when they were read back")
            self._digest = proven

        return write

    def _stage_full(
        self, files: Sequence[Path], deltas: Sequence[Sequence[Path]], digest: str
    ) -> Callable[[], None]:
        # All that needs the files comes before the write: they may be pruned at any time, and what does not
        # fit changes nothing.
        model = self._running_model()
        base = read_tensors(files)
        pairs = match_weights(model, dict(checkpoint_tensors(base, deltas)))
        held = None
        if is_additive(digest):
            with suppress(ValueError):  # the model has other names than its files: it gets whole versions
                held = pieces_of(model, [info for info, _ in base.values()])

        def write() -> None:
            copy_weights(pairs)
            self._held = held
            self._digest = Digest.parse(digest) if held is not None else None

        return write

    def _running_model(self) -> Any:
        if self._model is None:
            raise EngineError("the transformers engine is not running: it was closed, or never started")
        return self._model

    def _fail(self, batch: "Sequence[DecodingRow]", error: EngineError) -> None:
        for row in batch:
            if not row.done.done():
                row.done.set_exception(error)

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
