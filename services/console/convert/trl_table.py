"""Options of TRL's GRPOConfig and GRPOTrainer, and ours."""

from tidemill.services.console.convert.table import (
    Table,
    automatic,
    computed,
    missing,
    same,
)

PROCESSES = "num_processes"
"""Of accelerate or torchrun, no option of TRL: it is found in a script, or given beside the file."""
FILE = "file"
"""The Python file that the options are from."""
UPDATES = "updates there: / (mini_batches * passes)"
WORDS = "DeepSpeed, FSDP and data loaders are the trainer's own here"


def schedule(name: object) -> str:
    """Their schedule in our words."""
    return {"linear": "linear", "cosine": "cosine"}.get(str(name), "constant")


ROWS = (
    same("model, model_name_or_path", "model.path", default="MODEL"),
    computed("train_dataset, dataset_name, datasets", "data.train", "a JSONL or Parquet file"),
    computed("eval_dataset", "data.eval", "JSONL or Parquet files by name"),
    computed(
        "reward_funcs",
        "reward.function, reward.rewards.<name>.function",
        "path.py:name or package.module:name; TRL's style is recognised",
    ),
    computed("reward_weights", "reward.rewards.<name>.weight"),
    computed(
        "per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation, "
        "generation_batch_size, num_processes",
        "trainer.groups_per_step, trainer.mini_batches",
        "completions there, groups here: generation_batch_size / num_generations; mini_batches "
        "is steps_per_generation / gradient_accumulation_steps",
    ),
    same("num_generations", "trainer.group_size", default=8),
    computed("max_steps", "trainer.steps", UPDATES),
    computed("num_train_epochs", "trainer.epochs", "max_steps wins"),
    same("num_iterations", "trainer.passes"),
    computed("max_completion_length", "rollout.sampling.max_tokens"),
    computed(
        "max_prompt_length, vllm_max_model_length",
        "data.max_prompt_tokens, data.overlong_prompts, model.max_model_len",
        "older releases cut longer prompts from the left, today's take any",
    ),
    same("temperature", "rollout.sampling.temperature", default=1.0),
    same("top_p", "rollout.sampling.top_p"),
    same("top_k", "rollout.sampling.top_k", words=lambda count: max(int(count or 0), 0)),
    missing(
        "min_p, generation_kwargs, cache_implementation, vllm_structured_outputs_regex",
        "sampling has temperature, top_p and top_k",
    ),
    missing("repetition_penalty", "sampling has temperature, top_p and top_k", off=1),
    computed(
        "beta",
        "trainer.algorithm.kl.place, trainer.algorithm.kl.coefficient, trainer.algorithm.reference.model",
    ),
    computed(
        "use_bias_correction_kl",
        "trainer.algorithm.kl.estimator",
        "true: k2, of the same gradient at ratio 1; false: k3 without a bound",
    ),
    computed(
        "sync_ref_model, ref_model_mixup_alpha, ref_model_sync_steps",
        "trainer.algorithm.reference.model, trainer.algorithm.reference.mixup, "
        "trainer.algorithm.reference.every",
        "updates there, steps here",
    ),
    computed(
        "epsilon, epsilon_high",
        "trainer.algorithm.clip_low, trainer.algorithm.clip_high",
        "epsilon_high is epsilon where it is not given; clip_low is at most 1",
    ),
    computed("delta", "trainer.algorithm.dual_clip", "left out where the ratio is always 1"),
    computed(
        "loss_type",
        "trainer.algorithm.normalisation, trainer.algorithm.loss",
        "dapo: token; grpo: sequence; dr_grpo: constant; cispo, sapo: losses",
    ),
    missing("sapo_temperature_neg, sapo_temperature_pos", "those of the paper"),
    missing("vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg", "no such loss"),
    computed("importance_sampling_level", "trainer.algorithm.loss", "sequence: gspo"),
    computed("scale_rewards", "trainer.algorithm.advantage", "group: grpo; none: dr_grpo"),
    missing(
        "multi_objective_aggregation",
        "rewards are summed, then compared in their group",
        off="sum_then_normalize",
    ),
    same("mask_truncated_completions", "trainer.algorithm.mask_truncated"),
    same("top_entropy_quantile", "trainer.algorithm.top_entropy_quantile"),
    same("off_policy_mask_threshold", "trainer.algorithm.off_policy_threshold"),
    same(
        "entropy_coef",
        "trainer.algorithm.entropy_coefficient",
        "there a mean over tokens, here summed and divided as the loss",
    ),
    missing(
        "use_adaptive_entropy, entropy_target, entropy_coef_min, entropy_coef_max, entropy_coef_delta",
        "the coefficient is fixed",
    ),
    computed(
        "vllm_importance_sampling_correction, vllm_importance_sampling_mode",
        "trainer.algorithm.importance.mode, trainer.algorithm.importance.level",
        "without use_vllm: off",
    ),
    computed(
        "vllm_importance_sampling_clip_max, vllm_importance_sampling_clip_min, vllm_importance_sampling_cap",
        "trainer.algorithm.importance.high, trainer.algorithm.importance.low",
    ),
    same("learning_rate", "trainer.optimizer.lr", default=1e-6),
    same("weight_decay", "trainer.optimizer.weight_decay"),
    same("max_grad_norm", "trainer.optimizer.max_grad_norm"),
    computed("adam_beta1, adam_beta2", "trainer.optimizer.betas"),
    same("adam_epsilon", "trainer.optimizer.eps"),
    same("lr_scheduler_type", "trainer.optimizer.schedule", default="linear", words=schedule),
    computed("warmup_steps, warmup_ratio", "trainer.optimizer.warmup_steps", UPDATES),
    missing("optim, optim_args, lr_scheduler_kwargs", "the optimizer is AdamW", off="adamw_torch_fused"),
    computed(
        "bf16, fp16, dtype, torch_dtype, model_init_kwargs.dtype, model_init_kwargs.torch_dtype",
        "model.dtype",
        "half precision is bfloat16",
    ),
    same("gradient_checkpointing", "trainer.gradient_checkpointing", default=True),
    same("use_liger_kernel", "trainer.liger", words=lambda is_on: "on" if is_on else "auto"),
    same("torch_compile", "trainer.compile"),
    computed(
        "use_peft, peft_config, lora_r, lora_alpha, lora_target_modules",
        "trainer.lora.rank, trainer.lora.alpha, trainer.lora.target_modules",
    ),
    computed("use_vllm", "rollout.engine", "false: transformers"),
    computed("vllm_mode", "rollout.engine", "engines have GPUs of their own, as in server mode"),
    computed("vllm_gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization", "of colocated engines"),
    same("vllm_tensor_parallel_size", "rollout.vllm.tensor_parallel_size"),
    same("seed", "seed"),
    same("shuffle_dataset", "data.shuffle"),
    computed("eval_strategy, eval_steps", "trainer.evaluation.every", UPDATES),
    missing(
        "num_generations_eval, per_device_eval_batch_size",
        "trainer.evaluation.samples, at a temperature of its own",
    ),
    computed("save_steps, save_strategy", "trainer.checkpoint_every", UPDATES),
    same("save_total_limit", "trainer.keep_checkpoints"),
    computed("report_to", "trainer.loggers", "wandb, mlflow, trackio, tensorboard"),
    computed("run_name", "run_id"),
    same("project", "trainer.logger_project"),
    computed("file", "reward.function"),
    missing(
        "tools, environment_factory, rollout_func, max_tool_calling_iterations",
        "see rollout.environment, which plays TRL's tools and environments (docs/environments.md)",
    ),
    missing("chat_template_kwargs, chat_template_kwargs.*", "the template is rendered without them"),
    missing("trust_remote_code", "code from a hub is not run"),
    missing("chat_template_path", "put the template into the model's folder"),
    automatic(
        "vllm_server_*, vllm_group_port, vllm_model_impl, vllm_enable_sleep_mode, "
        "use_transformers_*, transformers_continuous_batching_config.*, ds3_gather_for_generation",
        "engines are processes of their own, which fetch weights by themselves",
    ),
    automatic(
        "logging_*, log_*, num_completions_to_print, output_dir, overwrite_output_dir, "
        "push_to_hub, hub_*, trackio_space_id",
        "every completion and metric of a run is kept in its folder",
    ),
    missing(
        "router_aux_loss_coef",
        "of a batch of rows, so it depends on their split; see trainer.algorithm.router.balance",
        off=0,
    ),
    automatic(
        "remove_unused_columns, dataset_config, dataset_split, dataset_train_split, "
        "dataset_test_split, dataset_num_proc, dataloader_*, pad_to_multiple_of, deepspeed*, "
        "fsdp*, ddp_*, accelerator_config*, gradient_checkpointing_kwargs.*, "
        "attn_implementation, model_init_kwargs.*, disable_dropout, cast_lm_head_to_fp32",
        WORDS,
    ),
)

TABLE = Table("TRL", ROWS)
