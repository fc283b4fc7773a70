"""Options of verl that its table cannot express."""

import math
from pathlib import Path
from typing import Any, get_args

from tidemill.common.config.algorithm_sections import Criterion
from tidemill.services.console.convert.draft import Draft
from tidemill.services.console.convert.fit import OLD, F, put_warmup

A = "actor_rollout_ref.actor."
C = "algorithm.rollout_correction."
W = "reward."
ASYNC = "async_training."
V1 = "trainer.v1."
OF_TEST_SETS = ("test", "val", "validation", "valid", "eval")
FORMER_CRITERIA = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def convert_verl(draft: Draft, module: str) -> None:
    """The table's fields, and those from several options; `module` is the program that a script starts."""
    is_apart = draft.take("actor_rollout_ref.hybrid_engine") is False
    trainer = {"colocate_async": "one_step", "separate_async": "fully_async"}
    mode = trainer.get(str(draft.take(V1 + "trainer_mode")), "sync")
    if any(name.startswith(ASYNC) for name in draft.options) or "fully_async" in module:
        mode = "fully_async"
    elif "one_step_off" in module or is_apart:
        mode = "one_step"
    if mode != "sync" and draft.take(C + "bypass_mode") is None:
        draft.put(OLD, "rollout", C + "bypass_mode")
    draft.copy()
    _convert_batches(draft, mode)
    put_warmup(draft, A + "optim.lr_warmup_steps", A + "optim.lr_warmup_steps_ratio")
    _convert_machine(draft, mode)
    _convert_reward(draft)
    _convert_algorithm(draft)
    _convert_correction(draft)
    if "data.image_key" in draft.options:
        draft.put("images", {}, "data.image_key", "its bounds are ours: see docs/images.md")
    files = draft.take("data.val_files")
    if files:
        names = [files] if isinstance(files, str) else list(files)
        draft.put("data.eval", {_name(file, names): file for file in names}, "data.val_files")


