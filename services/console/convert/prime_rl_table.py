"""prime-rl's options and ours."""

from tidemill.services.console.convert.table import Table, automatic, computed, missing, same

O, T, I = "orchestrator.", "trainer.", "inference.vllm."  # noqa: E741
LOSS, OPTIM = T + "loss.", T + "optim."

ROWS = (
    same(f"model.name, {T}model.name, {O}model.name", "model.path", default="MODEL"),
    same(f"max_steps, {T}max_steps, {O}max_steps", "trainer.steps", "without it prime-rl goes on for ever"),
    computed(
        f"seq_len, {O}seq_len, {T}model.seq_len, {I}max_model_len",
        "model.max_model_len, data.max_prompt_tokens",
        "prime-rl cuts sequences; here prompt and completion have limits of their own",
    ),
    computed(
        f"{O}batch_size, {O}group_size",
        "trainer.groups_per_step, trainer.group_size",
        "rollouts there, groups here: batch_size / group_size",
    ),
    missing(O + "token_batch_size", "a step has a number of groups"),
    same(O + "max_off_policy_steps", "trainer.max_staleness", default=8),
    computed(
        f"{O}train.source",
        "data.train, reward.function",
        "an environment there: data and reward by hand, or rollout.environment",
    ),
    missing(f"{O}train.env.*, {O}env.*", "data and reward by hand, or rollout.environment"),
    missing(f"{O}curriculum.*", "rows are taken in turn"),
    computed(O + "train.sampling.max_completion_tokens", "rollout.sampling.max_tokens"),
    same(O + "train.sampling.temperature", "rollout.sampling.temperature"),
    missing(f"{O}train.sampling.extra_body.*", "sampling has temperature, top_p and top_k"),
    computed(
        O + "train.filter_zero_advantages",
        "trainer.algorithm.filter_zero_variance",
        "theirs leaves such groups out and does not replace them: false here",
    ),
    computed(
        O + "algo.type",
        "trainer.algorithm.advantage",
        "grpo: dr_grpo, for it is the reward less the mean of the group",
    ),
    missing(f"{O}algo.*", "no such part of the algorithm"),
    computed(
        LOSS + "type",
        "trainer.algorithm.loss, trainer.algorithm.old_logprobs",
        "default is DPPO's mask on p - q against the rollout's logprobs",
    ),
    computed(
        f"{LOSS}dppo_mask_low, {LOSS}dppo_mask_high",
        "trainer.algorithm.clip_low, trainer.algorithm.clip_high",
        "bounds of p - q there",
    ),
    missing(
        f"{LOSS}kl_tau, {LOSS}adv_tau, {LOSS}ipo_threshold, {LOSS}kwargs.*, {LOSS}import_path",
        "see trainer.algorithm.loss: path.py:name",
    ),
    same(OPTIM + "lr", "trainer.optimizer.lr", default=1e-6),
    same(OPTIM + "weight_decay", "trainer.optimizer.weight_decay", default=0.01),
    same(OPTIM + "max_norm", "trainer.optimizer.max_grad_norm"),
    computed(f"{OPTIM}betas1, {OPTIM}betas2", "trainer.optimizer.betas"),
    missing(
        f"{OPTIM}type, {OPTIM}mu, {OPTIM}momentum, {OPTIM}nesterov", "the optimizer is AdamW", off="adamw"
    ),
    computed(
        T + "scheduler.type",
        "trainer.optimizer.schedule",
        "linear there is constant but for its end: constant",
    ),
    computed(T + "scheduler.warmup_steps", "trainer.optimizer.warmup_steps"),
    missing(
        f"{T}scheduler.decay_steps, {T}scheduler.min_lr",
        "cosine falls to 0 over all steps after warm-up, constant stays",
    ),
    computed(
        f"{O}eval.interval, {O}eval.skip_first_step", "trainer.evaluation.every, trainer.evaluation.at_start"
    ),
    computed(
        f"{O}eval.group_size, {O}eval.num_examples, {O}eval.source",
        "trainer.evaluation.samples, trainer.evaluation.max_prompts, data.eval",
        "one for all sets",
    ),
    computed(O + "eval.sampling.temperature", "trainer.evaluation.temperature"),
    same(O + "eval.sampling.top_p", "trainer.evaluation.top_p"),
    same(O + "eval.sampling.top_k", "trainer.evaluation.top_k", words=lambda count: max(count, 0)),
    same(O + "eval.sampling.min_p", "trainer.evaluation.min_p"),
    missing(f"{O}eval.sampling.*", "evaluation has the lengths of rollout.sampling"),
    same(f"ckpt.interval, {T}ckpt.interval", "trainer.checkpoint_every"),
    same(f"ckpt.keep_last, {T}ckpt.keep_last", "trainer.keep_checkpoints"),
    computed(T + "model.ac", "trainer.gradient_checkpointing", "on where it is not given"),
    same(T + "model.lora.rank", "trainer.lora.rank"),
    same(T + "model.lora.alpha", "trainer.lora.alpha"),
    same(T + "model.lora.target_modules", "trainer.lora.target_modules"),
    missing(f"{T}model.lora.dropout, {T}model.lora.modules_to_save", "adapters without dropout"),
    missing(
        f"{T}model.cp, {T}model.ep, {T}model.dp_replicate", "a sequence and an expert are on one GPU", off=1
    ),
    missing(
        f"{T}model.optim_cpu_offload, {T}model.fsdp_cpu_offload, {T}model.full_offload.*, "
        f"{T}model.ac_offloading.*",
        "weights and optimizer stay on the GPUs",
    ),
    missing(f"{T}model.quantization.*", "training is in bfloat16 or float32"),
    computed(
        "deployment.num_train_gpus, deployment.num_train_nodes, deployment.gpus_per_node",
        "trainer.num_ranks",
    ),
    computed(
        "deployment.num_infer_gpus, deployment.num_infer_nodes",
        "rollout.workers",
        "GPUs of the engines / tensor_parallel_size",
    ),
    same(I + "tensor_parallel_size", "rollout.vllm.tensor_parallel_size"),
    same(I + "gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization", default=0.9),
    same(I + "enforce_eager", "rollout.vllm.enforce_eager"),
    same(I + "enable_prefix_caching", "rollout.vllm.prefix_caching"),
    missing(f"{I}*", "see rollout.vllm.extra, whose fields go to vLLM as they are"),
    computed("monitors.wandb.project, wandb.project", "trainer.loggers, trainer.logger_project"),
    computed("run.name, monitors.wandb.name, wandb.name", "run_id"),
    automatic(
        f"{O}model.lora.*, {O}renderer.*, {O}tokenizer.*, tokenizer.*, {T}tokenizer.*",
        "the model's own chat template is used; its tokens are kept",
    ),
    automatic(
        "weight_broadcast.*, *.weight_broadcast.*, *.rollout_transport.*, rollout_transport.*, "
        "*.concurrency.*, *.client.*, inference.server.*, inference.router.*, "
        "inference.deployment.*",
        "the services meet in Redis, and engines fetch weights by themselves",
    ),
    automatic(
        "deployment.*, slurm.*, log.*, *.log.*, *.heartbeat.*, *.monitors.*, monitors.*, "
        "wandb.*, output_dir, *.output_dir, clean, dry_run, env_vars.*, *.env_vars.*, run.*, "
        "resume.*, *.resume.*, ckpt.*, *.ckpt.*, *.gc.*, *.metrics_server.*",
        "processes, logs and checkpoints are the run's own",
    ),
    automatic(
        f"{T}model.*, {T}data.*, {T}matmul_precision, {T}dist_timeout_seconds, "
        f"{O}num_train_workers, {O}pad_to_multiple_of, {O}collect_inference_metrics, "
        f"{O}tasks_per_minute, {O}env_server_base_port",
        "the trainer chooses",
    ),
)

TABLE = Table("prime-rl", ROWS)
