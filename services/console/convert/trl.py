"""Options of TRL that its table cannot express."""

import math
import re
from pathlib import Path
from typing import Any

from tidemill.common.wire.sampling import FILTERS
from tidemill.services.console.convert.draft import Draft
from tidemill.services.console.convert.fit import EVALUATION, put_warmup

PROMPT_TOKENS = 1024
FIELDS_OF_INTERVALS = {"save_steps": "trainer.checkpoint_every", "eval_steps": "trainer.evaluation.every"}
NEVER = ("no", "none", "false")
"""Words for an evaluation that there is not."""
OWN_REWARDS = ("accuracy_reward", "think_format_reward", "reasoning_accuracy_reward")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LOAD = re.compile(r"load_dataset\('([^']+)'(?:, '([^']+)')?([^()]*)\)(.*)", re.DOTALL)
_SPLIT = re.compile(r"split='([^']+)'")


def convert_trl(draft: Draft, file: str) -> None:
    """The table's fields, and those from several options; `file` is the Python file that they are from."""
    # Before the rows: some of them count in updates of a step.
    _convert_batches(draft)
    has_no_interval = _resolve_shares(draft)
    draft.copy()
    if "save_steps" in has_no_interval:
        draft.drop("trainer.checkpoint_every")
    _convert_lengths(draft)
    _convert_data(draft, has_no_interval)
    _convert_rewards(draft, file)
    _convert_adapters(draft)
    _say_bound_of_cispo(draft)
    put_warmup(draft, "warmup_steps", "warmup_ratio", draft.updates_per_step)


