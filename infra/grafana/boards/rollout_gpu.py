"""Rollout and GPU: is generation fast?"""

from infra.grafana.boards.sessions import SESSIONS
from infra.grafana.panels import Board, Panel, Query, Row, increase, per_s, quantile, spread, total

HEADING = "Rollout and GPU: is generation fast?"

GENERATION = Row(
    "Generation",
    (
        Panel(
            "Completion tokens",
            "short",
            "Tokens of published completions a second, by worker.",
            "One far below its peers: look at its GPU. All low: see Slots and Pipeline.",
            HEADING,
            (Query(per_s("tidemill_completion_tokens_total", "worker"), "{{worker}}"),),
            "stacked",
        ),
        Panel(
            "Prompt tokens",
            "short",
            "Tokens of the prompts of published completions, a second.",
            "Many against completions: prefix caching matters.",
            HEADING,
            (Query(per_s("tidemill_prompt_tokens_total", "lane"), "{{lane}}"),),
        ),
        Panel(
            "Trajectories",
            "short",
            "Completions published a second.",
            "Falling with the same tokens a second: completions got longer.",
            HEADING,
            (Query(per_s("tidemill_trajectories_published_total", "lane"), "{{lane}}"),),
        ),
        Panel(
            "Time of a completion",
            "s",
            "From the first token to the last of one completion.",
            "A long tail: lower max_tokens, or batch_order as_ready.",
            HEADING,
            spread("tidemill_generation_seconds", "lane"),
        ),
        Panel(
            "Slots",
            "short",
            "Groups that the workers hold, and can hold.",
            "Empty slots: the engines wait for tickets; raise max_staleness or groups_per_step.",
            HEADING,
            (
                Query(total("tidemill_groups_in_flight", "lane"), "{{lane}} held"),
                Query(total("tidemill_group_slots", "lane"), "{{lane}} slots"),
            ),
        ),
        Panel(
            "Batch size of the engines",
            "short",
            "Completions that each engine works on at once.",
            "Small: more groups for each worker, or fewer workers.",
            HEADING,
            (Query("tidemill_requests_running{$run}", "{{worker}}"),),
        ),
    ),
)

WEIGHTS = Row(
    "Weights",
    (
        Panel(
            "Version of each worker",
            "short",
            "Version that each engine generates with, and the trainer's.",
            "One stays behind: its disk or its share is slow, or it hangs.",
            "Old version",
            (
                Query("tidemill_engine_version{$run}", "{{worker}}"),
                Query("tidemill_worker_version{$run}", "{{worker}}, as it last said"),
                Query("tidemill_committed_version{$run}", "trainer"),
            ),
            span=12,
        ),
        Panel(
            "Weight updates",
            "s",
            "Time to load a version, pause of generation, and delay since its announcement.",
            "Pause above a second: weights come over a slow disk or network.",
            "Weights not loaded",
            (
                Query(quantile(0.95, "tidemill_weight_load_seconds"), "load, 95 %"),
                Query(quantile(0.95, "tidemill_weight_pause_seconds"), "pause, 95 %"),
                Query(quantile(0.95, "tidemill_weight_delay_seconds"), "delay, 95 %"),
            ),
            span=8,
        ),
        Panel(
            "Failed loads",
            "short",
            "Versions that could not be loaded when tried.",
            "The worker tries again; its log has the reason.",
            "Weights not loaded",
            (
                Query(increase("tidemill_weight_failures_total"), "failed"),
                Query(increase("tidemill_weight_mismatches_total"), "mismatched"),
            ),
            "stat",
            4,
            (1, 5),
        ),
    ),
)

ENGINE = Row(
    "vLLM",
    (
        Panel(
            "Requests",
            "short",
            "Requests that vLLM computes, and that wait inside of it.",
            "Many waiting: the KV cache is full; fewer slots or more memory.",
            HEADING,
            (
                Query(total("vllm:num_requests_running", "worker"), "{{worker}} running"),
                Query(total("vllm:num_requests_waiting", "worker"), "{{worker}} waiting"),
            ),
        ),
        Panel(
            "KV cache",
            "percentunit",
            "Share of the KV cache in use.",
            "Near 1 with preemptions: fewer slots, shorter completions, more gpu_memory_utilization.",
            HEADING,
            (Query("vllm:kv_cache_usage_perc{$run}", "{{worker}}"),),
            max=1.0,
        ),
        Panel(
            "Preemptions",
            "short",
            "Requests thrown out of the cache and computed again, in the window.",
            "More than a few: the cache is too small for the slots.",
            HEADING,
            (Query(increase("vllm:num_preemptions_total", "worker"), "{{worker}}"),),
        ),
        Panel(
            "Tokens of the engine",
            "short",
            "Tokens a second that vLLM computes, prompts and completions.",
            "Compare with benchmarks of the same model and GPU.",
            HEADING,
            (
                Query(per_s("vllm:prompt_tokens_total"), "prompt"),
                Query(per_s("vllm:generation_tokens_total"), "completion"),
            ),
            "stacked",
        ),
        Panel(
            "Tokens in one pass",
            "short",
            "Tokens that the engine computes in one forward pass.",
            "Small: the GPU is mostly idle; more slots help.",
            HEADING,
            spread("vllm:iteration_tokens_total"),
        ),
        Panel(
            "Prefix cache",
            "percentunit",
            "Share of prompt tokens found in the cache.",
            "Low with large groups: samples of a group should share their prompt.",
            HEADING,
            (
                Query(
                    f"{per_s('vllm:prefix_cache_hits_total')}"
                    f" / ({per_s('vllm:prefix_cache_queries_total')} > 0)",
                    "hits",
                ),
            ),
            max=1.0,
        ),
    ),
)

GPU = Row(
    "GPU",
    (
        Panel(
            "Power",
            "watt",
            "Power that each GPU draws.",
            "Far below its limit while busy: small batches, or it waits for memory or the network.",
            HEADING,
            (Query("DCGM_FI_DEV_POWER_USAGE", "{{Hostname}} GPU {{gpu}}"),),
        ),
        Panel(
            "Utilization",
            "percent",
            "Share of time in which a kernel runs.",
            "Low on a rollout node: too few slots. Low on the trainer: it waits.",
            HEADING,
            (Query("DCGM_FI_DEV_GPU_UTIL", "{{Hostname}} GPU {{gpu}}"),),
            max=100.0,
        ),
        Panel(
            "Memory",
            "decmbytes",
            "GPU memory in use.",
            "Little free: lower gpu_memory_utilization or max_tokens_per_micro_batch before it fails.",
            HEADING,
            (Query("DCGM_FI_DEV_FB_USED", "{{Hostname}} GPU {{gpu}}"),),
        ),
    ),
)

ROLLOUT_GPU = Board("rollout_gpu", "Rollout and GPU", HEADING, (GENERATION, SESSIONS, WEIGHTS, ENGINE, GPU))
