"""verl's options as our config: what the table cannot say about batches, lengths, machines and rewards."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.services.console.convert.draft import Draft, origin
from tidemill.services.console.convert.verl_algorithm import convert_algorithm
from tidemill.services.console.convert.verl_defaults import DEFAULTS, RENAMED
from tidemill.services.console.convert.verl_table import (
    ASYNC,
    ENGINE_SHARES,
    OVERLONG,
    TABLE,
    VAL,
    A,
    C,
    M,
    R,
    W,
)

MODULE = "module"
"""Given with the options: which of verl's programs a script starts."""
OF_TEST_SETS = ("test", "val", "validation", "valid", "eval")


def convert_verl(options: Mapping[str, Any]) -> Draft:
    """The config that trains as these options do; what is not among them is as in verl."""
    given = {_today(name): value for name, value in options.items()}
    module = str(given.pop(MODULE, ""))
    if not given.get("algorithm.filter_groups.enable"):  # a bound of what is off
        given.pop("algorithm.filter_groups.max_num_gen_batches", None)
    if any(name.startswith(ASYNC) for name in given) or "fully_async" in module:
        mode = "fully_async"
    elif "one_step_off" in module or given.get("actor_rollout_ref.hybrid_engine") is False:
        mode = "one_step"
    else:
        mode = {"colocate_async": "one_step", "separate_async": "fully_async"}.get(
            str(given.get("trainer.v1.trainer_mode")), "sync"
        )
    defaults = DEFAULTS | {C + "bypass_mode": mode != "sync"}
    draft = Draft(TABLE, given, defaults)
    _convert_model(draft)
    _convert_data(draft)
    _convert_engine(draft, mode)
    _convert_reward(draft)
    _convert_batches(draft, mode)
    _convert_length(draft, mode)
    convert_algorithm(draft)
    _convert_evaluation(draft)
    _convert_machine(draft, mode)
    _convert_records(draft)
    draft.finish()
    return draft


def _today(name: str) -> str:
    for old, new in RENAMED.items():
        if name == old or (old.endswith(".") and name.startswith(old)):
            return new + name[len(old) :]
    return name


def _convert_model(draft: Draft) -> None:
    prompt, response = draft.take("data.max_prompt_length"), draft.take("data.max_response_length")
    if not draft.has(R + "max_model_len"):
        draft.put("model.max_model_len", prompt + response, "max_prompt_length + max_response_length")
    prefix = M + "override_config."
    tree: dict[str, Any] = {}
    for option in [name for name in draft.given if name.startswith(prefix)]:
        *sections, name = option.removeprefix(prefix).split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = draft.take(option)
    if tree:
        draft.put("model.overrides", tree, M + "override_config")
    if rank := draft.take(M + "lora_rank"):
        draft.put("trainer.lora.rank", rank, M + "lora_rank")
        draft.put("trainer.lora.alpha", draft.take(M + "lora_alpha"), M + "lora_alpha")
        draft.put("trainer.lora.target_modules", draft.take(M + "target_modules"), M + "target_modules")


def _convert_data(draft: Draft) -> None:
    files = draft.take("data.val_files")
    if files:
        names = [files] if isinstance(files, str) else list(files)
        draft.put("data.eval", {_name(file, names): file for file in names}, "data.val_files")
    drops, truncation = draft.take("data.filter_overlong_prompts"), draft.take("data.truncation")
    if drops:
        draft.put("data.overlong_prompts", "drop", "data.filter_overlong_prompts")
    elif truncation != "error":
        draft.put("data.overlong_prompts", truncation, "data.truncation")


def _name(file: str, files: list[str]) -> str:
    path = Path(file)
    name = path.parent.name if path.stem in OF_TEST_SETS and path.parent.name else path.stem
    unique = sum(Path(other).stem == path.stem for other in files) == 1 or path.parent.name
    return name if unique else f"{name}-{files.index(file)}"


