"""Run: is it learning?"""

from infra.grafana.panels import Board, Panel, Query, Row

HEADING = "Run: is it learning?"


def step(metric: str) -> str:
    """A number of the last step; docs/metrics.md has the names."""
    return f'tidemill_step_metric{{$run, metric="{metric}"}}'


def steps(pattern: str) -> str:
    """Several numbers of the last step."""
    return f'tidemill_step_metric{{$run, metric=~"{pattern}"}}'


def evaluation(pattern: str) -> str:
    """Numbers of the last evaluation."""
    return f'tidemill_evaluation_metric{{$run, metric=~"{pattern}"}}'


PROGRESS = Row(
    "Progress",
    (
        Panel(
            "State",
            "short",
            "What the run is now.",
            "Failed: read the trainer's log, then start it again.",
            "Run failed",
            (Query("tidemill_run_status{$run} == 1", "{{status}}"),),
            "stat",
            4,
        ),
        Panel(
            "Committed steps",
            "short",
            "Steps that are done, and how many there will be.",
            "If it stands still, look at Pipeline.",
            "No progress",
            (Query("tidemill_run_version{$run}", "done"), Query("tidemill_run_steps{$run}", "of")),
            "stat",
            5,
        ),
        Panel(
            "Since the last step",
            "s",
            "Time since a step was committed.",
            "Many times the step time: the run hangs.",
            "No progress",
            (Query("time() - (tidemill_last_commit_timestamp_seconds{$run} > 0)", "ago"),),
            "stat",
            4,
        ),
        Panel(
            "Time left",
            "s",
            "Remaining steps at the present pace.",
            "Too long: Pipeline says what limits it.",
            HEADING,
            (
                Query(
                    "(tidemill_run_steps{$run} - tidemill_run_version{$run})"
                    " / (rate(tidemill_run_version{$run}[$i]) > 0)",
                    "left",
                ),
            ),
            "stat",
            4,
        ),
        Panel(
            "Warnings that hold",
            "short",
            "Numbers outside of their healthy range, by check.",
            "`tidemill status` says in words what is wrong and what to do.",
            "Unhealthy numbers",
            (Query("tidemill_unhealthy{$run} == 1", "{{check}}"),),
            "stat",
            7,
            (1, 1),
        ),
    ),
)

LEARNING = Row(
    "Reward and evaluation",
    (
        Panel(
            "Reward",
            "short",
            "Mean reward of each step, and its spread.",
            "It should rise. Flat from the start: all rewards are equal; falling: see Stability.",
            HEADING,
            (Query(step("reward"), "mean"), Query(step("reward_std"), "deviation")),
        ),
        Panel(
            "Reward by component",
            "short",
            "Mean of each named reward, over the samples it applied to.",
            "One that rises while others fall is being exploited: weigh it less.",
            HEADING,
            (Query(steps("rewards/.*/mean"), "{{metric}}"),),
        ),
        Panel(
            "Reward and pass rate by source",
            "short",
            "Mean reward of each source of data.train, and the share of its rewards that are a success.",
            "One that is near 0 or 1 teaches little: give it less weight, or use data.curriculum.",
            HEADING,
            (Query(steps("source/.*/(reward|pass_rate)"), "{{metric}}"),),
        ),
        Panel(
            "Evaluation",
            "short",
            "Score of each dataset, by the last evaluated version.",
            "Reward rises and this does not: the policy learns the reward, not the task.",
            HEADING,
            (Query(evaluation("score|accuracy|pass_at_.*"), "{{dataset}} {{metric}}"),),
        ),
        Panel(
            "Groups that teach nothing",
            "percentunit",
            "Share of groups whose rewards are all equal, and of groups replaced.",
            "Near 1: prompts are too hard or too easy; choose by difficulty or raise group_size.",
            "Unhealthy numbers",
            (
                Query(step("frac_reward_zero_std"), "all rewards equal"),
                Query(step("groups_dropped_ratio"), "replaced"),
            ),
            max=1.0,
        ),
        Panel(
            "Completion length",
            "short",
            "Tokens of the completions of each step.",
            "Growing without reward: punish length (algorithm.overlong); collapsing: look at samples.",
            HEADING,
            (Query(steps("completions/(mean|min|max)_length"), "{{metric}}"),),
        ),
        Panel(
            "Cut off",
            "percentunit",
            "Share of completions that hit max_tokens, in training and evaluation.",
            "Above a half: raise max_tokens, or punish length.",
            "Unhealthy numbers",
            (
                Query(step("completions/clipped_ratio"), "training"),
                Query(evaluation("clipped_ratio"), "{{dataset}}"),
            ),
            max=1.0,
        ),
    ),
)

