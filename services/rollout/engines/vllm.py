"""vLLM in the rollout worker's process, with weights replaced while requests run.

What an update guarantees: every token of a completion is labelled, by the engine's scheduler itself,
with the version that sampled it; requests that have started keep their KV cache and go on with the new
weights; requests that have not started use nothing that older weights computed. The last point takes
two measures, because a prompt's KV cache is shared: the cache is keyed by version, and a request that
still waits inside the engine is taken back at an update and submitted again under the new key. The features
that the tower computes of a picture are shared and keyed in the same way.

Pictures go in as tensors of our own processor. vLLM's would make other pixels than the trainer's, and expand
the placeholders a second time.

Logprobs are those of the processed distribution, so they equal the trainer's at the same temperature.
"""

import asyncio
import gc
import json
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.common.config.run import RunConfig
from tidemill.common.errors import ConfigError, EngineError, WeightsError, WeightsMismatchError
from tidemill.common.process.vllm_machine import IMAGES_IN_VLLM, add_torchvision
from tidemill.common.weights.digest import Digest, is_additive
from tidemill.common.wire.choices import KEPT, ROUTES, Rows
from tidemill.services.rollout.engines.checkpoint import check_files, prove
from tidemill.services.rollout.engines.engine import (
    PART_TOKENS,
    EngineReport,
    Generation,
    GenerationRequest,
    StopTexts,
    WeightUpdate,
)
from tidemill.services.rollout.engines.model import ModelEngine, open_model
from tidemill.services.rollout.engines.vllm_launch import is_cpu, set_environment, start_vllm

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs import MultiModalInput
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from tidemill.services.rollout.engines.images import Pixels, PromptImages

log = structlog.get_logger(__name__)

STAGING_POLL_S = 0.005

ERROR_ATTEMPTS = 3
"""So often a request is submitted that vLLM ends with "error", before its engine counts as broken."""
URGENT = -1
"""Priority of urgent requests; vLLM schedules lower ones first, and others have their ticket's number."""


