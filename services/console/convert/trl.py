"""Options of TRL that its table cannot express."""

import re
from pathlib import Path
from typing import Any

from tidemill.services.console.convert.draft import Draft
from tidemill.services.console.convert.fit import put_warmup

PROMPT_TOKENS = 1024
OWN_REWARDS = ("accuracy_reward", "think_format_reward", "reasoning_accuracy_reward")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LOAD = re.compile(r"load_dataset\('([^']+)'(?:, '([^']+)')?([^()]*)\)(.*)", re.DOTALL)
_SPLIT = re.compile(r"split='([^']+)'")


def convert_trl(draft: Draft, file: str) -> None:
    """The table's fields, and those from several options; `file` is the Python file that they are from."""
    # Before the rows: some of them count in updates of a step.
    _convert_batches(draft)
    draft.copy()
    _convert_lengths(draft)
    _convert_data(draft)
    _convert_rewards(draft, file)
    _convert_adapters(draft)
    put_warmup(draft, "warmup_steps", "warmup_ratio", draft.updates_per_step)


def _convert_batches(draft: Draft) -> None:
    """Groups and updates of a step: TRL counts its steps in updates."""
    device, processes = draft.take("per_device_train_batch_size"), draft.take("num_processes")
    accumulated, size = draft.take("gradient_accumulation_steps"), draft.take("num_generations")
    total, per_generation = draft.take("generation_batch_size"), draft.take("steps_per_generation")
    per_generation = max(total // (device * processes), 1) if total else per_generation or accumulated
    total = total or device * processes * per_generation
    note = "generation_batch_size / num_generations"
    draft.put("trainer.groups_per_step", max(total // size, 1), note=note)
    note = "steps_per_generation / gradient_accumulation_steps"
    draft.put("trainer.mini_batches", max(per_generation // accumulated, 1), note=note)
    if total % size:
        draft.say("approximated", "num_generations", f"{total} completions are no whole number of groups")


def _convert_lengths(draft: Draft) -> None:
    completion, whole = draft.get("rollout.sampling.max_tokens"), draft.take("vllm_max_model_length")
    if prompt := draft.take("max_prompt_length"):
        draft.put("data.overlong_prompts", "left", "max_prompt_length")
    else:
        prompt = whole - completion if whole and whole > completion else PROMPT_TOKENS
        text = f"TRL takes any; here it is {prompt}, and a longer prompt is an error"
        draft.say("automatic", "max_prompt_length", text)
    draft.put("data.max_prompt_tokens", prompt, "max_prompt_length")
    draft.put("model.max_model_len", max(whole or 0, prompt + completion), note="prompt and completion")
    rows = draft.take("per_device_train_batch_size")
    tokens = rows * (prompt + completion)
    draft.put("trainer.micro_batch_tokens", tokens, "per_device_train_batch_size", "of full length")


def _convert_data(draft: Draft) -> None:
    names = ("train_dataset", "dataset_name", "datasets")
    found = {name: value for name in names if (value := draft.take(name))} or {"train_dataset": ""}
    option, value = next(iter(found.items()))
    config, split = draft.take("dataset_config"), draft.take("dataset_train_split")
    draft.put("data.train", _rows(draft, option, value, config, split) or "train.jsonl", option)
    if held := draft.take("eval_dataset"):
        held = _rows(draft, "eval_dataset", held, config, draft.take("dataset_test_split"))
        draft.put("data.eval", {"held_out": held or "eval.jsonl"}, "eval_dataset")


def _rows(draft: Draft, option: str, value: Any, config: str | None, split: str) -> str:
    """A file, or a set of the hub by its name or from a call of `load_dataset`; empty for anything else."""
    source = str(value)
    if Path(source).suffix in (".jsonl", ".json", ".parquet"):
        return source
    name, rest = source, ""
    if call := _LOAD.match(source):
        name, own_config, options, rest = call.groups()
        named = _SPLIT.search(options)
        config, split = own_config, named[1] if named else split
    if rest:
        draft.say("approximated", option, f"what follows is not done to its rows: {rest}")
    if _HUB_NAME.fullmatch(name):
        return f"hub:{name}{f'/{config}' if config else ''}@{split}"
    draft.say("lost", option, "data are files or sets of the hub here: save it with to_json or to_parquet")
    return ""


def _convert_rewards(draft: Draft, file: str) -> None:
    given, weights = draft.take("reward_funcs"), draft.take("reward_weights")
    names = [str(name) for name in ([given] if isinstance(given, str) else given or ())]
    if not names:
        draft.say("lost", "reward_funcs", "name one in reward.function; here it is the default, gsm8k")
    elif len(names) == 1 and "/" not in names[0]:
        draft.put("reward.function", _function(names[0], file), "reward_funcs")
    else:
        rewards: dict[str, dict[str, Any]] = {}
        servers: dict[str, Any] = {}
        for index, name in enumerate(names):
            key = re.sub(r"\W+", "_", name).strip("_")[-60:]
            rewards[key] = {"function": _function(name, file)}
            if "/" in name and ".py" not in name:
                rewards[key] = {"model": {"servers": key}}
                servers[key] = {"model": name, "local": {}}
            if weights:
                rewards[key]["weight"] = weights[index]
        draft.put("reward.rewards", rewards, "reward_funcs", "reward_weights")
        if servers:
            draft.put("servers", servers, "reward_funcs")


def _function(name: str, file: str) -> str:
    """`package.module:name`, or the Python file that has it."""
    module, _, last = name.rpartition(".")
    if ":" in name or module:
        return name if ":" in name else f"{module}:{last}"
    return f"trl.rewards:{last}" if last in OWN_REWARDS else f"{file or 'rewards.py'}:{last}"


def _convert_adapters(draft: Draft) -> None:
    peft = str(draft.take("peft_config") or "")
    is_object = "LoraConfig" in peft
    if not (draft.take("use_peft") or is_object):
        return

    def value_of(argument: str, option: str) -> Any:
        given, of_option = re.search(rf"\b{argument}=([\d.]+)", peft), draft.take(option)
        # The default of PEFT's LoraConfig differs from those of TRL's options.
        return given[1] if given else 8 if is_object else of_option

    draft.put("trainer.lora.rank", int(value_of("r", "lora_r")), "lora_r")
    draft.put("trainer.lora.alpha", float(value_of("lora_alpha", "lora_alpha")), "lora_alpha")
    named = re.search(r"target_modules=(\[[^]]*\])", peft)
    if modules := draft.take("lora_target_modules") or (named and re.findall(r"[\w.]+", named[1])):
        draft.put("trainer.lora.target_modules", modules, "lora_target_modules")
