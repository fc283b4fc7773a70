"""prime-rl's TOML as our config: what the table cannot say."""

from collections.abc import Mapping
from typing import Any

from tidemill.common.config.algorithm_table import ADVANTAGES, LOSSES
from tidemill.services.console.convert.draft import Draft, run_name
from tidemill.services.console.convert.prime_rl_table import LOSS, OPTIM, TABLE, I, O, T

ALGORITHM, EVALUATION = "trainer.algorithm.", "trainer.evaluation."
DEFAULTS = {
    O + "group_size": 1,
    O + "algo.type": "grpo",
    O + "train.filter_zero_advantages": True,
    O + "eval.interval": 100,
    O + "eval.group_size": 1,
    O + "eval.num_examples": -1,
    LOSS + "type": "default",
    LOSS + "dppo_mask_low": 0.2,
    LOSS + "dppo_mask_high": 0.2,
    T + "model.ac": True,
    T + "scheduler.type": "constant",
    OPTIM + "betas1": 0.9,
    OPTIM + "betas2": 0.999,
    "deployment.num_train_gpus": 1,
    "deployment.num_infer_gpus": 1,
    "deployment.gpus_per_node": 8,
}
SEQUENCE, BATCH = 2048, 128
PROMPT_TOKENS = 1024
ADVANTAGE_NAMES = {"grpo": "dr_grpo", "max_rl": "max_rl"}


def convert_prime_rl(options: Mapping[str, Any]) -> Draft:
    """The config that trains as these options do; what is not among them is as in prime-rl."""
    draft = Draft(TABLE, options, DEFAULTS)
    _convert_sources(draft)
    _convert_batches(draft)
    _convert_lengths(draft)
    _convert_algorithm(draft)
    _convert_optimizer(draft)
    _convert_evaluation(draft)
    _convert_machine(draft)
    draft.finish()
    if "trainer.steps" not in draft.fields:
        draft.lose("max_steps", "without it prime-rl goes on for ever: here for 100 steps")
    return draft


def _first(draft: Draft, *options: str) -> Any:
    """The first of these that is given; all of them are dealt with."""
    values = [draft.take(option) for option in options]
    return next((value for value in values if value is not None), None)


def _sources(draft: Draft, lane: str) -> list[dict[str, Any]]:
    found = draft.take(f"{O}{lane}.source")
    return [source for source in found or () if isinstance(source, dict)]


def _convert_sources(draft: Draft) -> None:
    """Environments have no counterpart as such: data and reward are named for the user to write."""
    sources = _sources(draft, "train")
    names = [str(source.get("name") or _task(source) or "train") for source in sources] or ["train"]
    draft.put(
        "data.train", [f"{name}.jsonl" for name in names], "the rows of each environment: write them there"
    )
    is_math = all("math" in name for name in names)
    draft.put("reward.function", "math" if is_math else "gsm8k", "put the environment's rubric in its place")
    draft.lose(
        O + "train.source",
        f"environments of verifiers ({', '.join(names)}): their rows as JSONL and their rubric as "
        "a reward function; "
        "those of several turns in rollout.environment (examples/verifiers plays them unchanged)",
    )
    if any(source.get("ratio", 1.0) != 1.0 for source in sources):
        draft.lose(O + "train.source", "rows are taken in turn, without ratios")


def _task(source: Mapping[str, Any]) -> str:
    taskset = (source.get("env") or {}).get("taskset") or {}
    return str(taskset.get("id") or source.get("id") or "")


