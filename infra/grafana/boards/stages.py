"""Rows about rollout and reward: is generation fast, is scoring fast, and what failed in them?"""

from infra.grafana.panels import Panel, Query, Row, increase, per_s, quantile, spread, total

PIPELINE_HEADING = "Pipeline: where is the bottleneck?"
FAULTS_HEADING = "Faults: what broke, and did it recover?"

ROLLOUT = Row(
    "Rollout",
    (
        Panel(
            "Completion tokens",
            "short",
            "Tokens of published completions a second, by worker.",
            "One far below its peers: look at its GPU. All low: see Slots and Pipeline.",
            PIPELINE_HEADING,
            (Query(per_s("tidemill_completion_tokens_total", "worker"), "{{worker}}"),),
            "stacked",
        ),
        Panel(
            "Slots",
            "short",
            "Groups that the workers hold, and can hold.",
            "Empty slots: the engines wait for tickets; raise max_staleness or groups_per_step.",
            PIPELINE_HEADING,
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
            PIPELINE_HEADING,
            (Query("tidemill_requests_running{$run}", "{{worker}}"),),
        ),
        Panel(
            "KV cache",
            "percentunit",
            "Share of the KV cache in use.",
            "Near 1 with preemptions: fewer slots, shorter completions, more gpu_memory_utilization.",
            PIPELINE_HEADING,
            (Query("vllm:kv_cache_usage_perc{$run}", "{{worker}}"),),
            max=1.0,
        ),
        Panel(
            "Preemptions",
            "short",
            "Requests thrown out of the cache and computed again, in the window.",
            "More than a few: the cache is too small for the slots.",
            PIPELINE_HEADING,
            (Query(increase("vllm:num_preemptions_total", "worker"), "{{worker}}"),),
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
        ),
        Panel(
            "Prefix cache",
            "percentunit",
            "Share of prompt tokens found in the cache.",
            "Low with large groups: samples of a group should share their prompt.",
            PIPELINE_HEADING,
            (
                Query(
                    f"{per_s('vllm:prefix_cache_hits_total')}"
                    f" / ({per_s('vllm:prefix_cache_queries_total')} > 0)",
                    "hits",
                ),
            ),
            max=1.0,
        ),
        Panel(
            "Utilization",
            "percent",
            "Share of time in which a kernel runs.",
            "Low on a rollout node: too few slots. Low on the trainer: it waits.",
            PIPELINE_HEADING,
            (Query("DCGM_FI_DEV_GPU_UTIL", "{{Hostname}} GPU {{gpu}}"),),
            max=100.0,
        ),
        Panel(
            "Engine and environment",
            "s",
            "Time of a session that went to the engine, and to the environment.",
            "The environment's grows: it is the bottleneck; give it more processes or machines.",
            PIPELINE_HEADING,
            spread("tidemill_session_seconds", "where"),
        ),
        Panel(
            "Ends",
            "short",
            "Sessions a second by how they ended: done, or a limit.",
            "Many at a limit: they are truncated; see mask_truncated.",
            PIPELINE_HEADING,
            (Query(per_s("tidemill_session_ends_total", "end"), "{{end}}"),),
            "stacked",
        ),
    ),
)

REWARD = Row(
    "Reward",
    (
        Panel(
            "Scores",
            "short",
            "Scores a second by status, training and evaluation.",
            "Anything but ok is left out of training: see Failures.",
            "Reward failures",
            (Query(per_s("tidemill_scores_published_total", "lane, status"), "{{lane}} {{status}}"),),
            "stacked",
        ),
        Panel(
            "Time of a score",
            "s",
            "From the start of a score to its end, retries included.",
            "Long: more concurrency does not help one score; a faster judge or a timeout does.",
            PIPELINE_HEADING,
            spread("tidemill_score_seconds", "lane"),
        ),
        Panel(
            "Slots in use",
            "short",
            "Trajectories in work, and how many the workers can hold.",
            "Full: scale the reward service, or raise reward.max_in_flight.",
            "Lag growing",
            (
                Query(total("tidemill_scores_in_flight", "lane"), "{{lane}} in work"),
                Query(total("tidemill_score_slots", "lane"), "{{lane}} slots"),
            ),
        ),
        Panel(
            "Time of a request",
            "s",
            "Answered requests to judges and reward models.",
            "95 % far from the median: add a replica.",
            PIPELINE_HEADING,
            spread("tidemill_remote_seconds", "servers"),
        ),
        Panel(
            "Waiting for limits",
            "s",
            "Time that requests waited for the run's rate and concurrency limits.",
            "Longer than the requests: raise the limit, if the provider allows.",
            "Limiter saturated",
            (
                Query(
                    quantile(0.95, "tidemill_limiter_wait_seconds", "servers, lane"),
                    "{{servers}} {{lane}} 95 %",
                ),
            ),
        ),
        Panel(
            "Cost",
            "short",
            "What judges cost an hour, in the currency of the servers' prices.",
            "Too much: a cache, a smaller judge, or fewer samples.",
            PIPELINE_HEADING,
            (Query(f"3600 * {per_s('tidemill_remote_cost_total', 'servers')}", "{{servers}} an hour"),),
        ),
    ),
)

FAULTS_OF_STAGES = Row(
    "Rollout and reward",
    (
        Panel(
            "Failed for good",
            "short",
            "Rewards without a value in the window, by name and kind.",
            "Timeout: raise it or add replicas. Error: the worker's log has it.",
            "Reward failures",
            (Query(increase("tidemill_reward_failures_total", "reward, kind"), "{{reward}} {{kind}}"),),
        ),
        Panel(
            "Errors of judges",
            "short",
            "Requests to judges and reward models that failed, by kind.",
            "rate_limited: lower the limit; server or connection: look at the server.",
            "Judge errors",
            (Query(per_s("tidemill_remote_errors_total", "servers, kind"), "{{servers}} {{kind}}"),),
        ),
        Panel(
            "Killed scoring processes",
            "short",
            "Processes of plain functions that were killed or died.",
            "Endless loops or memory: give the function a timeout, or mend it.",
            "Reward failures",
            (Query(increase("tidemill_scoring_processes_killed_total"), "killed"),),
        ),
        Panel(
            "Replicas",
            "short",
            "Replicas that the workers know, by state; the largest number any of them sees.",
            "down or resting: that server does not answer, or fails.",
            "Replicas down",
            (Query("max by (servers, state) (tidemill_replicas{$run})", "{{servers}} {{state}}"),),
        ),
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
            thresholds=(1, 5),
        ),
        Panel(
            "Faults of environments",
            "short",
            "Plays that an environment's fault ended, by what failed. They are played again, never scored 0.",
            "Any that goes on: the worker's log says what failed.",
            FAULTS_HEADING,
            (Query(increase("tidemill_environment_faults_total", "kind"), "{{kind}}"),),
        ),
        Panel(
            "Calls of tools",
            "short",
            "Calls a second: answered, and wrong.",
            "Mostly wrong: read one with `tidemill trace`; call_format may not be the model's.",
            FAULTS_HEADING,
            (Query(per_s("tidemill_environment_calls_total", "result"), "{{result}}"),),
            "stacked",
        ),
    ),
)
