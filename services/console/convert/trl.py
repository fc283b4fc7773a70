"""TRL's GRPOConfig as our config: what the table cannot say."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from tidemill.common.config.algorithm_table import ADVANTAGES, LOSSES
from tidemill.common.config.penalties import KlConfig
from tidemill.services.console.convert.draft import Draft, origin
from tidemill.services.console.convert.python_calls import Source
from tidemill.services.console.convert.trl_table import FILE, PROCESSES, TABLE

ALGORITHM = "trainer.algorithm."
DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "num_iterations": 1,
    PROCESSES: 1,
    "max_steps": -1,
    "num_train_epochs": 3,
    "max_completion_length": 512,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3,
    "save_steps": 500,
    "save_strategy": "steps",
    "bf16": True,
    "eval_strategy": "no",
    "lora_r": 16,
    "lora_alpha": 32,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
}
NORMALISATIONS = {
    "dapo": "token",
    "grpo": "sequence",
    "dr_grpo": "constant",
    "sapo": "sequence",
    "cispo": "token",
}
PROMPT_TOKENS = 1024
ESTIMATOR_NAMES = get_args(KlConfig.model_fields["estimator"].annotation)
OBJECTS = ("reward_funcs", "train_dataset", "eval_dataset", "peft_config", "tools", "environment_factory")
"""Arguments that no literal can be: their source says what they are."""


def convert_trl(options: Mapping[str, Any]) -> Draft:
    """The config that trains as these options do; what is not among them is as in TRL."""
    unknown = {
        name: value for name, value in options.items() if isinstance(value, Source) and name not in OBJECTS
    }
    draft = Draft(TABLE, {name: value for name, value in options.items() if name not in unknown}, DEFAULTS)
    for name, value in unknown.items():
        row = TABLE.find(name)
        if row is None or row.kind != "automatic":
            draft.lose(name, f"{value} is known only when the file runs: give {name}=VALUE after the file")
    _convert_batches(draft)
    _convert_lengths(draft)
    _convert_data(draft)
    _convert_rewards(draft)
    _convert_loss(draft)
    _convert_kl(draft)
    _convert_importance(draft)
    _convert_steps(draft)
    _convert_machine(draft)
    draft.finish()
    return draft


def _updates(draft: Draft) -> int:
    """Optimizer updates of one of our steps, which are TRL's steps: each pass has its own."""
    return int(draft.fields["trainer.mini_batches"] * draft.take("num_iterations"))