def _convert_batches(draft: Draft, mode: str) -> None:
    """Groups of a step, updates in it, and how old they may be."""
    mini = draft.take(A + "ppo_mini_batch_size")
    groups = draft.take("data.train_batch_size")
    sync = draft.take(ASYNC + "trigger_parameter_sync_step")
    batches = draft.take(ASYNC + "require_batches")
    sync_v1 = draft.take(V1 + "separate_async.parameter_sync_step")
    share = draft.take(ASYNC + "staleness_threshold")
    prompts = draft.take("rollout.total_rollout_steps")
    spans = draft.take(V1 + "sampler.max_off_policy_threshold")
    if mode == "fully_async":
        is_v1 = V1 + "trainer_mode" in draft.options
        updates = (sync_v1 or sync) if is_v1 else sync * batches
        groups = updates * mini
        draft.put("trainer.max_staleness", int(spans or math.ceil(share)), ASYNC + "staleness_threshold")
        draft.put("trainer.batch_order", "as_ready", note="as samples complete")
        text = "a share of extra samples there, a bound in steps here: rounded up"
        draft.say("approximated", ASYNC + "staleness_threshold", text)
        if not is_v1:
            draft.put("trainer.steps", max(int(prompts) // groups, 1), "rollout.total_rollout_steps")
    else:
        updates = max(number for number in range(1, max(groups // mini, 1) + 1) if groups % number == 0)
        if groups % mini and groups > mini:
            text = f"it does not divide the batch: {updates} equal updates a step"
            draft.say("approximated", A + "ppo_mini_batch_size", text)
        draft.put("trainer.max_staleness", 0 if mode == "sync" else 1, note=f"verl's trainer is {mode}")
    draft.put("trainer.groups_per_step", groups, "data.train_batch_size")
    draft.put("trainer.mini_batches", updates, A + "ppo_mini_batch_size")


def _convert_machine(draft: Draft, mode: str) -> None:
    ranks = draft.take("trainer.n_gpus_per_node") * draft.take("trainer.nnodes")
    draft.put("trainer.num_ranks", ranks, "trainer.n_gpus_per_node", "their product")
    gpus = draft.take("rollout.n_gpus_per_node") * draft.take("rollout.nnodes")
    if mode == "fully_async" or "rollout.n_gpus_per_node" in draft.options:
        workers = max(gpus // draft.get("rollout.vllm.tensor_parallel_size"), 1)
        draft.put("rollout.workers", workers, note="GPUs of the engines / tensor_model_parallel_size")
    elif ranks > 1:
        text = "verl's engine shares these; the engine has GPUs of its own here, beside num_ranks"
        draft.say("approximated", "trainer.n_gpus_per_node", text)
    total = draft.get("rollout.sampling.max_tokens") + draft.get("data.max_prompt_tokens")
    tokens = draft.take(A + "ppo_max_token_len_per_gpu")
    option = A + "ppo_max_token_len_per_gpu"
    rows = draft.take(A + "ppo_micro_batch_size_per_gpu") or draft.take(A + "ppo_micro_batch_size")
    if not draft.take(A + "use_dynamic_bsz") and rows:
        tokens = rows * total
        option = A + "ppo_micro_batch_size_per_gpu"
    # Tokens of one GPU, which has only a part of a sequence with several context ranks.
    longest = -(-total // draft.get("trainer.context_ranks", 1))
    draft.put("trainer.micro_batch_tokens", max(tokens, longest), option)


def _convert_reward(draft: Draft) -> None:
    path = draft.take(W + "custom_reward_function.path")
    name = draft.take(W + "custom_reward_function.name")
    model = draft.take(W + "reward_model.model_path")
    option = W + "custom_reward_function.path"
    if draft.take(W + "reward_model.enable") and model:
        rewards: dict[str, Any] = {"reward_model": {"model": {"servers": "reward_model"}}}
        rewards |= {"function": {"function": f"{path}:{name}"}} if path else {}
        draft.put("servers", {"reward_model": {"model": model, "local": {}}}, W + "reward_model.model_path")
        draft.put("reward.rewards", rewards, W + "reward_model.model_path", "docs/models.md has its options")
    elif path:
        draft.put("reward.function", f"{path}:{name}", option)
    else:
        files = str(draft.get("data.train")).lower()
        guess = "math" if any(word in files for word in ("math", "dapo", "aime")) else "gsm8k"
        draft.put("reward.function", guess, "data.train_files", "guessed; verl chooses by data_source")
        text = f"verl scores by data_source: here all rows are scored by {guess}, with 0 or 1 (some of verl's"
        draft.say("approximated", option, f"{text} give -1 or 1: advantages are the same, plots are not)")
    length = draft.take(W + "reward_kwargs.overlong_buffer_cfg.len")
    limit = draft.take(W + "reward_kwargs.max_resp_len")
    if F + "overlong.penalty" in draft.fields and length:
        share = round(min(length / (limit or draft.get("rollout.sampling.max_tokens")), 1.0), 6)
        draft.put(F + "overlong.buffer_share", share, W + "reward_kwargs.overlong_buffer_cfg.len")
    else:
        draft.drop(F + "overlong.")


def _convert_algorithm(draft: Draft) -> None:
    by_deviation = draft.take("algorithm.norm_adv_by_std_in_grpo")
    advantage = draft.get(F + "advantage")
    if advantage == "grpo" and not by_deviation:
        draft.put(F + "advantage", "dr_grpo", "algorithm.norm_adv_by_std_in_grpo")
    if advantage == "gae" and draft.options.get("critic.model.path") not in (None, draft.get("model.path")):
        draft.say("approximated", "critic.model.path", "the critic begins as a copy of the policy")
    option = A + "clip_ratio_c"
    loss = draft.take(A + "policy_loss.loss_mode")
    if loss not in ("vanilla", "dppo_tv", "dppo_kl") and option in draft.options:
        draft.say("approximated", option, "verl uses it with vanilla only; here gspo has dual_clip 3")
    if draft.take("algorithm.use_kl_in_reward") and draft.take(A + "use_kl_loss"):
        draft.say("lost", "algorithm.use_kl_in_reward", "the penalty has one place, and is in the loss")


def _convert_correction(draft: Draft) -> None:
    """Rejection by the recomputed logprobs against the rollout's."""
    criteria: dict[str, Any] = {}
    bounds = str(draft.take(C + "rollout_rs_threshold")).split(",")
    for index, name in enumerate(str(draft.take(C + "rollout_rs") or "").split(",")):
        criterion = FORMER_CRITERIA.get(name.strip(), name.strip())
        if name and criterion not in get_args(Criterion):
            draft.say("lost", C + "rollout_rs", f"no rejection by {criterion} here")
        elif name:
            low, is_range, high = bounds[min(index, len(bounds) - 1)].strip().partition("_")
            criteria[criterion] = [float(low), float(high)] if is_range else float(low)
            draft.put(F + "rejection.bounds", criteria, C + "rollout_rs_threshold")
            draft.put(F + "rejection.denominator", "kept", note="as verl counts")


def _name(file: str, files: list[str]) -> str:
    path = Path(file)
    name = path.parent.name if path.stem in OF_TEST_SETS and path.parent.name else path.stem
    num_of_stem = sum(Path(listed).stem == path.stem for listed in files)
    unique = num_of_stem == 1 or path.parent.name
    return name if unique else f"{name}-{files.index(file)}"