STABILITY = Row(
    "Stability",
    (
        Panel(
            "Entropy",
            "short",
            "How freely the policy samples, in nats a token.",
            "Falling to 0: it stopped exploring; raise clip_high or the entropy bonus.",
            "Entropy collapse",
            (Query(step("entropy"), "entropy"),),
        ),
        Panel(
            "KL",
            "short",
            "Distance from the reference model and teachers; of the sampling policy from the trained one.",
            "Rising fast: lower the learning rate, max_staleness or mini_batches.",
            "Logprob gap",
            (
                Query(step("kl"), "to the reference"),
                Query(step("rollout_kl"), "rollout to trainer"),
                Query(steps("teacher/.*/reverse_kl"), "{{metric}}"),
            ),
        ),
        Panel(
            "Logprob gap",
            "short",
            "Difference of engine and trainer on the same tokens, in nats.",
            "Mean above 0.1: they compute different distributions; compare dtype and temperature.",
            "Logprob gap",
            (Query(step("logprob_gap/mean"), "mean"), Query(step("logprob_gap/max"), "largest")),
        ),
        Panel(
            "Importance weights",
            "short",
            "Mean weight, effective sample size, and the shares that were bounded or left out.",
            "Mean far from 1 or sample size below a half: lower max_staleness or the learning rate.",
            "Unhealthy numbers",
            (
                Query(step("sampling/importance_sampling_ratio/mean"), "mean"),
                Query(step("sampling/importance_sampling_ratio/bounded_mean"), "bounded"),
                Query(step("sampling/effective_sample_size"), "effective sample size"),
                Query(step("sampling/rejected_mean"), "rejected"),
                Query(step("sampling/off_policy_mean"), "off-policy mask"),
                Query(step("selection/left_out_mean"), "not selected"),
            ),
        ),
        Panel(
            "Clipped tokens",
            "percentunit",
            "Share of tokens that the clip silences.",
            "Above 0.3: lower the learning rate or mini_batches, or widen the clip.",
            "Unhealthy numbers",
            (Query(steps("clip_ratio/(low|high|region)_mean"), "{{metric}}"),),
        ),
        Panel(
            "Gradient norm",
            "short",
            "Before it is scaled down, and the share of updates that were skipped.",
            "Spikes: lower the learning rate. 0: there is no signal.",
            "Unhealthy numbers",
            (Query(step("grad_norm"), "norm"), Query(step("update_skipped"), "skipped")),
        ),
        Panel(
            "Use of experts",
            "short",
            "Of mixtures of experts with algorithm.router: the busiest's load, entropy and idle share.",
            "A rising load or idle share: algorithm.router.balance, or a lower learning rate.",
            "Unhealthy numbers",
            (Query(steps("experts/(max_load|entropy|idle|balance_loss)"), "{{metric}}"),),
        ),
        Panel(
            "Loss",
            "short",
            "Loss of each step.",
            "Says little in RL but for jumps; look at reward and KL.",
            HEADING,
            (Query(step("loss"), "loss"),),
        ),
        Panel(
            "Learning rate",
            "sci",
            "Learning rate of the last update.",
            "Compare with the schedule you meant.",
            HEADING,
            (Query(step("learning_rate"), "learning rate"),),
        ),
    ),
)

RUN = Board("run", "Run", HEADING, (PROGRESS, LEARNING, STABILITY))