def _convert_batches(draft: Draft) -> None:
    sizes = {source["group_size"] for source in _sources(draft, "train") if "group_size" in source}
    size = draft.take(O + "group_size")
    if sizes:
        size = max(sizes)
    total = draft.take(O + "batch_size") or BATCH
    draft.put("trainer.groups_per_step", max(total // size, 1), "batch_size / group_size")
    draft.put("trainer.group_size", size, O + "group_size")
    draft.put("trainer.batch_order", "as_ready", "rollouts are trained on as they complete")
    if len(sizes) > 1:
        draft.approximate(O + "train.source", "all groups have the size of the largest")


def _convert_lengths(draft: Draft) -> None:
    limits = [
        draft.take(name) for name in ("seq_len", O + "seq_len", T + "model.seq_len", I + "max_model_len")
    ]
    total = min((int(limit) for limit in limits if limit), default=SEQUENCE)
    completion = draft.take(O + "train.sampling.max_completion_tokens")
    fits = completion and completion < total
    prompt = total - completion if fits else min(PROMPT_TOKENS, total // 2)
    draft.put("model.max_model_len", total, "the smallest of seq_len and max_model_len")
    draft.put("data.max_prompt_tokens", prompt, "what the completion leaves")
    draft.put("rollout.sampling.max_tokens", completion if fits else total - prompt, "max_completion_tokens")
    if not fits:
        draft.approximate(
            "seq_len", f"prime-rl cuts whole sequences: here prompts have at most {prompt} tokens"
        )


def _convert_algorithm(draft: Draft) -> None:
    kind = str(draft.take(O + "algo.type"))
    advantage = ADVANTAGE_NAMES.get(kind, "")
    if advantage not in ADVANTAGES:
        draft.lose(O + "algo.type", f"no {kind} here: dr_grpo, the reward less the mean of its group")
        advantage = "dr_grpo"
    if draft.fields["trainer.group_size"] < 2 and ADVANTAGES[advantage].compares_siblings:
        draft.lose(
            O + "group_size", "a group of one has no siblings: reinforce_plus_plus compares with the batch"
        )
        advantage = "reinforce_plus_plus"
    draft.put(ALGORITHM + "advantage", advantage, O + "algo.type")
    draft.put(ALGORITHM + "old_logprobs", "rollout", "the ratio is to the rollout's logprobs")
    loss, low, high = (draft.take(LOSS + name) for name in ("type", "dppo_mask_low", "dppo_mask_high"))
    if loss == "default" and "dppo_tv" in LOSSES:
        draft.put(ALGORITHM + "loss", "dppo_tv", LOSS + "type")
    else:
        draft.put(ALGORITHM + "loss", "ppo", LOSS + "type")
        text = "the ratio is clipped as in PPO; DPPO's mask on p - q can be a loss of your own, path.py:name"
        draft.lose(LOSS + "type", text)
    draft.put(ALGORITHM + "clip_low", min(low, 1.0), LOSS + "dppo_mask_low")
    draft.put(ALGORITHM + "clip_high", high, LOSS + "dppo_mask_high")
    if draft.take(O + "train.filter_zero_advantages"):
        draft.explain(
            O + "train.filter_zero_advantages",
            "such groups have no gradient; filter_zero_variance would replace them",
        )


def _convert_optimizer(draft: Draft) -> None:
    if draft.has(OPTIM + "betas1") or draft.has(OPTIM + "betas2"):
        betas = [draft.take(OPTIM + "betas1"), draft.take(OPTIM + "betas2")]
        draft.put("trainer.optimizer.betas", betas, OPTIM + "betas1, betas2")
    warmup = draft.take(T + "scheduler.warmup_steps")
    kind = str(draft.take(T + "scheduler.type"))
    if kind in ("linear", "cosine"):
        warmup = 10 if warmup is None else warmup
    draft.put(
        "trainer.optimizer.schedule", "cosine" if kind == "cosine" else "constant", T + "scheduler.type"
    )
    if kind == "linear" and draft.take(T + "scheduler.decay_steps") != 0:
        draft.lose(T + "scheduler.decay_steps", "the rate stays to the end")
    if warmup:
        draft.put("trainer.optimizer.warmup_steps", warmup, T + "scheduler.warmup_steps")


def _convert_evaluation(draft: Draft) -> None:
    sources = _sources(draft, "eval")
    every, samples = draft.take(O + "eval.interval"), draft.take(O + "eval.group_size")
    count, skips = draft.take(O + "eval.num_examples"), draft.take(O + "eval.skip_first_step")
    temperature = draft.take(O + "eval.sampling.temperature")
    if not sources:
        return
    names = [str(source.get("name") or _task(source)) for source in sources]
    draft.put("data.eval", {name: f"{name}.jsonl" for name in names}, "the rows of each: write them there")
    draft.put(
        EVALUATION + "every",
        min([every, *(s["interval"] for s in sources if "interval" in s)]),
        O + "eval.interval",
    )
    samples = max([samples, *(source.get("group_size", 1) for source in sources)])
    draft.put(EVALUATION + "samples", samples, O + "eval.group_size")
    draft.put(
        EVALUATION + "temperature",
        1.0 if temperature is None else temperature,
        O + "eval.sampling.temperature",
    )
    if samples > 1 and temperature == 0:
        draft.put(EVALUATION + "samples", 1, "greedy samples are all alike")
    if count and count > 0:
        draft.put(EVALUATION + "max_prompts", count, O + "eval.num_examples")
    if skips:
        draft.put(EVALUATION + "at_start", False, O + "eval.skip_first_step")
    draft.lose(O + "eval.source", f"environments ({', '.join(names)}): their rows as JSONL files")


def _convert_machine(draft: Draft) -> None:
    train, nodes = draft.take("deployment.num_train_gpus"), draft.take("deployment.num_train_nodes")
    gpus, infer_nodes = draft.take("deployment.num_infer_gpus"), draft.take("deployment.num_infer_nodes")
    per_node = draft.take("deployment.gpus_per_node")
    ranks = nodes * per_node if nodes else train
    gpus = infer_nodes * per_node if infer_nodes else gpus
    draft.put("trainer.num_ranks", ranks, "deployment")
    parallel = draft.given.get(I + "tensor_parallel_size", 1)
    draft.put("rollout.engine", "vllm", "inference")
    draft.put("rollout.workers", max(gpus // parallel, 1), "GPUs of the engines / tensor_parallel_size")
    draft.put("model.dtype", "bfloat16", "as prime-rl computes")
    draft.put("trainer.gradient_checkpointing", draft.take(T + "model.ac") is not False, T + "model.ac")
    if any(name.startswith(("monitors.wandb.", "wandb.")) for name in draft.given):
        draft.put("trainer.loggers", ["wandb"], "monitors.wandb")
    if project := _first(draft, "monitors.wandb.project", "wandb.project"):
        draft.put("trainer.logger_project", project, "monitors.wandb.project")
    if name := run_name(_first(draft, "run.name", "monitors.wandb.name", "wandb.name")):
        draft.put("run_id", name, "monitors.wandb.name")