def _convert_engine(draft: Draft, mode: str) -> None:
    name = draft.take(R + "name")
    if name in ("sglang", "trtllm"):
        draft.approximate(R + "name", "the engine is vLLM here")
    draft.put("rollout.engine", "transformers" if name == "hf" else "vllm", R + "name")
    draft.put(
        "rollout.sampling.max_tokens", draft.take("data.max_response_length"), "data.max_response_length"
    )
    draft.put("rollout.sampling.temperature", draft.take(R + "temperature"), R + "temperature")
    if (top_p := draft.take(R + "top_p")) < 1:
        draft.put("rollout.sampling.top_p", top_p, R + "top_p")
    if (top_k := draft.take(R + "top_k")) > 0:
        draft.put("rollout.sampling.top_k", top_k, R + "top_k")
    extra = {}
    for option in draft.given:
        if option in (R + "max_num_batched_tokens", R + "enable_chunked_prefill"):
            extra[option.removeprefix(R)] = draft.take(option)
        elif option.startswith(R + "engine_kwargs.vllm."):
            extra[option.removeprefix(R + "engine_kwargs.vllm.")] = draft.take(option)
    if extra and name not in ("sglang", "trtllm", "hf"):
        draft.put("rollout.vllm.extra", extra, "engine options that go to vLLM as they are")


def _convert_reward(draft: Draft) -> None:
    path, name = (draft.take(f"{W}custom_reward_function.{part}") for part in ("path", "name"))
    model = draft.take(W + "reward_model.model_path") if draft.take(W + "reward_model.enable") else None
    if model:
        draft.put(
            "reward.rewards",
            {"reward_model": {"model": {"servers": "reward_model"}}},
            origin(W + "reward_model.model_path", "docs/judges.md has its options"),
        )
        draft.put("servers", {"reward_model": {"model": model, "local": {}}}, W + "reward_model.model_path")
        if path:
            draft.lose(W + "custom_reward_function.path", "give it a name in reward.rewards, with the model")
    elif path:
        draft.put("reward.function", f"{path}:{name}", W + "custom_reward_function")
    else:
        files = str(draft.given.get("data.train_files", "")).lower()
        guess = "math" if any(word in files for word in ("math", "dapo", "aime")) else "gsm8k"
        draft.put("reward.function", guess, "guessed from data.train_files; verl chooses by data_source")
        draft.approximate(
            W + "custom_reward_function.path",
            f"none is given, and verl scores by data_source: here all rows are scored by {guess}, "
            "with 0 or 1. "
            "Some of verl's functions (math_dapo) give -1 or 1: advantages are the same, plots are not",
        )


