"""vLLM in the rollout worker's process, with weights replaced while requests run.

What an update guarantees: every token of a completion is labelled, by the engine's scheduler itself,
with the version that sampled it; requests that have started keep their KV cache and go on with the new
weights; requests that have not started do so on nothing that older weights computed. The last point
takes two measures, because a prompt's KV cache is shared: the cache is keyed by version, and a request
that still waits inside the engine is taken back at an update and submitted again under the new key.

Logprobs are those of the processed distribution, so they equal the trainer's at the same temperature.
"""

import asyncio
import gc
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.common.config.run import RunConfig
from tidemill.common.errors import EngineError, WeightsError
from tidemill.services.rollout.engines.engine import Generation, GenerationRequest, WeightUpdate, check_ids
from tidemill.services.rollout.engines.model import ModelFolder, open_model
from tidemill.services.rollout.engines.vllm_launch import start_vllm

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

STAGING_POLL_S = 0.005

FIRST_AND_LAST = 1 << 30
"""Tokens between two outputs of a request. None has as many, so it reports its first token and its end."""

URGENT, NORMAL = 0, 1
"""vLLM's priorities: the lower one is scheduled first."""


class VllmEngine:
    """One vLLM engine: its scheduler and its workers are child processes of this one."""

    def __init__(self, config: RunConfig, worker: str = "") -> None:
        self._config, self._worker = config, worker
        self._folder: ModelFolder | None = None
        self._llm: AsyncLLM | None = None
        self._version = -1
        self._num_running = 0
        self._num_submitted = 0
        # Requests inside vLLM without a token so far, and whether an update has taken them back.
        self._unstarted: dict[str, bool] = {}
        self._updating = asyncio.Lock()

    @property
    def version(self) -> int:
        """The version whose weights are loaded; -1 before `start`."""
        return self._version

    @property
    def num_running(self) -> int:
        """Requests accepted and not finished, those that wait inside vLLM included."""
        return self._num_running

    async def start(self) -> None:
        """Start vLLM with the starting model.

        Raises:
            ConfigError: vLLM is not installed, or model and options do not fit it.
            EngineError: vLLM's processes did not come up; their own output says why.
        """
        self._folder = await asyncio.to_thread(open_model, self._config.model)
        await asyncio.to_thread(self._launch)
        await self._running_llm().update_weight_version("0")
        self._version = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate one completion. Cancelling the task aborts the request.

        Raises:
            ValueError: the request cannot be served at all.
            EngineError: vLLM died, or gave the request up.
        """
        self._running_folder().check(request)
        self._num_running += 1
        try:
            output = None
            while output is None:
                output = await self._submit(
                    request.prompt_ids,
                    self._sampling_params(request),
                    request.request_id,
                    priority=URGENT if request.is_urgent else NORMAL,
                )
        finally:
            self._num_running -= 1
        return _as_generation(request, output.outputs[0], output.num_cached_tokens)

    async def load(self, version: int, files: Sequence[Path]) -> WeightUpdate:
        """Read `files` while generation goes on, then pause it and replace the weights.

        Raises:
            WeightsError: a file cannot be read; nothing has changed.
            EngineError: the weights may be half replaced; the engine is closed.
        """
        started = time.perf_counter()
        async with self._updating:
            await self._stage(files)
            try:
                paused_s = await self._swap(version)
            except Exception as error:
                await self.close()
                raise EngineError(f"version {version} could not be loaded into vLLM: {error!r}") from error
        return WeightUpdate(version, load_s=time.perf_counter() - started, paused_s=paused_s)

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        """Logprobs of the completion at temperature 1, computed without the prefix cache.

        Raises:
            ValueError: prompt and completion fill the context; vLLM needs room for one more token.
        """
        from vllm import SamplingParams

        folder, token_ids = self._running_folder(), [*prompt_ids, *completion_ids]
        if len(token_ids) >= folder.max_model_len:
            raise ValueError(
                f"{len(token_ids)} tokens cannot be scored: they and one more that vLLM samples exceed "
                f"model.max_model_len {folder.max_model_len}; probe with a shorter completion"
            )
        check_ids(token_ids, folder.vocab_size)
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            skip_reading_prefix_cache=True,
        )
        async with self._updating:  # no update may fall between the chunks of one prefill
            final = await self._submit(token_ids, params, "score")
        assert final is not None, "an update ran in spite of the lock"
        logprobs: Any = final.prompt_logprobs
        # The first token has no logprob, each later one exactly one.
        return [float(value) for value in logprobs.logprobs[len(prompt_ids) - 1 :]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens."""
        return self._running_folder().decode(token_ids)

    async def sleep(self) -> None:
        """Move the weights to the CPU's memory and drop the KV cache. Only on GPUs."""
        await self._running_llm().sleep(level=1)

    async def wake(self) -> None:
        """Move them back."""
        await self._running_llm().wake_up()

    async def close(self) -> None:
        """End vLLM's processes. Running requests fail."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        from vllm.v1.engine.exceptions import EngineDeadError

        llm.output_processor.propagate_error(EngineDeadError())
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # else it reports the end of the core as a crash
        await asyncio.to_thread(llm.shutdown)
        await asyncio.sleep(0)  # lets the cancelled output handler let go of the engine
        del llm
        # Else its destructor runs when the interpreter is half gone, and complains.
        gc.collect()

    def _launch(self) -> None:
        """Runs on a thread. Returning the engine would leave a reference to it in that thread's frames,
        which vLLM's traceback cycles keep alive, and it would outlive `close`.
        """
        self._llm = start_vllm(self._config, self._worker)

    async def _submit(
        self, token_ids: Sequence[int], params: "SamplingParams", request_id: str, priority: int = 0
    ) -> "RequestOutput | None":
        """Run a request to its last output; None where an update took it back before its first token."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        llm = self._running_llm()
        # vLLM's ids are single use, and a request that is taken back comes again.
        self._num_submitted += 1
        engine_id = f"{request_id}#{self._num_submitted}"
        prompt = tokens_input(list(token_ids), cache_salt=f"v{self._version}")
        self._unstarted[engine_id] = False
        final: RequestOutput | None = None
        try:
            async with aclosing(llm.generate(prompt, params, engine_id, priority=priority)) as outputs:
                async for output in outputs:
                    if self._unstarted.pop(engine_id, False):
                        return None
                    final = output
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineError(
                f"vLLM failed on request {engine_id}: {error!r}; restart this worker"
            ) from error
        finally:
            self._unstarted.pop(engine_id, None)
        assert final is not None, "vLLM ended a request without an output"
        return final

    def _sampling_params(self, request: GenerationRequest) -> "SamplingParams":
        """What vLLM needs to sample the request, and to report no more than that."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        # No seed: on CPU a seeded request crashes the sampler.
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=list(self._running_folder().eos_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            stream_interval=FIRST_AND_LAST,
        )

    async def _stage(self, files: Sequence[Path]) -> None:
        """Have every worker read the files into its memory; generation goes on meanwhile."""
        llm = self._running_llm()
        missing = [str(file) for file in files if not file.is_file()]
        if missing or not files:
            raise WeightsError(f"weight files missing: {', '.join(missing) or 'none were given'}")
        try:
            await llm.collective_rpc("tidemill_stage", args=([str(file) for file in files],))
            # The files are read in other processes, which have no way to wake this one.
            while not all(await llm.collective_rpc("tidemill_is_staged")):  # noqa: ASYNC110
                await asyncio.sleep(STAGING_POLL_S)
        except Exception as error:
            if llm.errored:
                raise EngineError("vLLM died while it read new weights; restart this worker") from error
            raise WeightsError(f"cannot read the weights in {files[0].parent}: {error}") from error

    async def _swap(self, version: int) -> float:
        """Pause, copy, label, resume; returns the seconds that generation stood still.

        The order is the point: a label set before the last batch of the old weights has drained would
        stamp its tokens with the new version.
        """
        llm = self._running_llm()
        # The core's own call returns once the last batch has drained. AsyncLLM.pause_generation is the
        # same, followed by a courtesy sleep of 20 ms.
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        paused = time.perf_counter()
        await llm.collective_rpc("tidemill_apply")
        await llm.update_weight_version(str(version))
        self._version = version
        # Those that were submitted during the pause are among them: nothing starts before the resume.
        taken_back = list(self._unstarted)
        self._unstarted.update(dict.fromkeys(taken_back, True))
        await llm.abort(taken_back)
        await llm.resume_generation()
        return time.perf_counter() - paused

    def _running_llm(self) -> "AsyncLLM":
        if self._llm is None:
            raise EngineError("the vLLM engine is not running: it was closed, or never started")
        return self._llm

    def _running_folder(self) -> ModelFolder:
        if self._folder is None:
            raise EngineError("the vLLM engine was never started")
        return self._folder


def _as_generation(
    request: GenerationRequest, output: "CompletionOutput", num_cached_tokens: int | None
) -> Generation:
    """Check and convert a finished output of vLLM."""
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(
            f"vLLM ended request {request.request_id} with {output.finish_reason!r}; restart this worker"
        )
    logprobs: Any = output.logprobs
    spans = output.weight_versions
    if not spans or len(logprobs.logprobs) != len(output.token_ids):
        raise EngineError(
            f"vLLM gave {len(output.token_ids)} tokens of request {request.request_id} with "
            f"{len(logprobs.logprobs)} logprobs and versions {spans}; expected as many, and a version"
        )
    return Generation(
        token_ids=list(output.token_ids),
        logprobs=list(logprobs.logprobs),
        spans=tuple((int(span.version), span.start) for span in spans),
        finish="stop" if output.finish_reason == "stop" else "length",
        num_cached_tokens=-1 if num_cached_tokens is None else num_cached_tokens,
    )