class VllmEngine(ModelEngine):
    """One vLLM engine: its scheduler and its workers are child processes of this one."""

    stands_still = True

    def __init__(self, config: RunConfig, worker: str = "") -> None:
        self._config = config
        self._worker = worker
        self.is_reporting = not config.rollout.vllm.extra.get("disable_log_stats", False)
        self._llm: AsyncLLM | None = None
        self._num_submitted = 0
        # Requests inside vLLM without a token so far, and whether an update has taken them back.
        self._unstarted: dict[str, bool] = {}
        self._updating = asyncio.Lock()  # held by an update, and while asleep
        self._digest: Digest | None = None
        """Of what the parameters hold; None where that is not known, so that no delta can be proven."""
        self._can_read_back = False
        """Whether the checkpoint's values can be read from the parameters of every rank."""
        self._can_patch_version = False
        """Whether deltas can be proven over the full version that is loaded: every value of it is there."""
        self._has_moved_weights = False
        """Whether `sleep` has moved the weights to the CPU's memory."""
        self._images: PromptImages | None = None

    @property
    def can_patch(self) -> bool:
        """Whether it is known, bit by bit, what the parameters hold."""
        return self._digest is not None

    async def start(self) -> None:
        if self._config.images is not None:
            # Before anything imports transformers.
            add_torchvision(IMAGES_IN_VLLM)
            set_environment()  # and before torch, which the processor of pictures needs
        self._folder = await asyncio.to_thread(open_model, self._config.model)
        if self._config.images is not None:
            from tidemill.services.rollout.engines.images import PromptImages

            self._images = await asyncio.to_thread(PromptImages, self._config)
        await asyncio.to_thread(self._launch)
        try:
            await self._open_weights()
        except Exception:
            # Else vLLM's processes would keep the GPU's memory after a start that failed.
            await self.close()
            raise
        # Before the first request: vLLM's own first label is "default", and ours are numbers.
        await self._running_llm().update_weight_version("0")
        self.version = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self.folder.check(request)
        pixels = None
        if self._images is not None:
            pixels = await self._images.pixels_of(request)
        self.num_running += 1
        num_errors = 0
        try:
            params = self._sampling_params(request)
            priority = URGENT if request.is_urgent else request.ticket
            while True:
                # A new one for each try: it remembers how many tokens it has looked at.
                stops = StopTexts(request.sampling.stop, self.decode)
                output = await self._submit(request, params, priority, stops, pixels)
                if output is None:
                    continue  # an update took it back: again, with the new weights
                if output.outputs[0].finish_reason != "error":
                    break
                num_errors += 1
                if num_errors == ERROR_ATTEMPTS:
                    break  # `_as_generation` refuses the output
                log.warning("vLLM ended a request with an error", request=request.request_id)
        finally:
            self.num_running -= 1
        return _as_generation(request, output.outputs[0], output.num_cached_tokens, stops.is_reached)

    async def load(
        self, version: int, files: Sequence[Path], deltas: Sequence[Sequence[Path]] = (), digest: str = ""
    ) -> WeightUpdate:
        """Stage while generation goes on, then pause it, write the weights, and read them back.

        Raises:
            WeightsMismatchError: deltas cannot be proven, and nothing has changed; or they were not there
                when they were read back, and generation stands still until a full version is loaded.
            WeightsError: nothing has changed.
            EngineError: the weights may be half replaced; the engine is closed.
        """
        started = time.perf_counter()
        async with self._updating:
            change = await self._stage(files, deltas)
            if not files:  # before anything is written: a delta that does not fit changes nothing
                self._digest = prove(self._digest, change, digest)
            try:
                paused_s = await self._swap(version, is_full=bool(files))
            except WeightsMismatchError:
                # What is held is not known any more, so `can_patch` asks for a full version next.
                self._digest = None
                raise
            except Exception as error:
                await self.close()
                raise EngineError(f"version {version} could not be loaded into vLLM: {error!r}") from error
            # After the swap, which finds out whether deltas over this version can be proven.
            if files:
                is_provable = self._can_patch_version and is_additive(digest)
                self._digest = Digest.parse(digest) if is_provable else None
        return WeightUpdate(version, load_s=time.perf_counter() - started, paused_s=paused_s)

    async def sleep(self) -> None:
        """Stand still, move the weights to the CPU's memory (on a CPU they stay) and drop the KV cache, which
        is computed again for running requests after `wake`."""
        # Held until `wake`: an update would write to weights whose memory is not on the device.
        await self._updating.acquire()
        llm = self._running_llm()
        self._has_moved_weights = not is_cpu()
        if self._has_moved_weights:
            # Level 2 would drop the weights, and `wake` has to give the same ones back.
            await llm.sleep(level=1, mode="keep")
        else:
            await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)

    async def wake(self) -> None:
        llm = self._running_llm()
        await (llm.wake_up() if self._has_moved_weights else llm.resume_generation())
        self._updating.release()

    async def close(self) -> None:
        # Taken out first: a failed update closes the engine, and the worker closes it once more.
        llm = self._llm
        self._llm = None
        if llm is None:
            return
        from vllm.v1.engine.exceptions import EngineDeadError

        # Before the handler is cancelled: requests that wait would never learn that the core has ended.
        llm.output_processor.propagate_error(EngineDeadError())
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # else it reports the end of the core as a crash
        await asyncio.to_thread(llm.shutdown)
        await asyncio.sleep(0)  # the cancelled output handler releases the engine
        del llm
        # Else its destructor runs when the interpreter is half gone, and complains.
        gc.collect()

    @property
    def _records_routes(self) -> bool:
        return self._config.rollout.record_routes and self.folder.is_mixture

    def _launch(self) -> None:
        """Runs on a thread. Returning the engine would leave a reference to it in that thread's frames,
        which vLLM's traceback cycles keep alive, and it would outlive `close`.
        """
        pictures = self._images.processor if self._images is not None else None
        self._llm = start_vllm(self._config, self._worker, self._report, self._records_routes, pictures)

    def _report(self, report: EngineReport) -> None:
        if self.on_report is not None:
            self.on_report(report)

    async def _submit(
        self,
        request: GenerationRequest,
        params: "SamplingParams",
        priority: int,
        stops: StopTexts,
        pixels: "Pixels | None" = None,
    ) -> "RequestOutput | None":
        """Run a request to its last output; None if an update took it back before its first token."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        llm = self._running_llm()
        # vLLM's ids are single use, and a request that is taken back is submitted again.
        self._num_submitted += 1
        engine_id = f"{request.request_id}#{self._num_submitted}"
        # No await between the version and the note below: an update would miss a request of its old key.
        key = f"v{self.version}"
        prompt: Any = tokens_input(list(request.prompt_ids), cache_salt=key)
        if pixels is not None:
            prompt = self._picture_prompt(request, pixels, key)
        self._unstarted[engine_id] = False
        final = None
        num_reported = 0
        # Only the last output has masks and routes, and tokens without them are of no use.
        reports = request.on_tokens is not None and not (self._records_routes or self._config.masked_sources)
        try:
            # Closed at once where the loop is left early: vLLM's generator aborts the request as it ends, and
            # would end only when the garbage collector finds it.
            async with aclosing(llm.generate(prompt, params, engine_id, priority=priority)) as outputs:
                async for output in outputs:
                    # With its first output a request has started. Where an update had taken it back before,
                    # it has run on the old key, also if it reached the core after the update's abort.
                    if self._unstarted.pop(engine_id, False):
                        return None
                    final = output
                    if not output.finished and stops.reach(output.outputs[0].token_ids):
                        await llm.abort(engine_id)  # its last output has the tokens so far
                    new = len(output.outputs[0].token_ids) - num_reported
                    if reports and new >= PART_TOKENS and not output.finished:
                        num_reported += new
                        so_far = self._so_far(engine_id, output.outputs[0], num_reported)
                        if so_far and request.on_tokens:
                            request.on_tokens(so_far)
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineError(
                f"vLLM failed on request {engine_id}: {error!r}; restart this worker"
            ) from error
        finally:
            self._unstarted.pop(engine_id, None)
        assert final is not None, "vLLM ended a request without an output"
        return final

    def _picture_prompt(self, request: GenerationRequest, pixels: "Pixels", key: str) -> "MultiModalInput":
        """A prompt that is expanded already, with the tensors of our own processor."""
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        # Private, and the only place that knows which rows of a tensor belong to which picture.
        processor: Any = self._running_llm().renderer.mm_processor
        fields = processor._get_mm_fields_config(pixels.tensors, {})
        images = [picture.image for picture in request.pictures]
        places = [PlaceholderRange(offset=image.first, length=image.num_tokens) for image in images]
        # With the version: nothing that an older tower computed of a picture is used.
        names = [f"{image.digest}-{key}" for image in images]
        return mm_input(
            list(request.prompt_ids),
            MultiModalKwargsItems.from_hf_inputs(pixels.tensors, fields),
            {"image": names},
            {"image": places},
            cache_salt=key,
        )

    def _so_far(self, engine_id: str, output: "CompletionOutput", num_tokens: int) -> Generation | None:
        """The first tokens of a running request; None if vLLM does not say which versions sampled them: only
        its last output has that by itself."""
        processor = self._running_llm().output_processor
        names = processor.external_req_ids.get(engine_id, [])
        states = [processor.request_states[name] for name in names if name in processor.request_states]
        starts = getattr(states[0], "weight_version_starts", ()) if states else ()
        spans = tuple((int(version), first) for version, first in starts if first < num_tokens)
        logprobs: Any = output.logprobs
        if not spans or spans[0][1] != 0:
            return None
        return Generation(
            token_ids=list(output.token_ids[:num_tokens]),
            logprobs=list(logprobs.logprobs[:num_tokens]),
            spans=spans,
            finish="length",
        )

    def _sampling_params(self, request: GenerationRequest) -> "SamplingParams":
        """vLLM's sampling parameters for the request, with no more output than is needed."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        filters = sampling.filters()
        top_k = sampling.top_k
        temperature = sampling.temperature
        if self._config.masked_sources:
            # vLLM then requires top-k and refuses temperature 0: top-k 1 at temperature 1 samples the same.
            top_k = (top_k or self.folder.vocab_size) if temperature else 1
        if not temperature and top_k == 1:
            temperature = 1.0
        banned_ids = self._images.banned_ids if self._images is not None else ()
        # No seed: on CPU a seeded request crashes the sampler.
        return SamplingParams(
            routed_experts_prompt_start=sampling.num_routed,
            max_tokens=sampling.max_tokens,
            temperature=temperature,
            **filters | {"top_k": top_k},
            # Given here: without a tokenizer vLLM knows no EOS.
            stop_token_ids=list(self.folder.eos_ids),
            # Not clamped where it is given here. Before temperature and filters, as in the trainer.
            logit_bias=dict.fromkeys(banned_ids, -math.inf) or None,
            # Of the sampled token only.
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            # An output for each step: stop texts and parts look at the tokens so far.
            output_kind=RequestOutputKind.CUMULATIVE,
        )

    async def _stage(self, files: Sequence[Path], deltas: Sequence[Sequence[Path]]) -> Digest:
        """Have every rank read its part while generation goes on. Returns how deltas change the digest."""
        llm = self._running_llm()
        check_files(files, deltas)
        with tempfile.TemporaryDirectory(prefix="tidemill-stage-") as report:
            job = {
                "files": list(map(str, files)),
                "deltas": [list(map(str, delta)) for delta in deltas],
                "report": report,
            }
            num_ranks = len(await self._call("begin_staging", job))
            # Ranks answer through files: calls would hold up the core, which generates.
            while len(answers := _answered(report)) < num_ranks:
                if llm.errored:
                    raise EngineError("vLLM died while it read new weights; restart this worker")
                await asyncio.sleep(STAGING_POLL_S)
            # Each is whole: a rank's answer appears by a rename.
            replies = [json.loads(answer.read_bytes()) for answer in answers]
        errors = [answer["error"] for answer in replies if answer["error"]]
        if errors:
            raise WeightsError(f"the weights cannot be staged: {errors[0]}")
        return sum((Digest(each.get("low", 0), each.get("high", 0)) for each in replies), Digest())

    async def _swap(self, version: int, is_full: bool) -> float:
        """Pause, write, label, resume; returns the seconds that generation stood still.

        The order matters: a label set before the last batch of the old weights has drained would stamp
        its tokens with the new version.

        Raises:
            WeightsMismatchError: deltas went wrong. Generation stays paused, for the weights may be neither
                version's.
        """
        llm = self._running_llm()
        # The core's own call returns once the last batch has drained. AsyncLLM.pause_generation is the
        # same, followed by a sleep of 20 ms.
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        paused = time.perf_counter()
        try:
            answers = await self._call("apply")
            wrong = sum(answer["wrong"] for answer in answers)
            if wrong:
                raise EngineError(f"what was read back is not what was written ({wrong:,} differences)")
        except EngineError as error:
            if is_full or llm.errored:
                raise
            raise WeightsMismatchError(f"version {version} went wrong as a delta: {error}") from error
        if any(answer["traced"] for answer in answers):
            await self._divide_digest()
        no_patch = [each["no_patch"] for each in answers if each["no_patch"]]
        if no_patch and self._can_patch_version:
            log.warning("every version is loaded in full", reason=no_patch[0])
        self._can_patch_version = self._can_read_back and not no_patch
        # After the last token of the old weights, before the first of the new ones: generation is paused.
        await llm.update_weight_version(str(version))
        self.version = version
        # Those that were submitted during the pause are among them: nothing starts before the resume.
        taken_back = list(self._unstarted)
        # Marked before the abort, whose output must not pass for an answer.
        self._unstarted.update(dict.fromkeys(taken_back, True))
        await llm.abort(taken_back)
        # After the abort, or they would start on what the old weights have computed of their prompts.
        await llm.resume_generation()
        return time.perf_counter() - paused

    async def _open_weights(self) -> None:
        """Find out where the model has its weights.

        Raises:
            ConfigError: this model cannot be updated correctly.
        """
        answers = await self._call("open")
        refused = [answer["refuse"] for answer in answers if answer["refuse"]]
        if refused:
            raise ConfigError(f"model.path {self._config.model.path}: {refused[0]}")
        unread = [answer["unread"] for answer in answers if answer["unread"]]
        self._can_read_back = not unread
        self._can_patch_version = not unread
        if unread:
            log.warning("weights cannot be read back, so no digest proves an update", reason=unread[0])
        await self._divide_digest()

    async def _divide_digest(self) -> None:
        """Have each position count in one rank's digest, that of the first that holds it: norms, which every
        rank has, would count several times in the sum of all ranks."""
        if self._config.rollout.vllm.tensor_parallel_size == 1 or not self._can_read_back:
            return
        owners: set[str] = set()
        disowned = []
        for answer in await self._call("keys"):
            keys = [json.dumps(key) for key in answer["keys"]]
            disowned.append([index for index, key in enumerate(keys) if key in owners])
            owners.update(keys)
        await self._call("disown", disowned)

    async def _call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call every rank. Raises EngineError: one of them failed."""
        llm = self._running_llm()
        answers: list[dict[str, Any]] = await llm.collective_rpc("tidemill", args=(method, *args))
        errors = [answer["error"] for answer in answers if answer["error"]]
        if errors:
            raise EngineError(f"{method}: {errors[0]}")
        return answers

    def _running_llm(self) -> "AsyncLLM":
        if self._llm is None:
            raise EngineError("the vLLM engine is not running: it was closed, or never started")
        return self._llm


def _answered(report: str) -> list[Path]:
    return list(Path(report).glob("*.json"))


def _as_generation(
    request: GenerationRequest, output: "CompletionOutput", num_cached_tokens: int | None, is_stopped: bool
) -> Generation:
    # Where a stop text was reached, `_submit` has aborted the request: that is its end.
    is_ended = output.finish_reason in ("stop", "length") or (is_stopped and output.finish_reason == "abort")
    if not is_ended:
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
    choices = {}
    if output.sampling_mask is not None and request.sampling.is_filtered:
        # As many rows as tokens, or the sample fails in the trainer, which says so.
        choices[KEPT] = Rows.of_lists(output.sampling_mask.token_ids)
    if output.routed_experts is not None:
        choices[ROUTES] = Rows(output.routed_experts)
    return Generation(
        token_ids=list(output.token_ids),
        logprobs=list(logprobs.logprobs),
        spans=tuple((int(span.version), span.start) for span in spans),
        finish="length" if output.finish_reason == "length" else "stop",
        num_cached_tokens=-1 if num_cached_tokens is None else num_cached_tokens,
        choices=choices,
    )
