"""TRL: what its table cannot say."""

import math
import re
from pathlib import Path
from typing import Any

from tidemill.services.console.convert.draft import Draft
from tidemill.services.console.convert.fit import IMPORTANCE, LOSS, F, put_warmup, updates

PROMPT_TOKENS = 1024
OWN_REWARDS = ("accuracy_reward", "think_format_reward", "reasoning_accuracy_reward")
VLLM = "vllm_importance_sampling_"


def convert_trl(draft: Draft, file: str) -> None:
    """Fields from several options; `file` is the Python file that they are from."""
    _convert_batches(draft)
    _convert_lengths(draft)
    _convert_data(draft)
    _convert_rewards(draft, file)
    _convert_loss(draft)
    _convert_steps(draft)
    _convert_model(draft)


def _convert_batches(draft: Draft) -> None:
    device, processes = draft.take("per_device_train_batch_size"), draft.take("num_processes")
    accumulated, size = draft.take("gradient_accumulation_steps"), draft.take("num_generations")
    per_generation, total = (
        draft.take("steps_per_generation") or accumulated,
        draft.take("generation_batch_size"),
    )
    if total:
        per_generation = max(total // (device * processes), 1)
    total = total or device * processes * per_generation
    draft.put(
        "trainer.groups_per_step", max(total // size, 1), note="generation_batch_size / num_generations"
    )
    note = "steps_per_generation / gradient_accumulation_steps"
    draft.put("trainer.mini_batches", max(per_generation // accumulated, 1), note=note)
    draft.put("trainer.max_staleness", 0, note="TRL generates and trains in turns")
    draft.put("trainer.num_ranks", processes, "num_processes")
    if total % size:
        draft.say("approximated", "num_generations", f"{total} completions are no whole number of groups")
    if not draft.has("num_processes"):
        text = "1 is assumed; more processes make larger steps: give num_processes=8"
        draft.say("automatic", "num_processes", text)


def _convert_lengths(draft: Draft) -> None:
    completion, whole = draft.take("max_completion_length"), draft.take("vllm_max_model_length")
    if prompt := draft.take("max_prompt_length"):
        draft.put("data.overlong_prompts", "left", "max_prompt_length")
    else:
        prompt = whole - completion if whole and whole > completion else PROMPT_TOKENS
        text = f"TRL takes any; here it is {prompt}, and a longer prompt is an error"
        draft.say("automatic", "max_prompt_length", text)
    draft.put("rollout.sampling.max_tokens", completion, "max_completion_length")
    draft.put("data.max_prompt_tokens", prompt, "max_prompt_length")
    draft.put("model.max_model_len", max(whole or 0, prompt + completion), note="prompt and completion")
    rows = draft.take("per_device_train_batch_size")
    tokens = rows * (prompt + completion)
    draft.put("trainer.micro_batch_tokens", tokens, "per_device_train_batch_size", "of full length")


def _convert_data(draft: Draft) -> None:
    names = ("train_dataset", "dataset_name", "datasets")
    found = {name: value for name in names if (value := draft.take(name))} or {"train_dataset": ""}
    option, value = next(iter(found.items()))
    is_file = Path(str(value)).suffix in (".jsonl", ".json", ".parquet")
    draft.put("data.train", value if is_file else "train.jsonl", option)
    if not is_file:
        draft.say("lost", option, "data are JSONL or Parquet files here: save it with to_json or to_parquet")
    if held := draft.take("eval_dataset"):
        draft.put("data.eval", {"held_out": "eval.jsonl"}, "eval_dataset")
        draft.say("lost", "eval_dataset", f"write {held} as JSONL or Parquet")
    strategy, every = draft.take("eval_strategy"), draft.take("eval_steps")
    if str(strategy) == "steps" and every:
        draft.put("trainer.evaluation.every", math.ceil(every / updates(draft)), "eval_steps", "in steps")


def _convert_rewards(draft: Draft, file: str) -> None:
    given, weights = draft.take("reward_funcs"), draft.take("reward_weights")
    names = [str(name) for name in ([given] if isinstance(given, str) else given or ())]
    if not names:
        draft.say(
            "lost", "reward_funcs", "name the function in reward.function; here it is the default, gsm8k"
        )
    elif len(names) == 1 and "/" not in names[0]:
        draft.put("reward.function", _function(names[0], file), "reward_funcs")
    else:
        rewards: dict[str, Any] = {}
        for index, name in enumerate(names):
            is_model = "/" in name and ".py" not in name
            model = {"model": {"local_replicas": {"model": name}}}
            reward = model if is_model else {"function": _function(name, file)}
            weight = {"weight": weights[index]} if weights else {}
            rewards[re.sub(r"\W+", "_", name).strip("_")[-60:]] = {**reward, **weight}
        draft.put("reward.rewards", rewards, "reward_funcs", "reward_weights")
    if draft.take("multi_objective_aggregation") == "normalize_then_sum" and len(names) > 1:
        draft.put(F + "advantage", "gdpo", "multi_objective_aggregation")


def _function(name: str, file: str) -> str:
    """`package.module:name`, or the Python file that has it."""
    module, _, last = name.rpartition(".")
    if ":" in name or module:
        return name if ":" in name else f"{module}:{last}"
    return f"trl.rewards:{last}" if last in OWN_REWARDS else f"{file or 'rewards.py'}:{last}"


def _convert_loss(draft: Draft) -> None:
    low, high = draft.take("epsilon"), draft.take("epsilon_high")
    high = low if high is None else high
    if draft.get(LOSS) == "cispo":
        low, high = 1.0, high - 1.0
    draft.put(F + "clip_low", low, "epsilon")
    draft.put(F + "clip_high", high, "epsilon_high" if draft.has("epsilon_high") else "epsilon")
    if draft.get(LOSS) == "vespo":
        for sign, name in (("pos", "positive"), ("neg", "negative")):
            pair = [draft.take(f"vespo_{letter}_{sign}") for letter in ("k", "lambda")]
            draft.put(f"{F}vespo.{name}", pair, f"vespo_k_{sign}, vespo_lambda_{sign}")
    if draft.get(F + "reference.model") == "updated":
        every = math.ceil(draft.take("ref_model_sync_steps") / updates(draft))
        draft.put(F + "reference.every", every, "ref_model_sync_steps", "in steps")
    high = draft.take(VLLM + "cap") or draft.take(VLLM + "clip_max")
    corrects, kind, low = (draft.take(VLLM + name) for name in ("correction", "mode", "clip_min"))
    if not draft.take("use_vllm") or not corrects:
        draft.put(IMPORTANCE + "mode", "off", VLLM + "correction" if draft.take("use_vllm") else "use_vllm")
    else:
        level, _, action = str(kind).partition("_")
        draft.put(IMPORTANCE + "mode", action, VLLM + "mode")
        draft.put(IMPORTANCE + "level", level, VLLM + "mode")
        draft.put(IMPORTANCE + "high", 1000.0 if high is None else float(high), VLLM + "clip_max")
        if low:
            draft.put(IMPORTANCE + "low", low, VLLM + "clip_min")
    if draft.take("use_vllm") and draft.take("vllm_mode") == "colocate":
        draft.say("approximated", "vllm_mode", "the engine has GPUs of its own here")


def _convert_steps(draft: Draft) -> None:
    per_step, limit = updates(draft), draft.take("max_steps")
    if limit > 0:
        draft.put("trainer.steps", math.ceil(limit / per_step), "max_steps", "in steps")
    put_warmup(draft, "warmup_steps", "warmup_ratio", per_step)
    strategy, every = draft.take("save_strategy"), draft.take("save_steps")
    if strategy == "no":
        text = "checkpoints are what a run recovers from: every 10 steps, two are kept"
        draft.say("automatic", "save_strategy", text)
    elif every >= 1:
        draft.put("trainer.checkpoint_every", math.ceil(every / per_step), "save_steps", "in steps")


def _convert_model(draft: Draft) -> None:
    is_half = draft.take("bf16") or draft.take("fp16")
    names = ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")
    is_float32 = "float32" in [str(draft.take(name)) for name in names]
    draft.put("model.dtype", "bfloat16" if is_half and not is_float32 else "float32", "bf16")
    betas = [draft.take("adam_beta1"), draft.take("adam_beta2")]
    if draft.has("adam_beta1") or draft.has("adam_beta2"):
        draft.put("trainer.optimizer.betas", betas, "adam_beta1, adam_beta2")
    peft = str(draft.take("peft_config") or "")
    if draft.take("use_peft") or "LoraConfig" in peft:
        rank, alpha = re.search(r"\br=(\d+)", peft), re.search(r"lora_alpha=([\d.]+)", peft)
        draft.put("trainer.lora.rank", int(rank[1]) if rank else draft.take("lora_r"), "lora_r")
        draft.put("trainer.lora.alpha", float(alpha[1]) if alpha else draft.take("lora_alpha"), "lora_alpha")
        if modules := draft.take("lora_target_modules"):
            draft.put("trainer.lora.target_modules", modules, "lora_target_modules")