def _convert_batches(draft: Draft) -> None:
    device, processes = draft.take("per_device_train_batch_size"), draft.take(PROCESSES)
    accumulated, size = draft.take("gradient_accumulation_steps"), draft.take("num_generations")
    total = draft.take("generation_batch_size")
    per_generation = draft.take("steps_per_generation") or accumulated
    if total:
        per_generation = max(total // (device * processes), 1)
    total = total or device * processes * per_generation
    draft.put("trainer.groups_per_step", max(total // size, 1), "generation_batch_size / num_generations")
    draft.put(
        "trainer.mini_batches",
        max(per_generation // accumulated, 1),
        "steps_per_generation / gradient_accumulation_steps",
    )
    draft.put("trainer.max_staleness", 0, "TRL generates and trains in turns")
    if total % size:
        draft.approximate("num_generations", f"{total} completions are no whole number of groups")
    if not draft.has(PROCESSES):
        draft.explain(PROCESSES, "1 is assumed; more processes make larger steps: give num_processes=8")
    draft.put("trainer.num_ranks", processes, PROCESSES)


def _convert_lengths(draft: Draft) -> None:
    completion = draft.take("max_completion_length")
    whole = draft.take("vllm_max_model_length")
    prompt = draft.take("max_prompt_length")
    if prompt is None:
        prompt = whole - completion if whole and whole > completion else PROMPT_TOKENS
        draft.explain(
            "max_prompt_length", f"TRL takes any; here it is {prompt}, and a longer prompt is an error"
        )
    else:
        draft.put("data.overlong_prompts", "left", "max_prompt_length")
    draft.put("rollout.sampling.max_tokens", completion, "max_completion_length")
    draft.put("data.max_prompt_tokens", prompt, "max_prompt_length")
    draft.put("model.max_model_len", max(whole or 0, prompt + completion), "prompt and completion")
    rows = draft.take("per_device_train_batch_size")
    draft.put(
        "trainer.micro_batch_tokens",
        rows * (prompt + completion),
        "per_device_train_batch_size of full length",
    )


def _convert_data(draft: Draft) -> None:
    names = ("train_dataset", "dataset_name", "datasets")
    found = [(name, draft.take(name)) for name in names]
    option, value = next(((name, value) for name, value in found if value), ("train_dataset", ""))
    if Path(str(value)).suffix in (".jsonl", ".json", ".parquet"):
        draft.put("data.train", value, option)
    else:
        draft.put("data.train", "train.jsonl", "write the data set there")
        draft.lose(option, "data are JSONL or Parquet files here: save it with to_json or to_parquet")
    if held := draft.take("eval_dataset"):
        draft.put("data.eval", {"held_out": "eval.jsonl"}, "write the data set there")
        draft.lose("eval_dataset", f"write {held} as JSONL or Parquet")
    strategy, every = draft.take("eval_strategy"), draft.take("eval_steps")
    if str(strategy) == "steps" and every:
        draft.put("trainer.evaluation.every", math.ceil(every / _updates(draft)), "eval_steps, in steps")


def _convert_rewards(draft: Draft) -> None:
    given = draft.take("reward_funcs")
    weights, file = draft.take("reward_weights"), draft.take(FILE)
    names = [given] if isinstance(given, str) else list(given or ())
    if not names:
        draft.lose("reward_funcs", "name the function in reward.function; here it is the default, gsm8k")
        return
    if len(names) == 1 and "/" not in str(names[0]):
        draft.put("reward.function", _function(str(names[0]), str(file or "")), "reward_funcs")
        return
    rewards: dict[str, Any] = {}
    servers: dict[str, Any] = {}
    for index, name in enumerate(names):
        key = re.sub(r"\W+", "_", str(name)).strip("_")[-60:]
        if "/" in str(name) and ".py" not in str(name):
            reward: dict[str, Any] = {"model": {"servers": key}}
            servers[key] = {"model": name, "local": {}}
        else:
            reward = {"function": _function(str(name), str(file or ""))}
        if weights:
            reward["weight"] = weights[index]
        rewards[key] = reward
    draft.put("reward.rewards", rewards, "reward_funcs, reward_weights")
    if servers:
        draft.put("servers", servers, "reward_funcs")


def _function(name: str, file: str) -> str:
    """`package.module:name`, or the Python file that has it."""
    if ":" in name:
        return name
    module, _, last = name.rpartition(".")
    if module:
        return f"{module}:{last}"
    from_trl = last.endswith("_reward") and last in (
        "accuracy_reward",
        "think_format_reward",
        "reasoning_accuracy_reward",
    )
    return f"trl.rewards:{last}" if from_trl else f"{file or 'rewards.py'}:{last}"


def _convert_loss(draft: Draft) -> None:
    kind, level = str(draft.take("loss_type")), str(draft.take("importance_sampling_level"))
    low = draft.take("epsilon")
    high = draft.take("epsilon_high")
    high, moves = (low if high is None else high), _updates(draft) > 1
    loss = {"sapo": "sapo", "cispo": "cispo", "vespo": "vespo"}.get(kind, "ppo")
    if level.startswith("sequence") and loss == "ppo":
        loss = "gspo"
    if loss not in LOSSES or kind not in NORMALISATIONS:
        draft.lose("loss_type", f"no {kind} here: {loss if loss in LOSSES else 'ppo'}, normalised by token")
    loss = loss if loss in LOSSES else "ppo"
    if LOSSES[loss].is_idle_at_one and not moves:
        option = "loss_type" if loss == "sapo" else "importance_sampling_level"
        draft.explain(option, f"with one update a step the ratio is 1, and {loss} is ppo")
        loss = "ppo"
    if level == "sequence_token":
        draft.approximate("importance_sampling_level", "the ratio of the sequence, without that of the token")
    if loss == "cispo":
        draft.put(ALGORITHM + "old_logprobs", "rollout", "cispo weighs by the ratio to the rollout")
        low, high = 1.0, high - 1.0
    draft.put(ALGORITHM + "loss", loss, "loss_type, importance_sampling_level")
    draft.put(ALGORITHM + "normalisation", NORMALISATIONS.get(kind, "token"), "loss_type")
    draft.put(ALGORITHM + "clip_low", min(low, 1.0), "epsilon")
    draft.put(ALGORITHM + "clip_high", max(high, 0.0), "epsilon_high; epsilon where it is not given")
    bound = draft.take("delta")
    if LOSSES[loss].has_dual_clip and moves:
        draft.put(ALGORITHM + "dual_clip", bound if bound is None else float(bound), "delta")
    elif bound:
        draft.explain("delta", "with one update a step the ratio is always 1")
    scale = draft.take("scale_rewards")
    advantage = "dr_grpo" if scale in ("none", False, "False", "false") else "grpo"
    if scale == "batch" and "grpo_batch" in ADVANTAGES:
        advantage = "grpo_batch"
    elif scale == "batch":
        draft.lose("scale_rewards", "scaled in each group here")
    draft.put(ALGORITHM + "advantage", advantage, "scale_rewards")


def _convert_kl(draft: Draft) -> None:
    weight, corrects = draft.take("beta"), draft.take("use_bias_correction_kl")
    syncs, mixup, every = (
        draft.take(name) for name in ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
    )
    if not weight:
        return
    draft.put(ALGORITHM + "kl.place", "loss", "beta")
    draft.put(ALGORITHM + "kl.coefficient", weight, "beta")
    corrected = "corrected_k3" if "corrected_k3" in ESTIMATOR_NAMES else "k2"
    draft.put(ALGORITHM + "kl.estimator", corrected if corrects else "k3", "use_bias_correction_kl")
    if not corrects or corrected != "k2":
        draft.put(ALGORITHM + "kl.bound", None, "TRL has none")
    draft.put(ALGORITHM + "reference.model", "updated" if syncs else "frozen", "beta, sync_ref_model")
    if syncs:
        draft.put(ALGORITHM + "reference.mixup", mixup, "ref_model_mixup_alpha")
        steps = math.ceil(every / _updates(draft))
        draft.put(ALGORITHM + "reference.every", steps, "ref_model_sync_steps, in steps")


def _convert_importance(draft: Draft) -> None:
    is_on, kind = (
        draft.take("vllm_importance_sampling_correction"),
        str(draft.take("vllm_importance_sampling_mode")),
    )
    high = draft.take("vllm_importance_sampling_cap") or draft.take("vllm_importance_sampling_clip_max")
    low, has_vllm = draft.take("vllm_importance_sampling_clip_min"), draft.take("use_vllm")
    draft.put("rollout.engine", "vllm" if has_vllm else "transformers", "use_vllm")
    mode, share = draft.take("vllm_mode"), draft.take("vllm_gpu_memory_utilization")
    if has_vllm and mode == "colocate":
        draft.approximate("vllm_mode", "the engine has GPUs of its own here")
        if draft.has("vllm_gpu_memory_utilization"):
            draft.put("rollout.vllm.gpu_memory_utilization", share, "vllm_gpu_memory_utilization")
    if draft.fields.get(ALGORITHM + "old_logprobs") == "rollout":
        return
    field = ALGORITHM + "importance."
    if not has_vllm or not is_on:
        draft.put(
            field + "mode",
            "off",
            "without use_vllm" if not has_vllm else "vllm_importance_sampling_correction",
        )
        return
    level, _, action = kind.partition("_")
    draft.put(field + "mode", action, "vllm_importance_sampling_mode")
    is_sequence = LOSSES[draft.fields[ALGORITHM + "loss"]].level == "sequence"
    if is_sequence and level == "token":
        draft.approximate("vllm_importance_sampling_mode", "a sequence has one weight, as it has one ratio")
    draft.put(field + "level", "sequence" if is_sequence else level, "vllm_importance_sampling_mode")
    draft.put(field + "high", 1000.0 if high is None else float(high), "vllm_importance_sampling_clip_max")
    if low:
        draft.put(field + "low", low, "vllm_importance_sampling_clip_min")


def _convert_steps(draft: Draft) -> None:
    updates, steps = _updates(draft), 0
    limit, epochs = draft.take("max_steps"), draft.take("num_train_epochs")
    if limit > 0:
        steps = math.ceil(limit / updates)
        draft.put("trainer.steps", steps, origin("max_steps", "in steps"))
    else:
        draft.put("trainer.epochs", epochs, "num_train_epochs")
    warmup, ratio = draft.take("warmup_steps") or 0, draft.take("warmup_ratio") or 0
    if 0 < warmup < 1:
        warmup, ratio = 0, warmup
    if warmup:
        draft.put("trainer.optimizer.warmup_steps", math.ceil(warmup / updates), "warmup_steps, in steps")
    elif ratio and steps:
        draft.put("trainer.optimizer.warmup_steps", math.ceil(ratio * steps), "warmup_ratio")
    elif ratio:
        draft.lose("warmup_ratio", "set trainer.optimizer.warmup_steps to ratio * steps")
    strategy, every = draft.take("save_strategy"), draft.take("save_steps")
    if strategy == "no":
        draft.explain(
            "save_strategy", "checkpoints are what a run recovers from: every 10 steps, two are kept"
        )
    elif every >= 1:
        draft.put("trainer.checkpoint_every", math.ceil(every / updates), "save_steps, in steps")


def _convert_machine(draft: Draft) -> None:
    half = draft.take("bf16") or draft.take("fp16")
    named = [
        draft.take(name)
        for name in ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")
    ]
    is_half = half and "float32" not in named
    draft.put("model.dtype", "bfloat16" if is_half else "float32", "bf16")
    if draft.has("adam_beta1") or draft.has("adam_beta2"):
        draft.put(
            "trainer.optimizer.betas",
            [draft.take("adam_beta1"), draft.take("adam_beta2")],
            "adam_beta1, adam_beta2",
        )
    peft = str(draft.take("peft_config") or "")
    if draft.take("use_peft") or "LoraConfig" in peft:
        rank, alpha = re.search(r"\br=(\d+)", peft), re.search(r"lora_alpha=([\d.]+)", peft)
        draft.put("trainer.lora.rank", int(rank[1]) if rank else draft.take("lora_r"), "lora_r")
        draft.put("trainer.lora.alpha", float(alpha[1]) if alpha else draft.take("lora_alpha"), "lora_alpha")
        if modules := draft.take("lora_target_modules"):
            draft.put("trainer.lora.target_modules", modules, "lora_target_modules")
    draft.copy_records("report_to", ("none", "tensorboard", "all"), "run_name")
