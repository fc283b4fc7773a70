"""verl's options and ours; those of verl-recipe's DAPO, one-step-off and fully-async training among them."""

from tidemill.services.console.convert.table import (
    Table,
    automatic,
    computed,
    missing,
    same,
)

A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
C, W = "algorithm.rollout_correction.", "reward."
VAL, OVERLONG = R + "val_kwargs.", W + "reward_kwargs.overlong_buffer_cfg."
ASYNC = "async_training."

ENGINE_SHARES = "the engine has GPUs of its own here"
KERNELS = "the model's libraries choose"

ROWS = (
    same("data.train_files", "data.train", default="train.parquet"),
    computed("data.val_files", "data.eval", "a dict: each set has a name"),
    same("data.prompt_key", "data.prompt_column"),
    computed("data.train_batch_size", "trainer.groups_per_step", "prompts there, groups here"),
    computed(A + "ppo_mini_batch_size", "trainer.mini_batches", "train_batch_size / ppo_mini_batch_size"),
    same(R + "n", "trainer.group_size", default=1),
    same("data.max_prompt_length", "data.max_prompt_tokens", default=512),
    computed(
        "data.max_response_length",
        "rollout.sampling.max_tokens, model.max_model_len",
        "their sum is the length",
    ),
    computed(
        "data.filter_overlong_prompts, data.truncation",
        "data.overlong_prompts",
        "filter is drop; left, right and middle cut as in verl",
    ),
    same("data.shuffle", "data.shuffle"),
    same("data.seed", "seed"),
    same(
        "data.train_max_samples",
        "data.max_rows",
        "the first rows; verl draws them if it shuffles",
        words=lambda n: n if n > 0 else None,
    ),
    same("data.val_max_samples", "trainer.evaluation.max_prompts", words=lambda n: n if n > 0 else None),
    computed("trainer.total_epochs", "trainer.epochs", "total_training_steps wins"),
    computed("trainer.total_training_steps", "trainer.steps"),
    computed("rollout.total_rollout_steps", "trainer.steps", "prompts there: / groups_per_step"),
    computed(
        "trainer.test_freq",
        "trainer.evaluation.every, trainer.evaluation.at_end",
        "-1 is 0 and at_end: false",
    ),
    same("trainer.val_before_train", "trainer.evaluation.at_start"),
    computed(
        "trainer.save_freq",
        "trainer.checkpoint_every",
        "-1: the default, for runs recover from checkpoints; 0 would be the last step only",
    ),
    same("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
    computed(
        f"{R}temperature, {R}top_p, {R}top_k",
        "rollout.sampling.temperature, rollout.sampling.top_p, rollout.sampling.top_k",
        "top_k -1 is 0",
    ),
    computed(
        f"{VAL}temperature, {VAL}do_sample, {VAL}n",
        "trainer.evaluation.temperature, trainer.evaluation.samples",
        "do_sample: false is temperature 0",
    ),
    computed(
        f"{VAL}top_p, {VAL}top_k",
        "trainer.evaluation.top_p, trainer.evaluation.top_k",
        "top_k -1 is 0; not for greedy samples",
    ),
    computed(
        "algorithm.adv_estimator",
        "trainer.algorithm.advantage, trainer.algorithm.value.head",
        "gae trains a value head on the policy, not a critic of its own",
    ),
    computed("algorithm.norm_adv_by_std_in_grpo", "trainer.algorithm.advantage", "false is dr_grpo"),
    computed("algorithm.gamma, algorithm.lam", "trainer.algorithm.gamma, trainer.algorithm.gae_lambda"),
    computed(
        "critic.optim.lr, critic.cliprange_value",
        "trainer.algorithm.value.lr, trainer.algorithm.value.clip",
        "with gae",
    ),
    computed(
        f"{A}clip_ratio_low, {A}clip_ratio_high",
        "trainer.algorithm.clip_low, trainer.algorithm.clip_high",
        "clip_low is at most 1",
    ),
    automatic(
        A + "clip_ratio",
        "without effect in verl: clip_ratio_low and clip_ratio_high have values of their own",
    ),
    computed(
        A + "clip_ratio_c",
        "trainer.algorithm.dual_clip",
        "verl: of vanilla only; left out where the ratio is always 1",
    ),
    computed(
        A + "loss_agg_mode",
        "trainer.algorithm.normalisation",
        "token-mean: token; seq-mean-token-mean: sequence; seq-mean-token-sum-norm: constant; "
        "seq-mean-token-sum: constant, which also divides by max_tokens",
    ),
    computed(A + "policy_loss.loss_mode", "trainer.algorithm.loss", "vanilla: ppo; gspo, sapo, cispo"),
    computed(
        f"{A}use_kl_loss, {A}kl_loss_coef",
        "trainer.algorithm.kl.place, trainer.algorithm.kl.coefficient, trainer.algorithm.reference.model",
        "place: loss, with a frozen reference",
    ),
    computed(
        A + "kl_loss_type",
        "trainer.algorithm.kl.estimator",
        "low_var_kl: k3; k2, mse, k3+: k2, of the same gradient; k1+: k1",
    ),
    computed(
        "algorithm.use_kl_in_reward, algorithm.kl_ctrl.kl_coef",
        "trainer.algorithm.kl.place, trainer.algorithm.kl.coefficient",
        "place: reward, on the rollout's logprobs; verl's on recomputed ones",
    ),
    missing(
        "algorithm.kl_ctrl.type, algorithm.kl_ctrl.target_kl, algorithm.kl_ctrl.horizon",
        "the coefficient is fixed",
    ),
    automatic("algorithm.kl_penalty", "the penalty in the reward is k1"),
    same(
        "algorithm.filter_groups.enable",
        "trainer.algorithm.filter_zero_variance",
        "on the score before the punishment for length",
    ),
    same(
        "algorithm.filter_groups.max_num_gen_batches",
        "trainer.algorithm.max_filter_rounds",
        words=lambda count: count or None,
    ),
    automatic("algorithm.filter_groups.metric", "groups are judged by their rewards"),
    computed(
        f"{OVERLONG}enable, {OVERLONG}len, {W}reward_kwargs.max_resp_len",
        "trainer.algorithm.overlong.buffer_share",
        "len / max_resp_len",
    ),
    computed(OVERLONG + "penalty_factor", "trainer.algorithm.overlong.penalty"),
    automatic(OVERLONG + "log", "metrics say it"),
    computed(
        f"{W}custom_reward_function.path, {W}custom_reward_function.name", "reward.function", "path.py:name"
    ),
    automatic(f"{W}reward_manager.*, {W}num_workers", "a function's style is recognised (reward.style)"),
    computed(
        f"{W}reward_model.enable, {W}reward_model.model_path",
        "servers.<name>.model",
    ),
    missing(f"{W}sandbox_fusion.*", "reward.rewards.<name>.sandbox runs programs on this machine"),
    computed(
        f"{C}bypass_mode, {A}use_rollout_log_probs",
        "trainer.algorithm.old_logprobs",
        "true: rollout, else recompute; the asynchronous trainers' default is true",
    ),
    computed(
        f"{C}rollout_is, {C}rollout_is_threshold",
        "trainer.algorithm.importance.mode, trainer.algorithm.importance.level, "
        "trainer.algorithm.importance.high, trainer.algorithm.importance.low",
        "null: off; a number: truncate; low_high: mask",
    ),
    computed(
        C + "loss_type", "trainer.algorithm.loss", "reinforce with bypass_mode is cispo without a lower bound"
    ),
    computed(
        f"{C}rollout_rs, {C}rollout_rs_threshold",
        "trainer.algorithm.importance.mode",
        "seq_mean_k1 is near mode mask, level geometric; others and both together: none",
    ),
    missing(C + "rollout_is_batch_normalize", "weights are not normalised"),
    same(A + "optim.lr", "trainer.optimizer.lr", default=1e-6),
    same(
        A + "optim.weight_decay",
        "trainer.optimizer.weight_decay",
        "verl: of all weights, here of matrices",
        default=0.01,
    ),
    same(A + "optim.betas", "trainer.optimizer.betas"),
    same(A + "grad_clip", "trainer.optimizer.max_grad_norm"),
    computed(
        f"{A}optim.lr_warmup_steps, {A}optim.lr_warmup_steps_ratio",
        "trainer.optimizer.warmup_steps",
        "the ratio is of all steps; verl begins at 0, ours at lr / (warmup_steps + 1)",
    ),
    same(A + "optim.lr_scheduler_type", "trainer.optimizer.schedule"),
    missing(f"{A}optim.min_lr_ratio, {A}optim.num_cycles", "the rate falls to 0", off=0.5),
    same(A + "entropy_coeff", "trainer.algorithm.entropy_coefficient"),
    computed(
        f"{A}ppo_max_token_len_per_gpu, {A}ppo_micro_batch_size_per_gpu, {A}ppo_micro_batch_size, "
        f"{A}use_dynamic_bsz",
        "trainer.micro_batch_tokens",
        "without dynamic batches: sequences * (prompt + response)",
    ),
    same(A + "ppo_epochs", "trainer.passes"),
    same(M + "path", "model.path", default="MODEL"),
    same(
        A + "fsdp_config.dtype",
        "model.dtype",
        default="bfloat16",
        words=lambda name: {"fp32": "float32", "bf16": "bfloat16", "float32": "float32"}.get(
            str(name), "bfloat16"
        ),
    ),
    same(M + "enable_gradient_checkpointing", "trainer.gradient_checkpointing", default=True),
    computed(
        f"{M}lora_rank, {M}lora_alpha, {M}target_modules",
        "trainer.lora.rank, trainer.lora.alpha, trainer.lora.target_modules",
    ),
    same(M + "use_remove_padding", "trainer.packing"),
    same(M + "use_liger", "trainer.liger", words=lambda is_on: "on" if is_on else "off"),
    computed(M + "override_config.*", "model.overrides"),
    computed(
        "trainer.n_gpus_per_node, trainer.nnodes", "trainer.num_ranks", f"their product; {ENGINE_SHARES}"
    ),
    computed(R + "name", "rollout.engine", "vllm; hf: transformers; sglang and trtllm: vllm"),
    same(R + "gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization", default=0.5),
    same(R + "tensor_model_parallel_size", "rollout.vllm.tensor_parallel_size", default=2),
    same(R + "max_num_seqs", "rollout.vllm.max_num_seqs"),
    same(R + "enforce_eager", "rollout.vllm.enforce_eager"),
    same(R + "enable_prefix_caching", "rollout.vllm.prefix_caching"),
    computed(
        f"{R}max_num_batched_tokens, {R}enable_chunked_prefill, {R}engine_kwargs.vllm.*", "rollout.vllm.extra"
    ),
    same(R + "max_model_len", "model.max_model_len"),
    computed(
        "trainer.logger",
        "trainer.loggers, trainer.tensorboard",
        "wandb, mlflow, trackio, tensorboard; others: none",
    ),
    same("trainer.project_name", "trainer.logger_project"),
    computed("trainer.experiment_name", "run_id"),
    computed(
        f"{ASYNC}trigger_parameter_sync_step, {ASYNC}require_batches",
        "trainer.mini_batches, trainer.groups_per_step",
        "their product; times ppo_mini_batch_size",
    ),
    computed(
        ASYNC + "staleness_threshold",
        "trainer.max_staleness, trainer.batch_order",
        "there a share of extra samples: rounded up, with batch_order as_ready",
    ),
    computed(
        "trainer.v1.trainer_mode, trainer.v1.separate_async.parameter_sync_step",
        "trainer.max_staleness, trainer.batch_order",
    ),
    computed(
        "trainer.v1.sampler.max_off_policy_threshold", "trainer.max_staleness", "versions that a sample spans"
    ),
    computed(
        "rollout.nnodes, rollout.n_gpus_per_node",
        "rollout.workers",
        "GPUs of the engines / tensor_parallel_size",
    ),
    automatic("data.gen_batch_size", "tickets are issued as groups are used up"),
    automatic(f"{ASYNC}partial_rollout", "completions go on across versions, and say which token has which"),
    automatic(f"{ASYNC}*", "admission by staleness is the only throttle"),
    automatic(
        f"{R}log_prob_*, actor_rollout_ref.ref.log_prob_*, {R}calculate_log_probs",
        "the trainer's forward passes have its micro-batches; engines return logprobs",
    ),
    automatic(
        f"{R}free_cache_engine, {R}load_format, {R}layered_summon, {R}mode, "
        f"{R}multi_stage_wake_up, {R}checkpoint_engine.*, actor_rollout_ref.hybrid_engine",
        ENGINE_SHARES,
    ),
    automatic(
        f"{R}dtype, {R}do_sample, {R}prompt_length, {R}response_length, {R}seed, "
        f"{R}disable_log_stats, {R}skip_tokenizer_init",
        "as model and sampling say",
    ),
    automatic(
        "trainer.balance_batch, trainer.resume_mode, trainer.default_local_dir, "
        "trainer.critic_warmup, trainer.use_v1, trainer.device, trainer.log_val_generations, "
        "trainer.del_local_ckpt_after_load, trainer.v1.*",
        "runs have a folder, are resumed with --resume, and micro-batches are balanced",
    ),
    automatic(
        "data.return_raw_chat, data.return_raw_input_ids, data.return_full_prompt, "
        "data.reward_fn_key, data.dataloader_num_workers, data.filter_overlong_prompts_workers, "
        "data.val_batch_size, data.validation_shuffle, data.return_multi_modal_inputs, "
        "data.tool_config_path",
        "rows are read whole; the reward sees data_source",
    ),
    automatic(
        "*.strategy, *.use_torch_compile, *.fsdp_config.fsdp_size, *.fsdp_config.wrap_policy.*, "
        "*.forward_prefetch, *.use_orig_params, *.reshard_after_forward, "
        "*.entropy_from_logits_with_chunking, *.entropy_checkpointing, *.use_fused_kernels, "
        "*.shuffle, *.data_loader_seed, *.checkpoint.*",
        f"FSDP2; {KERNELS}",
    ),
    automatic("critic.*", "the value head lives on the policy"),
    automatic(
        "ray_kwargs.*, global_profiler.*, *.profiler.*, transfer_queue.*, hydra.*, "
        "rollout.total_epochs, rollout.n, *.rollout_n, *.nccl_timeout",
        "there is no Ray here",
    ),
    automatic("trainer.esi_redundant_time, trainer.ray_wait_register_center_timeout", "there is no Ray here"),
    missing(
        "*.param_offload, *.optimizer_offload, *.offload_policy, *.grad_offload, *.enable_activation_offload",
        "weights and optimizer stay on the GPUs: more of them, lora, or gradient_checkpointing",
    ),
    missing("*.ulysses_sequence_parallel_size", "a sequence is on one GPU: lower micro_batch_tokens", off=1),
    missing("*.megatron.*, *.veomni.*, *.torchtitan.*", "FSDP2 is the only way to shard"),
    missing("data.image_key, data.video_key, data.audio_key, data.image_patch_size", "prompts are text"),
    missing("data.trust_remote_code, *.trust_remote_code", "code from a hub is not run"),
    missing(f"{R}multi_turn.*, {R}agent.*", "see rollout.environment (docs/environments.md)"),
    missing("data.custom_cls.*, data.apply_chat_template_kwargs.*", "see data.chat_template"),
    missing("distillation.*", "there are no teachers"),
    missing(
        "actor_rollout_ref.ref.*", "the reference is the starting model, as trainer.algorithm.reference says"
    ),
    missing(
        f"{R}expert_parallel_size, {R}data_parallel_size, {R}pipeline_model_parallel_size",
        "more rollout.workers, or rollout.vllm.extra",
        off=1,
    ),
    missing("*.override_optimizer_config.*, *.lr_decay_steps", "the optimizer is AdamW, on the GPUs"),
    automatic(
        "trainer.use_legacy_worker_impl, trainer.rollout_data_dir, trainer.validation_data_dir, "
        "trainer.resume_from_path",
        "every completion is in the run's archive, and a run is resumed by its name",
    ),
    missing(A + "loss_scale_factor", "Adam does not see a constant factor, except through max_grad_norm"),
)

TABLE = Table("verl", ROWS)
