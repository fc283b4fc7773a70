"""Every metric of every service, with help and unit. Labels are few and of low cardinality."""

from prometheus_client import Counter, Gauge, Histogram

_LATENCY_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

ACTIVITY_SECONDS = Counter(
    "tidemill_activity_seconds_total", "Time spent in each state, working or waiting", ["role", "state"]
)
RUN_INFO = Gauge(
    "tidemill_run_info", "1; labels say which run and role this process serves", ["run_id", "role"]
)

LOOP_LAG_SECONDS = Histogram(
    "tidemill_loop_lag_seconds",
    "How late the event loop woke a probe that slept: work that holds up everything else",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)

REDIS_RETRIES = Counter("tidemill_redis_retries_total", "Redis commands repeated after a passing error")
REDIS_WAIT = Counter("tidemill_redis_wait_seconds_total", "Time spent waiting for Redis to come back")
REDIS_MEMORY_SHARE = Gauge(
    "tidemill_redis_memory_share", "Memory of Redis in use over its maxmemory; 0 without a limit"
)

DELIVERIES = Counter("tidemill_deliveries_total", "Messages received through a consumer group", ["stream"])
RECLAIMED = Counter("tidemill_reclaimed_total", "Messages taken over from a silent consumer", ["stream"])
LEASES_LOST = Counter(
    "tidemill_leases_lost_total", "Held messages that another consumer took over", ["stream"]
)
HANDED_BACK = Counter(
    "tidemill_handed_back_total", "Messages given back unfinished while draining", ["stream"]
)
DEAD_LETTERS = Counter("tidemill_dead_letters_total", "Messages put into the dead-letter stream", ["stream"])

ENGINE_VERSION = Gauge("tidemill_engine_version", "Version of the weights this worker generates with")
TRAJECTORIES_PUBLISHED = Counter("tidemill_trajectories_published_total", "Trajectories published", ["lane"])
COMPLETION_TOKENS = Counter("tidemill_completion_tokens_total", "Completion tokens published", ["lane"])
GENERATION_SECONDS = Histogram(
    "tidemill_generation_seconds", "Time to generate one completion", ["lane"], buckets=_LATENCY_S
)
GROUPS_IN_FLIGHT = Gauge("tidemill_groups_in_flight", "Groups this rollout worker holds", ["lane"])
REQUESTS_RUNNING = Gauge("tidemill_requests_running", "Completions the engine works on")
WEIGHT_LOAD_SECONDS = Histogram(
    "tidemill_weight_load_seconds", "Time of one weight update in the engine", buckets=_LATENCY_S
)
WEIGHT_PAUSE_SECONDS = Histogram(
    "tidemill_weight_pause_seconds", "Time generation stood still for one weight update", buckets=_LATENCY_S
)

SCORES_PUBLISHED = Counter("tidemill_scores_published_total", "Scores published", ["lane", "status"])
SCORE_SECONDS = Histogram(
    "tidemill_score_seconds", "Time to score one trajectory", ["lane"], buckets=_LATENCY_S
)
SCORE_RETRIES = Counter("tidemill_score_retries_total", "Reward attempts repeated after a failure")
REWARD_FAILURES = Counter(
    "tidemill_reward_failures_total", "Rewards that failed for good, by name and kind", ["reward", "kind"]
)
REWARD_CACHE = Counter(
    "tidemill_reward_cache_total",
    "Rewards looked up in the cache: hit, miss, or shared with one under way",
    ["result"],
)
GROUPS_POST_PROCESSED = Counter(
    "tidemill_groups_post_processed_total", "Groups whose scores were published as a whole", ["lane"]
)
SCORES_IN_FLIGHT = Gauge("tidemill_scores_in_flight", "Trajectories this reward worker is scoring", ["lane"])
SCORING_PROCESSES_KILLED = Counter(
    "tidemill_scoring_processes_killed_total", "Processes of plain reward functions killed or found dead"
)