def _convert_batches(draft: Draft) -> None:
    """Groups and updates of a step: TRL counts its steps in updates.

    A generation lasts for steps_per_generation micro-batches, again for each of num_iterations; an update
    takes gradient_accumulation_steps of them. Where a generation is shorter than an update, that trains on
    several generations of the same weights: they are one batch here.
    """
    device = draft.take("per_device_train_batch_size")
    processes = draft.take("num_processes")
    accumulated = draft.take("gradient_accumulation_steps")
    size = draft.take("num_generations")
    total = draft.take("generation_batch_size")
    per_generation = draft.take("steps_per_generation")
    passes = draft.take("num_iterations")
    per_generation = max(total // (device * processes), 1) if total else per_generation or accumulated
    is_whole = max(per_generation, accumulated) % min(per_generation, accumulated) == 0
    num_micro_batches = per_generation
    if per_generation < accumulated:
        # Micro-batches that are different: each generation comes num_iterations times in a row.
        num_micro_batches = max(accumulated // passes, per_generation)
        num_repeats = per_generation * passes
        is_whole = max(num_repeats, accumulated) % min(num_repeats, accumulated) == 0
        passes = max(num_repeats // accumulated, 1)
        draft.put("trainer.passes", passes, "num_iterations")
    completions = device * processes * num_micro_batches
    note = "completions of a generation, or of an update, / num_generations"
    draft.put("trainer.groups_per_step", max(completions // size, 1), note=note)
    note = "steps_per_generation / gradient_accumulation_steps"
    draft.put("trainer.mini_batches", max(num_micro_batches // accumulated, 1), note=note)
    if completions % size:
        draft.say(
            "approximated", "num_generations", f"{completions} completions are no whole number of groups"
        )
    if not is_whole:
        text = (
            f"updates of {accumulated} micro-batches are cut across generations of {per_generation}: not here"
        )
        draft.say("approximated", "steps_per_generation", text)


def _resolve_shares(draft: Draft) -> set[str]:
    """Turn intervals that are shares of the run into updates, as TRL does; returns the options that stay
    shares, because the number of updates follows from the rows."""
    unresolved = set()
    for option in ("save_steps", "eval_steps", "logging_steps"):
        share = draft.options.get(option)
        if not isinstance(share, float) or not 0.0 < share < 1.0:
            continue
        all_updates = draft.options.get("max_steps") or 0
        if all_updates > 0:
            draft.options[option] = math.ceil(all_updates * share)
            continue
        unresolved.add(option)
        if option in FIELDS_OF_INTERVALS:
            text = "a share of the run, whose length follows from the rows: set {} to it"
            draft.say("lost", option, text.format(FIELDS_OF_INTERVALS[option]))
        del draft.options[option]
    return unresolved


def _say_bound_of_cispo(draft: Draft) -> None:
    """cispo's epsilon_high bounds the ratio itself; here the bound is 1 + clip_high, so at least 1."""
    bound = draft.options.get("epsilon_high", draft.take("epsilon"))
    if draft.take("loss_type") == "cispo" and bound < 1:
        text = (
            f"of cispo it bounds the ratio itself: no weight is above {bound} there, and the loss is about "
            f"{bound} of that here, where the bound is 1 or more. 5 or so is what its paper means"
        )
        draft.say("lost", "epsilon_high", text)


def _convert_lengths(draft: Draft) -> None:
    completion = draft.get("rollout.sampling.max_tokens")
    whole = draft.take("vllm_max_model_length")
    prompt = draft.take("max_prompt_length")
    if prompt:
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


def _convert_data(draft: Draft, has_no_interval: set[str]) -> None:
    names = ("train_dataset", "dataset_name", "datasets")
    named = {name: draft.take(name) for name in names if draft.take(name)} or {"train_dataset": ""}
    option, value = next(iter(named.items()))
    config = draft.take("dataset_config")
    split = draft.take("dataset_train_split")
    draft.put("data.train", _rows(draft, option, value, config, split) or "train.jsonl", option)
    held = draft.take("eval_dataset")
    held_option = "eval_dataset"
    strategy = str(draft.take("eval_strategy") or "no").lower()
    is_evaluated = strategy not in NEVER
    if not held and is_evaluated and option == "dataset_name":
        # As TRL's script does.
        held = value
        held_option = "dataset_name"
    if not held:
        if is_evaluated:
            draft.say("lost", "eval_strategy", "there is no eval_dataset: name the rows in data.eval")
        return
    rows = _rows(draft, held_option, held, config, draft.take("dataset_test_split"))
    draft.put("data.eval", {"held_out": rows or "eval.jsonl"}, held_option)
    _convert_evaluation(draft, strategy, has_no_interval)


def _convert_evaluation(draft: Draft, strategy: str, has_no_interval: set[str]) -> None:
    """How often there are evaluations, and of what: TRL samples as in training."""
    draft.put(EVALUATION + "at_start", bool(draft.take("eval_on_start")), "eval_on_start")
    draft.put(EVALUATION + "every", 0, "eval_strategy")
    if strategy in NEVER:
        text = "TRL evaluates never: here the last version is evaluated; without data.eval none is"
        draft.say("automatic", "eval_strategy", text)
        return
    has_own = bool(draft.take("eval_steps")) or "eval_steps" in has_no_interval
    option = "eval_steps" if has_own else "logging_steps"
    if strategy == "epoch":
        text = (
            "once an epoch there, only at the end here: set trainer.evaluation.every to the steps of an epoch"
        )
        draft.say("approximated", "eval_strategy", text)
    elif option not in has_no_interval:
        draft.put(EVALUATION + "every", draft.steps_of(option, draft.take(option)), option)
        draft.used.add("eval_strategy")
    elif option == "logging_steps":
        text = "every logging_steps, a share of the run: set trainer.evaluation.every to it"
        draft.say("lost", "eval_strategy", text)
    draft.put(
        EVALUATION + "samples",
        draft.take("num_generations_eval") or draft.take("num_generations"),
        "num_generations_eval",
    )
    for name in ("temperature", *FILTERS):
        value = draft.get(f"rollout.sampling.{name}")
        if value:
            draft.put(EVALUATION + name, value, name)


def _rows(draft: Draft, option: str, value: Any, config: str | None, split: str) -> str:
    """A file, or a set of the hub by its name or from a call of `load_dataset`; empty for anything else."""
    source = str(value)
    if Path(source).suffix in (".jsonl", ".json", ".parquet"):
        return source
    name = source
    trailing = ""
    call = _LOAD.match(source)
    if call:
        name, own_config, options, trailing = call.groups()
        named = _SPLIT.search(options)
        config = own_config
        split = named[1] if named else split
    if trailing:
        draft.say("approximated", option, f"what follows is not done to its rows: {trailing}")
    if _HUB_NAME.fullmatch(name):
        return f"hub:{name}{f'/{config}' if config else ''}@{split}"
    draft.say("lost", option, "data are files or sets of the hub here: save it with to_json or to_parquet")
    return ""


def _convert_rewards(draft: Draft, file: str) -> None:
    functions = draft.take("reward_funcs")
    weights = draft.take("reward_weights")
    names = [str(name) for name in ([functions] if isinstance(functions, str) else functions or ())]
    if not names:
        draft.say("lost", "reward_funcs", "name one in reward.function; here it is the default, gsm8k")
    elif len(names) == 1 and "/" not in names[0] and (not weights or weights[0] == 1):
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
        match = re.search(rf"\b{argument}=([\d.]+)", peft)
        of_option = draft.take(option)
        if match:
            return match[1]
        # The default of PEFT's LoraConfig differs from those of TRL's options.
        return 8 if is_object else of_option

    # ModelConfig's default is 0.05, LoraConfig's 0.
    of_object = re.search(r"\blora_dropout=([\d.]+)", peft)
    of_options = 0.0 if is_object else draft.take("lora_dropout")
    dropout = float(of_object[1]) if of_object else float(of_options)
    if dropout:
        draft.say("lost", "lora_dropout", f"adapters have no dropout here; there it is {dropout:g}")
    draft.put("trainer.lora.rank", int(value_of("r", "lora_r")), "lora_r")
    draft.put("trainer.lora.alpha", float(value_of("lora_alpha", "lora_alpha")), "lora_alpha")
    named = re.search(r"target_modules=(\[[^]]*\])", peft)
    modules = draft.take("lora_target_modules") or (named and re.findall(r"[\w.]+", named[1]))
    if modules:
        draft.put("trainer.lora.target_modules", modules, "lora_target_modules")