def _convert_batches(draft: Draft, mode: str) -> None:
    """Groups of a step, updates in it, and how old they may be."""
    mini = draft.take(A + "ppo_mini_batch_size")
    if mode == "fully_async":
        sync, batches = (
            draft.take(ASYNC + name) for name in ("trigger_parameter_sync_step", "require_batches")
        )
        if draft.has("trainer.v1.trainer_mode"):
            sync, batches = draft.take("trainer.v1.separate_async.parameter_sync_step") or sync, 1
        updates, groups = sync * batches, sync * batches * mini
        draft.put(
            "trainer.groups_per_step",
            groups,
            "syncs * batches * ppo_mini_batch_size: what one version trains",
        )
        draft.put("trainer.mini_batches", updates, "trigger_parameter_sync_step * require_batches")
        share = draft.take(ASYNC + "staleness_threshold")
        spans = draft.take("trainer.v1.sampler.max_off_policy_threshold")
        draft.put("trainer.max_staleness", int(spans or math.ceil(share)), ASYNC + "staleness_threshold")
        draft.put("trainer.batch_order", "as_ready", "as samples complete")
        draft.approximate(
            ASYNC + "staleness_threshold", "a share of extra samples there, a bound in steps here: rounded up"
        )
        draft.take("data.train_batch_size")
        return
    groups = draft.take("data.train_batch_size")
    draft.put("trainer.groups_per_step", groups, "data.train_batch_size")
    updates = max(groups // mini, 1)
    if groups % mini:
        updates = max(number for number in range(1, updates + 1) if groups % number == 0)
        draft.approximate(
            A + "ppo_mini_batch_size", f"it does not divide the batch: {updates} equal updates a step"
        )
    draft.put("trainer.mini_batches", updates, "train_batch_size / ppo_mini_batch_size")
    stale = {"sync": 0, "one_step": 1}[mode]
    words = "on-policy, as verl's synchronous trainer" if not stale else "one step off-policy"
    draft.put("trainer.max_staleness", stale, words)
    for option in ("trainer.v1.trainer_mode", "trainer.v1.sampler.max_off_policy_threshold"):
        draft.take(option)


def _convert_length(draft: Draft, mode: str) -> None:
    """Steps or epochs, warm-up and checkpoints."""
    steps, epochs = draft.take("trainer.total_training_steps"), draft.take("trainer.total_epochs")
    if mode == "fully_async" and not draft.has("trainer.v1.trainer_mode"):
        option = "rollout.total_rollout_steps"
        steps = max(int(draft.take(option)) // draft.fields["trainer.groups_per_step"], 1)
        draft.put("trainer.steps", steps, origin(option, "/ groups_per_step"))
    elif steps:
        draft.put("trainer.steps", int(steps), "trainer.total_training_steps")
    else:
        draft.put("trainer.epochs", epochs, "trainer.total_epochs")
    warmup, ratio = (draft.take(f"{A}optim.lr_warmup_steps{end}") for end in ("", "_ratio"))
    if warmup is not None and warmup > 0:
        draft.put("trainer.optimizer.warmup_steps", warmup, A + "optim.lr_warmup_steps")
    elif ratio and steps:
        draft.put("trainer.optimizer.warmup_steps", round(ratio * steps), A + "optim.lr_warmup_steps_ratio")
    elif ratio:
        draft.lose(A + "optim.lr_warmup_steps_ratio", "set trainer.optimizer.warmup_steps to ratio * steps")
    every = draft.take("trainer.save_freq")
    if every > 0:
        draft.put("trainer.checkpoint_every", every, "trainer.save_freq")
    else:
        draft.explain(
            "trainer.save_freq", "checkpoints are what a run recovers from: every 10 steps, two are kept"
        )


def _convert_evaluation(draft: Draft) -> None:
    every, field = draft.take("trainer.test_freq"), "trainer.evaluation."
    if not draft.given.get("data.val_files"):
        return
    draft.put(field + "every", max(every, 0), "trainer.test_freq")
    if every <= 0:
        draft.put(field + "at_end", False, "trainer.test_freq")
    is_sampled, samples = draft.take(VAL + "do_sample"), draft.take(VAL + "n")
    temperature = draft.take(VAL + "temperature")
    if not is_sampled and temperature:
        draft.approximate(VAL + "do_sample", "false is greedy: temperature 0")
    temperature = temperature if is_sampled else 0.0
    draft.put(field + "temperature", temperature, VAL + "temperature, do_sample")
    if samples > 1 and not temperature:
        draft.lose(VAL + "n", "greedy samples are all alike: one is enough")
    elif samples > 1:
        draft.put(field + "samples", samples, VAL + "n")
    top_p, top_k = draft.take(VAL + "top_p"), draft.take(VAL + "top_k")
    if temperature and top_p < 1:
        draft.put(field + "top_p", top_p, VAL + "top_p")
    if temperature and top_k > 0:
        draft.put(field + "top_k", top_k, VAL + "top_k")


def _convert_machine(draft: Draft, mode: str) -> None:
    ranks = draft.take("trainer.n_gpus_per_node") * draft.take("trainer.nnodes")
    draft.put("trainer.num_ranks", ranks, "n_gpus_per_node * nnodes")
    if mode == "fully_async" or draft.has("rollout.n_gpus_per_node"):
        gpus = draft.take("rollout.n_gpus_per_node") * draft.take("rollout.nnodes")
        workers = max(gpus // draft.take(R + "tensor_model_parallel_size"), 1)
        draft.put("rollout.workers", workers, "GPUs of the engines / tensor_model_parallel_size")
    elif ranks > 1:
        draft.approximate(
            "trainer.n_gpus_per_node", f"verl's engine shares these; {ENGINE_SHARES}, beside num_ranks"
        )
    total = draft.take("data.max_prompt_length") + draft.take("data.max_response_length")
    rows = draft.take(A + "ppo_micro_batch_size_per_gpu") or draft.take(A + "ppo_micro_batch_size")
    is_dynamic = draft.take(A + "use_dynamic_bsz")
    if rows and not is_dynamic:
        tokens, comment = rows * total, "ppo_micro_batch_size_per_gpu * (prompt + response)"
    else:
        tokens, comment = draft.take(A + "ppo_max_token_len_per_gpu"), A + "ppo_max_token_len_per_gpu"
    draft.put("trainer.micro_batch_tokens", max(tokens, total), comment)


def _convert_records(draft: Draft) -> None:
    draft.copy_records("trainer.logger", ("console", "tensorboard", "file"), "trainer.experiment_name")
    draft.take(OVERLONG + "enable")