REMOTE_SECONDS = Histogram(
    "tidemill_remote_seconds",
    "Time of one answered request to a judge or reward model",
    ["reward"],
    buckets=_LATENCY_S,
)
REMOTE_TOKENS = Counter(
    "tidemill_remote_tokens_total", "Tokens that judges and reward models charged", ["reward", "kind"]
)
REMOTE_ERRORS = Counter(
    "tidemill_remote_errors_total", "Requests to judges and reward models that failed", ["reward", "kind"]
)
REMOTE_FAILOVERS = Counter(
    "tidemill_remote_failovers_total", "Requests repeated at another replica at once", ["reward"]
)
REMOTE_HEDGES = Counter(
    "tidemill_remote_hedges_total", "Second requests sent because the first was slow", ["reward", "winner"]
)
LIMITER_WAIT_SECONDS = Histogram(
    "tidemill_limiter_wait_seconds",
    "Time that requests waited for the run's limits",
    ["reward", "lane"],
    buckets=_LATENCY_S,
)
REPLICAS = Gauge("tidemill_replicas", "Replicas that this worker knows, by state", ["reward", "state"])
REPLICA_IN_FLIGHT = Gauge(
    "tidemill_replica_in_flight", "Requests of this worker at one replica", ["reward", "replica"]
)

REWARD_MODEL_REQUESTS = Counter(
    "tidemill_reward_model_requests_total", "Requests the reward model server answered", ["path", "status"]
)
REWARD_MODEL_QUEUED_ROWS = Gauge("tidemill_reward_model_queued_rows", "Sequences that wait for a batch")
REWARD_MODEL_WAIT_SECONDS = Histogram(
    "tidemill_reward_model_wait_seconds", "Time a sequence waited for its batch", buckets=_SHORT_S
)
REWARD_MODEL_BATCH_SECONDS = Histogram(
    "tidemill_reward_model_batch_seconds", "Time to compute one batch", buckets=_SHORT_S
)
REWARD_MODEL_BATCH_ROWS = Histogram(
    "tidemill_reward_model_batch_rows", "Sequences in one batch", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
)
REWARD_MODEL_TOKENS = Counter("tidemill_reward_model_tokens_total", "Tokens computed", ["kind"])
REWARD_MODEL_BATCH_ERRORS = Counter(
    "tidemill_reward_model_batch_errors_total", "Sequences that could not be computed"
)
DEVICE_TURN_WAIT_SECONDS = Histogram(
    "tidemill_device_turn_wait_seconds", "Time this process waited for a shared device", buckets=_LATENCY_S
)
SANDBOX_SECONDS = Histogram(
    "tidemill_sandbox_seconds", "Time from asking for a sandboxed run to its verdict", buckets=_LATENCY_S
)
SANDBOX_JOBS = Counter("tidemill_sandbox_jobs_total", "Sandboxed runs by how they ended", ["outcome"])

TICKETS_ISSUED = Counter(
    "tidemill_tickets_issued_total", "Tickets issued, regular and replacements", ["kind"]
)
GROUPS_SETTLED = Counter("tidemill_groups_settled_total", "Groups that reached their end", ["outcome"])
DUPLICATES_DROPPED = Counter(
    "tidemill_duplicates_dropped_total", "Entries whose key was there already", ["stream"]
)
STALENESS_VIOLATIONS = Counter(
    "tidemill_staleness_violations_total", "Trajectories refused because a token was too old"
)
TRAINED_STALENESS = Histogram(
    "tidemill_trained_staleness",
    "Staleness of trained tokens, in steps",
    buckets=(0, 1, 2, 3, 4, 6, 8, 16, 32),
)
TRAINED_TOKENS = Counter("tidemill_trained_tokens_total", "Completion tokens trained on")
COMMITTED_VERSION = Gauge("tidemill_committed_version", "Number of committed steps")
STEP_SECONDS = Histogram("tidemill_step_seconds", "Time from one commit to the next", buckets=_LATENCY_S)
CHECKPOINT_SECONDS = Histogram(
    "tidemill_checkpoint_seconds", "Time to write a checkpoint", buckets=_LATENCY_S
)
WEIGHTS_WRITE_SECONDS = Histogram(
    "tidemill_weights_write_seconds", "Time to write and announce one version", buckets=_LATENCY_S
)
REWARD_MEAN = Gauge("tidemill_reward_mean", "Mean reward of the last step")
EVALUATION_SCORE = Gauge("tidemill_evaluation_score", "Mean score of the last evaluation", ["dataset"])
UNHEALTHY = Gauge(
    "tidemill_unhealthy", "1 while a number of the step is outside of its healthy range", ["check"]
)
