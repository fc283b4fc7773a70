"""Option sets of published scripts: each converts, says what is expected, and passes `tidemill check`.

The files are written here from facts about those scripts, with a small model and data in place of theirs.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.support.checked_runs import make_folder
from tidemill.common.config import AlgorithmConfig, RunConfig
from tidemill.services.console.__main__ import app
from tidemill.services.console.check.explain import describe
from tidemill.services.console.check.preflight import examine

GSM8K_ROWS = 7_473
MATH_ROWS = 7_500
DAPO_ROWS = 17_398

VERL_GRPO = """
NNODES=${NNODES:-1}
batch=${BATCH:-1024}
tp=2
DATA=(
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
    data.train_files="['$HOME/gsm8k/train.parquet', '$HOME/math/train.parquet']"
    data.val_files="['$HOME/gsm8k/test.parquet', '$HOME/math/test.parquet']"
    data.train_batch_size=$batch data.max_prompt_length=1024 data.max_response_length=2048
    data.filter_overlong_prompts=True data.truncation='error'
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=${tp} \\
    actor_rollout_ref.rollout.n=5 trainer.logger='["console","wandb"]' trainer.nnodes="$NNODES" \\
    trainer.n_gpus_per_node=8 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 "$@"
"""
DAPO_COMMON = """algorithm.adv_estimator=grpo data.train_files=dapo-math.parquet \\
    data.val_files=aime.parquet data.prompt_key=prompt data.truncation=left data.max_prompt_length=$prompt \\
    data.max_response_length=$response actor_rollout_ref.rollout.n=16 algorithm.kl_ctrl.kl_coef=0.0 \\
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.loss_agg_mode=token-mean actor_rollout_ref.rollout.top_k=-1 \\
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.name=vllm"""
DAPO = f"""
prompt=$((1024 * 2))
response=$((1024 * 20))
train=512
ray job submit --no-wait -- python3 -m recipe.dapo.main_dapo {DAPO_COMMON} \\
    data.train_batch_size=$train data.gen_batch_size=$((train * 3)) algorithm.filter_groups.enable=True \\
    algorithm.filter_groups.max_num_gen_batches=10 algorithm.filter_groups.metric=acc \\
    reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True \\
    reward_model.overlong_buffer.len=$((1024 * 4)) reward_model.overlong_buffer.penalty_factor=1.0 \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \\
    trainer.nnodes=16 trainer.test_freq=5 trainer.save_freq=5 trainer.total_epochs=1
"""
FULLY_ASYNC = f"""
prompt=2048; response=8192
python -m verl.experimental.fully_async_policy.fully_async_main {DAPO_COMMON} \\
    data.train_batch_size=0 data.gen_batch_size=1 actor_rollout_ref.hybrid_engine=False \\
    +actor_rollout_ref.model.override_config.max_position_embeddings=32768 \\
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward.reward_kwargs.overlong_buffer_cfg.len=4096 +reward.reward_kwargs.max_resp_len=$response \\
    trainer.test_freq=10 trainer.save_freq=-1 rollout.total_rollout_steps=$(((512*100))) \\
    async_training.staleness_threshold=0.1 async_training.trigger_parameter_sync_step=4 \\
    async_training.require_batches=4 async_training.partial_rollout=True
"""
ONE_STEP_OFF = """
gpus=${GPUS:-8}
rollout=2
python3 -m verl.experimental.one_step_off_policy.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/gsm8k/train.parquet data.val_files=$HOME/gsm8k/test.parquet \\
    data.train_batch_size=1152 data.max_prompt_length=512 data.max_response_length=1024 \\
    data.filter_overlong_prompts=True actor_rollout_ref.actor.ppo_mini_batch_size=192 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 trainer.save_freq=-1 \\
    trainer.test_freq=5 trainer.total_epochs=2 trainer.n_gpus_per_node=$((gpus - rollout)) \\
    rollout.nnodes=1 rollout.n_gpus_per_node="$rollout" $@
"""
TRL_QUICK_START = """
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

rows = load_dataset("a/b", split="train")
trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=accuracy_reward, train_dataset=rows)
"""
HENDRYCKS = """
max_steps = 5000
[model]
name = "a/model"
[deployment]
num_train_gpus = 4
num_infer_gpus = 4
[orchestrator]
batch_size = 512
group_size = 8
seq_len = 8192
[[orchestrator.train.source]]
name = "hendrycks-math"
[orchestrator.eval]
interval = 50
[[orchestrator.eval.source]]
name = "aime2024"
group_size = 32
"""
KL = {"reference": {"model": "frozen"}, "kl": {"place": "loss"}}
NONE: dict[str, Any] = {"importance": {"mode": "off"}}
PRIME = {"preset": "dppo"}
CASES: dict[str, tuple[str, str, list[str], int, dict[str, Any], dict[str, Any]]] = {
    # file, text, options, rows; steps, groups, updates, group size, staleness and other fields; algorithm
    "verl GRPO": (
        "run.sh", VERL_GRPO, [], GSM8K_ROWS + MATH_ROWS,
        {"": (210, 1024, 4, 5, 0), "evaluation.every": 5, "optimizer.weight_decay": 0.01},
        {"clip_high": 0.2, "dual_clip": 3.0, **NONE, **KL},
    ),
    "verl-recipe DAPO": (
        "run.sh", DAPO, [], DAPO_ROWS,
        {"": (33, 512, 16, 16, 0), "optimizer.warmup_steps": 10, "optimizer.weight_decay": 0.1,
         "evaluation.temperature": 1.0, "evaluation.top_p": 0.7},
        {"preset": "dapo", "dual_clip": 10.0, "max_filter_rounds": 10, **NONE},
    ),
    "verl one step off": (
        "run.sh", ONE_STEP_OFF, [], GSM8K_ROWS,
        {"": (12, 1152, 6, 5, 1), "evaluation.every": 5, "optimizer.weight_decay": 0.01},
        {"clip_high": 0.2, "dual_clip": 3.0, "old_logprobs": "rollout", **KL},
    ),
    "verl fully async": (
        "run.sh", FULLY_ASYNC, [], DAPO_ROWS,
        {"": (100, 512, 16, 16, 1), "batch_order": "as_ready", "optimizer.warmup_steps": 10,
         "optimizer.weight_decay": 0.1, "evaluation.temperature": 1.0, "evaluation.top_p": 0.7},
        {"dual_clip": 10.0, "old_logprobs": "rollout", "overlong": {"penalty": 1.0, "buffer_share": 0.5}},
    ),
    "TRL quick start": (
        "train.py", TRL_QUICK_START, ["num_processes=8"], 1000,
        {"": (375, 8, 1, 8, 0), "optimizer.schedule": "linear"}, {"clip_high": 0.2, **NONE},
    ),
    "prime-rl hendrycks": (
        "rl.toml", HENDRYCKS, [], 100,
        {"": (5000, 64, 1, 8, 8), "batch_order": "as_ready", "evaluation.every": 50,
         "evaluation.samples": 32, "optimizer.weight_decay": 0.01}, PRIME,
    ),
}  # fmt: skip


def small(folder: Path, config: Path, num_rows: int) -> list[str]:
    """Overrides that put a model and data of here in place of theirs."""
    make_folder(folder / "model", context=1 << 16)
    row = json.dumps({"prompt": "a b", "solution": "1"}) + "\n"
    (folder / "rows.jsonl").write_text(row * num_rows)
    tree = yaml.safe_load(config.read_text())
    overrides = [f"model.path={folder / 'model'}", f"data.train={folder / 'rows.jsonl'}"]
    overrides += [f"data.eval.{name}={folder / 'rows.jsonl'}" for name in tree["data"].get("eval", {})]
    return [*overrides, "rollout.engine=transformers", "trainer.loggers=[]"]


def value_of(config: RunConfig, field: str) -> Any:
    value: Any = config.trainer
    for name in field.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("name", CASES)
def test_a_published_script_converts_and_passes_the_check(name: str, tmp_path: Path) -> None:
    file, text, options, num_rows, fields, algorithm = CASES[name]
    (tmp_path / file).write_text(text)
    output = tmp_path / "config.yaml"
    result = CliRunner().invoke(app, ["convert", str(tmp_path / file), *options, "-o", str(output)])
    assert result.exit_code == 0, result.output

    findings = examine(output, small(tmp_path, output, num_rows))
    trainer = findings.config.trainer
    names = ("steps", "groups_per_step", "mini_batches", "group_size", "max_staleness")
    assert fields[""] == tuple(getattr(trainer, name) for name in names)
    named = {field: value for field, value in fields.items() if field}
    if "max_position_embeddings" in text:
        assert findings.config.model.overrides == {"max_position_embeddings": 32768}
    assert {field: value_of(findings.config, field) for field in named} == named
    assert trainer.algorithm == AlgorithmConfig(**algorithm).model_copy(update={"preset": None})
    assert dict(describe(findings))["run"].startswith(f"{trainer.steps:,} steps")
