"""What single options become, and what is said about those that do not carry over."""

from pathlib import Path
from typing import Any

import pytest

from tidemill.common.errors import ConfigError
from tidemill.services.console.commands import ConvertOptions
from tidemill.services.console.convert.command import convert, convert_options, run_convert
from tidemill.services.console.convert.draft import Draft
from tidemill.services.console.convert.table import Project

A = "actor_rollout_ref.actor."
R = "actor_rollout_ref.rollout."
C = "algorithm.rollout_correction."
BYPASS = {C + "bypass_mode": True}
BASE: dict[Project, dict[str, Any]] = {
    "verl": {"algorithm.adv_estimator": "grpo", R + "n": 4, "data.train_files": "gsm8k.parquet"},
    "trl": {"reward_funcs": "mine.reward", "train_dataset": "rows.jsonl"},
    "prime-rl": {"orchestrator.group_size": 8, "max_steps": 10},
}
ALGORITHM = "trainer.algorithm."


def draft(project: Project, **options: Any) -> Draft:
    return convert_options(project, BASE[project] | options)


def value_of(tree: Any, field: str) -> Any:
    """The value of a dotted field; None where it is not set."""
    for name in field.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def verdicts(made: Draft, option: str) -> list[str]:
    return [finding.verdict for finding in made.findings if finding.option == option]


# What a table of options only copies or translates is not told again here: test_tables.py reads those rows.
CASES: list[tuple[Project, dict[str, Any], dict[str, Any]]] = [
    # verl
    ("verl", {}, {"trainer.epochs": 30, "trainer.groups_per_step": 1024, "trainer.mini_batches": 4}),
    ("verl", {"data.image_key": "images", "trainer.n_gpus_per_node": 1}, {"images": {}}),
    ("verl", {"data.image_key": "picture", "trainer.n_gpus_per_node": 1},
     {"images": {}, "data.columns.images": "picture"}),
    ("verl", {"trainer.total_training_steps": 7}, {"trainer.steps": 7, "trainer.epochs": None}),
    ("verl", {"algorithm.norm_adv_by_std_in_grpo": False}, {ALGORITHM + "advantage": "dr_grpo"}),
    ("verl", {"algorithm.adv_estimator": "gae", "critic.optim.lr": 2e-5},
     {ALGORITHM + "advantage": "gae", ALGORITHM + "value.model": "own",
      ALGORITHM + "value.lr": 2e-5, ALGORITHM + "gae_lambda": 1.0,
      "trainer.num_ranks": 8}),
    ("verl", {A + "clip_ratio_low": 2.0}, {ALGORITHM + "clip_low": 1.0}),
    ("verl", {A + "ppo_mini_batch_size": 1024, A + "clip_ratio_c": 10.0}, {ALGORITHM + "dual_clip": None}),
    ("verl", {A + "policy_loss.loss_mode": "gspo", A + "loss_agg_mode": "seq-mean-token-mean"},
     {ALGORITHM + "loss": "gspo", ALGORITHM + "normalisation": "sequence"}),
    ("verl", {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.5},
     {ALGORITHM + "kl.place": "reward", ALGORITHM + "kl.estimator": "k1", ALGORITHM + "kl.coefficient": 0.5,
      ALGORITHM + "reference.model": "frozen"}),
    ("verl", {C + "rollout_is": "token"},
     {ALGORITHM + "importance.mode": "truncate", ALGORITHM + "importance.level": "token",
      ALGORITHM + "importance.high": 2.0}),
    ("verl", {C + "rollout_is": "token", C + "rollout_is_threshold": "0.5_5.0"},
     {ALGORITHM + "importance.mode": "mask", ALGORITHM + "importance.low": 0.5,
      ALGORITHM + "importance.high": 5.0}),
    ("verl", {**BYPASS, C + "rollout_is": "token", C + "loss_type": "reinforce"},
     {ALGORITHM + "loss": "cispo", ALGORITHM + "clip_low": 1.0, ALGORITHM + "clip_high": 1.0}),
    ("verl", {C + "rollout_rs": "seq_mean_k1", C + "rollout_rs_threshold": "0.99_1.01"},
     {ALGORITHM + "rejection.bounds": {"seq_mean_k1": [0.99, 1.01]},
      ALGORITHM + "rejection.denominator": "kept",
      ALGORITHM + "importance.mode": "off"}),
    ("verl", {C + "rollout_is": "token", C + "rollout_is_batch_normalize": True},
     {ALGORITHM + "importance.normalise": True}),
    ("verl", {**BYPASS, C + "rollout_is": "token", C + "rollout_is_batch_normalize": True},
     {ALGORITHM + "importance": None}),
    ("verl", {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive",
              "algorithm.kl_ctrl.horizon": 500},
     {ALGORITHM + "kl.place": "reward", ALGORITHM + "kl_control.target": 0.1,
      ALGORITHM + "kl_control.horizon": 500}),
    ("verl", {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": 0.2},
     {ALGORITHM + "kl_control": None}),
    ("verl", {A + "policy_loss.loss_mode": "dppo_tv", A + "clip_ratio_c": 20.0},
     {ALGORITHM + "loss": "dppo_tv", ALGORITHM + "dppo.max_ratio": 20.0, ALGORITHM + "dual_clip": None}),
    # with one update a step it is ppo, which has no such section
    ("verl", {A + "policy_loss.loss_mode": "dppo_tv", A + "ppo_mini_batch_size": 1024},
     {ALGORITHM + "loss": "ppo", ALGORITHM + "dppo": None}),
    ("verl", {A + "ppo_micro_batch_size_per_gpu": 4}, {"trainer.micro_batch_tokens": 4 * 1024}),
    ("verl", {A + "ulysses_sequence_parallel_size": 4, A + "ppo_max_token_len_per_gpu": 8192,
              "data.max_response_length": 1 << 16},
     {"trainer.context_ranks": 4, "trainer.micro_batch_tokens": (512 + (1 << 16)) // 4}),
    ("verl", {R + "engine_kwargs.vllm.seed": 1}, {"rollout.vllm.extra": {"seed": 1}}),
    ("verl", {"custom_reward_function.path": "my.py"}, {"reward.function": "my.py:compute_score"}),
    ("verl", {"reward_model.enable": True, "reward_model.model.path": "m"},
     {"reward.rewards": {"reward_model": {"model": {"servers": "reward_model"}}},
      "servers": {"reward_model": {"model": "m", "local": {}}}}),
    ("verl", {"data.val_files": ["/d/gsm8k/test.parquet", "/d/aime.parquet"]},
     {"data.eval": {"gsm8k": "/d/gsm8k/test.parquet", "aime": "/d/aime.parquet"},
      "trainer.evaluation.every": 0}),
    ("verl", {"data.val_files": "a.parquet", R + "val_kwargs.do_sample": True,
              R + "val_kwargs.temperature": 0.6, R + "val_kwargs.top_p": 0.7,
              R + "val_kwargs.top_k": 20, R + "val_kwargs.n": 4},
     {"trainer.evaluation.temperature": 0.6, "trainer.evaluation.top_p": 0.7, "trainer.evaluation.top_k": 20,
      "trainer.evaluation.samples": 4}),
    ("verl", {"data.val_files": "a.parquet", R + "val_kwargs.top_p": 0.7},
     {"trainer.evaluation.temperature": 0.0, "trainer.evaluation.top_p": None}),
    ("verl", {"actor_rollout_ref.model.override_config.rope_scaling.factor": 4.0,
              "actor_rollout_ref.model.override_config.max_position_embeddings": 4096},
     {"model.overrides": {"rope_scaling": {"factor": 4.0}, "max_position_embeddings": 4096}}),
    ("verl", {R + "n": 1}, {ALGORITHM + "advantage": "reinforce_plus_plus", "reward.min_group_size": 1}),
    ("verl", {A + "clip_ratio_c": 1e4}, {ALGORITHM + "dual_clip": None}),
    ("verl", {A + "optim.lr_warmup_steps": 10, "trainer.total_training_steps": 10},
     {"trainer.optimizer.warmup_steps": 9}),
    ("trl", {"max_prompt_length": 256}, {"data.max_prompt_tokens": 256, "data.overlong_prompts": "left"}),
    # TRL: 8 * 2 * 4 completions are 8 groups, in 4 / 2 updates
    ("trl", {"num_processes": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 9},
     {"trainer.groups_per_step": 8, "trainer.mini_batches": 2, "trainer.steps": 5,
      "trainer.checkpoint_every": 250}),
    # generations shorter than an update: 8 * 4 completions are 4 groups, in one update
    ("trl", {"gradient_accumulation_steps": 4, "steps_per_generation": 1, "max_steps": 9},
     {"trainer.groups_per_step": 4, "trainer.mini_batches": 1, "trainer.passes": 1, "trainer.steps": 9}),
    # each generation four times, in two updates
    ("trl", {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 4},
     {"trainer.groups_per_step": 1, "trainer.mini_batches": 1, "trainer.passes": 2}),
    ("trl", {"max_steps": 40, "save_steps": 0.05, "num_iterations": 2},
     {"trainer.steps": 20, "trainer.checkpoint_every": 1}),
    ("trl", {"max_steps": 400, "save_steps": 0.05, "eval_steps": 0.1, "eval_strategy": "steps",
             "eval_dataset": "held.jsonl"},
     {"trainer.checkpoint_every": 20, "trainer.evaluation.every": 40}),
    ("trl", {"save_steps": 0.05}, {"trainer.checkpoint_every": None, "trainer.epochs": 3}),
    # without eval_steps it is logging_steps, sampled as in training
    ("trl", {"eval_strategy": "steps", "eval_dataset": "held.jsonl", "temperature": 0.7, "top_p": 0.9},
     {"trainer.evaluation": {
         "every": 10, "at_start": False, "samples": 8, "temperature": 0.7, "top_p": 0.9}}),
    ("trl", {"evaluation_strategy": "steps", "logging_steps": 4, "eval_dataset": "held.jsonl",
             "num_generations_eval": 2, "eval_on_start": True},
     {"trainer.evaluation.every": 4, "trainer.evaluation.samples": 2, "trainer.evaluation.at_start": True}),
    ("trl", {"eval_strategy": "epoch", "eval_dataset": "held.jsonl"}, {"trainer.evaluation.every": 0}),
    ("trl", {"eval_dataset": "held.jsonl"},
     {"trainer.evaluation": {"every": 0, "at_start": False}, "data.eval": {"held_out": "held.jsonl"}}),
    ("trl", {"train_dataset": None, "dataset_name": "a/b", "eval_strategy": "steps", "eval_steps": 3},
     {"data.eval": {"held_out": "hub:a/b@test"}, "trainer.evaluation.every": 3}),
    ("trl", {"system_prompt": "Think.", "dataset_prompt_column": "problem", "wandb_project": "p"},
     {"data.system_prompt": "Think.", "data.columns": {"prompt": "problem"}, "trainer.logger_project": "p"}),
    # several passes over one mini-batch move the ratio away from 1
    ("trl", {"num_iterations": 2, "loss_type": "sapo", "max_steps": 9},
     {"trainer.passes": 2, "trainer.mini_batches": 1, "trainer.steps": 5, ALGORITHM + "loss": "sapo"}),
    ("trl", {"num_iterations": 2, "delta": 4.0},
     {ALGORITHM + "loss": "ppo", ALGORITHM + "dual_clip": 4.0}),
    ("trl", {"beta": 0.04, "use_bias_correction_kl": False},
     {ALGORITHM + "kl.estimator": "k3", ALGORITHM + "kl.bound": None, ALGORITHM + "kl.coefficient": 0.04,
      ALGORITHM + "reference.model": "frozen"}),
    ("trl", {"loss_type": "cispo", "epsilon_high": 5.0},
     {ALGORITHM + "loss": "cispo", ALGORITHM + "clip_low": 1.0, ALGORITHM + "clip_high": 4.0,
      ALGORITHM + "old_logprobs": "rollout"}),
    # its sequence weights are the ratio to the rollout, so nothing is weighed twice
    ("trl", {"loss_type": "vespo", "vespo_k_neg": 4.0, "use_vllm": True},
     {ALGORITHM + "loss": "vespo", ALGORITHM + "normalisation": "token",
      ALGORITHM + "old_logprobs": "rollout", ALGORITHM + "vespo.positive": None,
      ALGORITHM + "vespo.negative": [4.0, 2.0],
      ALGORITHM + "importance": None}),
    ("trl", {"loss_type": "luspo", "importance_sampling_level": "sequence", "steps_per_generation": 2},
     {ALGORITHM + "loss": "gspo", ALGORITHM + "normalisation": "sequence_sum"}),
    ("trl", {"reward_funcs": ["a.b", "c.d"], "multi_objective_aggregation": "normalize_then_sum"},
     {ALGORITHM + "advantage": "gdpo"}),
    ("trl", {"use_vllm": True, "vllm_mode": "server"},
     {ALGORITHM + "importance": {"mode": "mask", "level": "sequence", "high": 3.0}}),
    ("trl", {"importance_sampling_level": "sequence", "steps_per_generation": 2, "epsilon": 3e-4},
     {ALGORITHM + "loss": "gspo", ALGORITHM + "clip_low": 3e-4, ALGORITHM + "dual_clip": None}),
    ("trl", {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
     {ALGORITHM + "importance.mode": "truncate", ALGORITHM + "importance.level": "token",
      "rollout.engine": "vllm"}),
    ("trl", {"reward_funcs": ["accuracy_reward", "owner/model"], "reward_weights": [1.0, 0.5]},
     {"reward.rewards": {
         "accuracy_reward": {"function": "trl.rewards:accuracy_reward", "weight": 1.0},
         "owner_model": {"model": {"servers": "owner_model"}, "weight": 0.5}},
      "servers": {"owner_model": {"model": "owner/model", "local": {}}}}),
    ("trl", {"train_dataset": None, "dataset_name": "a/b", "dataset_config": "main"},
     {"data.train": "hub:a/b/main@train"}),
    ("trl", {"train_dataset": "load_dataset('a/b', 'c', split='train[:9]')",
             "eval_dataset": "load_dataset('a/b', split='test').map(f)"},
     {"data.train": "hub:a/b/c@train[:9]", "data.eval": {"held_out": "hub:a/b@test"}}),
    ("trl", {"peft_config": "LoraConfig(r=4, lora_alpha=8)"},
     {"trainer.lora.rank": 4, "trainer.lora.alpha": 8.0}),
    ("trl", {"peft_config": "LoraConfig(task_type='CAUSAL_LM', target_modules=['q_proj', 'v_proj'])"},
     {"trainer.lora": {"rank": 8, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}}),
    ("trl", {"use_peft": True}, {"trainer.lora.rank": 16, "trainer.lora.alpha": 32.0}),
    ("trl", {"reward_funcs": ["mine.reward"], "reward_weights": [0.5]},
     {"reward.rewards": {"mine_reward": {"function": "mine:reward", "weight": 0.5}}}),
    ("trl", {"warmup_ratio": 0.1, "max_steps": 50}, {"trainer.optimizer.warmup_steps": 5}),
    # prime-rl
    ("prime-rl", {}, {"trainer.groups_per_step": 16, "trainer.max_staleness": 8, "rollout.workers": 1}),
    ("prime-rl", {"orchestrator.train.source": [{"name": "a", "ratio": 3.0}, {"name": "b"}]},
     {"data.train": [{"name": "a", "path": "a.jsonl", "group_size": 8, "weight": 3.0},
                     {"name": "b", "path": "b.jsonl", "group_size": 8, "weight": 1.0}]}),
    ("prime-rl", {"orchestrator.train.source": [{"name": "a", "group_size": 1}],
                  "orchestrator.algo.type": "max_rl"},
     {"trainer.group_size": 1, "reward.min_group_size": 1, ALGORITHM + "advantage": "reinforce_plus_plus"}),
    ("prime-rl", {"orchestrator.train.source": [{"name": "a", "curriculum": {
        "sampler": {"type": "difficulty_pool"}, "gates": {"g": {"type": "advantage_range"}}}}]},
     {"data.curriculum": {}, ALGORITHM + "filter_zero_variance": True}),
    ("prime-rl", {"orchestrator.algo.length_penalty.num_output_tokens_weight": 0.5},
     {ALGORITHM + "length_penalty": {"tokens": 0.5, "turns": 0.1}}),
    ("prime-rl", {"trainer.scheduler.type": "cosine", "max_steps": 40},
     {"trainer.optimizer.schedule": "cosine", "trainer.optimizer.warmup_steps": 10}),
    ("prime-rl", {"trainer.scheduler.type": "linear", "trainer.scheduler.warmup_steps": 3},
     {"trainer.optimizer.schedule": "constant", "trainer.optimizer.warmup_steps": 3}),
    ("prime-rl", {"inference.vllm.tensor_parallel_size": 2, "deployment.num_infer_gpus": 8},
     {"rollout.vllm.tensor_parallel_size": 2, "rollout.workers": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("project", "options", "expected"), CASES)
def test_options_become_our_fields(project, options, expected):
    made = draft(project, **options)
    assert {field: value_of(made.tree(), field) for field in expected} == expected
    assert made.problem() == ""


LOST: list[tuple[Project, str, Any, str]] = [
    ("verl", "actor_rollout_ref.ref.ulysses_sequence_parallel_size", 8, "lost"),
    ("verl", A + "policy_loss.loss_mode", "no_such", "lost"),
    ("verl", A + "kl_loss_type", "abs", "automatic"),
    ("verl", "algorithm.adv_estimator", "gdpo", "approximated"),
    ("trl", "loss_type", "bnpo", "approximated"),
    ("trl", "multi_objective_aggregation", "sum_then_normalize", ""),
    ("verl", A + "optim.lr_warmup_steps_ratio", 0.1, "lost"),
    ("verl", "trainer.save_freq", -1, "automatic"),
    ("verl", "trainer.nobody.knows", 1, "lost"),
    ("verl", A + "fsdp_config.param_offload", False, ""),
    ("trl", "top_entropy_quantile", 1.0, ""),
    ("trl", "vllm_server_host", "x", "automatic"),
    ("trl", "delta", 4.0, "automatic"),
    ("trl", "train_dataset", "load_dataset('a/b').map(f)", "approximated"),
    ("trl", "train_dataset", "make_rows()", "lost"),
    ("trl", "save_steps", 0.05, "lost"),
    ("trl", "save_strategy", "epoch", "approximated"),
    ("trl", "config", "recipe.yaml", "lost"),
]


@pytest.mark.parametrize(("project", "option", "value", "verdict"), LOST)
def test_what_does_not_carry_over_is_said(project: Project, option: str, value: Any, verdict: str) -> None:
    assert verdicts(draft(project, **{option: value}), option) == ([verdict] if verdict else [])


SILENT: list[tuple[dict[str, Any], str, str]] = [
    ({"loss_type": "cispo"}, "epsilon_high", "lost"),
    ({"loss_type": "cispo", "epsilon_high": 0.28}, "epsilon_high", "lost"),
    ({"eval_strategy": "epoch", "eval_dataset": "held.jsonl"}, "eval_strategy", "approximated"),
    ({"eval_strategy": "steps"}, "eval_strategy", "lost"),
    ({"eval_strategy": "steps", "eval_steps": 0.5, "eval_dataset": "held.jsonl"}, "eval_steps", "lost"),
    ({"eval_strategy": "steps", "logging_steps": 0.5, "eval_dataset": "held.jsonl"}, "eval_strategy", "lost"),
    ({"use_peft": True}, "lora_dropout", "lost"),
    ({"peft_config": "LoraConfig(r=4, lora_dropout=0.1)"}, "lora_dropout", "lost"),
    ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, "steps_per_generation", "approximated"),
    ({"steps_per_generation": 2, "save_steps": 5}, "save_steps", "approximated"),
]


@pytest.mark.parametrize(("options", "option", "verdict"), SILENT)
def test_what_several_options_make_together_is_said(options, option, verdict):
    assert verdicts(draft("trl", **options), option) == [verdict]
    assert verdicts(draft("trl", loss_type="cispo", epsilon_high=5.0), "epsilon_high") == []


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_yaml_of_verl_with_references_and_overrides(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref: {actor: {optim: {lr: 1e-6}, ppo_mini_batch_size: '${data.train_batch_size}'},\n"
        "  rollout: {n: 4, name: '???', top_p: '${oc.select:a.b,1}'}}\n"
        "data: {train_batch_size: 64}\nalgorithm: {adv_estimator: grpo}\n"
    )
    more = ["+trainer.total_epochs=2", "data.train_batch_size=32", "trainer.experiment_name=2025-02-30"]
    made = convert(write(tmp_path, "a.yaml", text), more, None)
    assert (made.table.project, made.fields["run_id"]) == ("verl", "2025-02-30")  # a date that is none
    assert (made.fields["trainer.groups_per_step"], made.fields["trainer.mini_batches"]) == (32, 1)
    assert (made.fields["trainer.epochs"], made.fields["trainer.optimizer.lr"]) == (2, 1e-6)


def test_null_is_an_option_that_was_not_given() -> None:
    nulls = dict.fromkeys((A + "clip_ratio_low", A + "optim.lr", "data.max_prompt_length", R + "top_p"))
    assert draft("verl", **nulls).fields == draft("verl").fields


def test_a_script_and_yaml_of_trl(tmp_path: Path) -> None:
    script = "accelerate launch --num_processes 4 train.py --learning_rate 1e-5 --use_vllm --beta=0.1"
    made = convert(write(tmp_path, "run.sh", script), [], None)
    assert (made.fields["trainer.num_ranks"], made.fields["trainer.optimizer.lr"]) == (4, 1e-5)
    assert (made.fields["rollout.engine"], made.fields[ALGORITHM + "kl.coefficient"]) == ("vllm", 0.1)
    made = convert(
        write(tmp_path, "c.yaml", "model_name_or_path: m\nnum_generations: 4\n"), ["beta=0.5"], None
    )
    assert (made.fields["model.path"], made.fields["trainer.group_size"]) == ("m", 4)


def test_no_word_of_a_script_vanishes(tmp_path: Path) -> None:
    script = (
        "VLLM=1 python3 -u -m verl.trainer.main_ppo --config-name=mine --config-path configs max_turns=2 \\\n"
        "  data.train_files=a.parquet ~data.val_files config=more.yaml bare +x=$Y 2>&1 | tee run.log"
    )
    made = convert(write(tmp_path, "run.sh", script), [], None)
    assert made.table.project == "verl" and made.fields["data.train"] == "a.parquet"
    named = ["--config-name", "--config-path", "max_turns", "~data.val_files", "config", "bare", "x"]
    assert [name for name in named if verdicts(made, name) != ["lost"]] == []
    assert "not read here" in made.text("run.sh") and "tee" not in made.text("run.sh")
    plain = convert(write(tmp_path, "run.sh", script.replace("=mine", "=ppo_trainer")), [], None)
    assert verdicts(plain, "--config-name") == []


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        ("accelerate launch --num_processes 16 --num_machines 2", 16),
        ("torchrun --nnodes=2 --nproc_per_node=8", 16),
        ("torchrun --nproc-per-node 4", 4),
        ("deepspeed --num_gpus 4", 4),
    ],
)
def test_the_launcher_says_how_many_processes_there_are(tmp_path, launcher, processes):
    made = convert(write(tmp_path, "run.sh", f"{launcher} train.py --beta 0.1"), [], None)
    assert made.fields["trainer.num_ranks"] == processes


def test_options_of_a_launcher_that_count_are_said(tmp_path: Path) -> None:
    script = (
        "accelerate launch --config_file zero3.yaml --main_process_port 2950 train.py --config r.yaml > log"
    )
    made = convert(write(tmp_path, "run.sh", script), [], None)
    assert verdicts(made, "launch.config_file") == verdicts(made, "config") == ["lost"]
    assert verdicts(made, "launch.main_process_port") == ["automatic"]


PARTS = {
    "orchestrator.toml": 'batch_size = 64\nmax_steps = 5\n[model]\nname = "m"\n',
    "trainer.toml": "max_steps = 5\n[optim]\nlr = 1e-5\n",
    "inference.toml": "[vllm]\ntensor_parallel_size = 2\n",
    "sft.toml": "max_steps = 5\n[optim]\nlr = 1e-5\n[data]\nname = 'x'\n",
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_prime_rl_run_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*part files.*rl\.toml"):
        convert(write(tmp_path, name, PARTS[name]), [], None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", "[project]\nname = 'x'\n"),
        ("compose.yaml", "services: {a: {image: b}}\n"),
        ("run.sh", "python train.py --epochs_of_mine 3"),
    ],
)
def test_a_file_without_any_option_that_is_known_is_refused(tmp_path, name, text):
    with pytest.raises(ConfigError, match=rf"{name}: none of its options"):
        convert(write(tmp_path, name, text), [], None)


def test_python_is_parsed_and_never_run(tmp_path: Path) -> None:
    text = "raise SystemExit\nN = 4\nGRPOConfig(num_generations=N, seed=1)\nGRPOTrainer(reward_funcs=f)\n"
    made = convert(write(tmp_path, "train.py", text), [], None)
    assert (made.fields["trainer.group_size"], made.fields["seed"]) == (4, 1)
    assert made.fields["reward.function"] == "train.py:f"


def test_no_argument_of_a_python_file_vanishes(tmp_path: Path) -> None:
    text = (
        "config = GRPOConfig(num_generations=4, **more)\nconfig.beta = 0.1\nother.beta = 0.9\n"
        "GRPOTrainer('m', [f], config, rows, callbacks=[c], optimizers=(o, None), processing_class=t)\n"
    )
    made = convert(write(tmp_path, "train.py", text), [], None)
    assert (made.fields["model.path"], made.fields["reward.function"]) == ("m", "train.py:f")
    assert made.fields[ALGORITHM + "kl.coefficient"] == 0.1
    named = {name: verdicts(made, name) for name in ("**more", "callbacks", "optimizers", "processing_class")}
    assert named == {
        "**more": ["lost"], "callbacks": ["lost"], "optimizers": ["lost"], "processing_class": ["automatic"]
    }  # fmt: skip


def test_defaults_of_the_command_line_count_and_what_must_run_is_said(tmp_path: Path) -> None:
    text = (
        'parser.add_argument("--num-generations", type=int, default=4)\n'
        "GRPOConfig(num_generations=args.num_generations, max_steps=int(x), output_dir=str(y))\n"
        "GRPOTrainer(model=path, reward_funcs=[f], train_dataset=load(z))\n"
    )
    made = convert(write(tmp_path, "train.py", text), [], None)
    assert (made.fields["trainer.group_size"], made.fields["trainer.epochs"]) == (4, 3)
    assert (made.fields["model.path"], verdicts(made, "model")) == ("MODEL", ["lost"])
    assert verdicts(made, "max_steps") == ["lost"] and verdicts(made, "output_dir") == []
    assert "int(x) is known only when the file runs" in made.text("train.py")
    assert convert(tmp_path / "train.py", ["max_steps=5"], None).fields["trainer.steps"] == 5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", ""),
        ("a.yaml", "[1]"),
        ("a.py", "x = 1"),
        ("a.py", "x = ("),
        ("a.toml", "x = "),
        ("a.sh", "echo hello"),
        ("a.yaml", "data: {train_batch_size: many}\nactor_rollout_ref: {a: 1}"),
    ],
)
def test_files_that_hold_no_options_are_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        convert(write(tmp_path, name, text), [], None)


def test_a_place_that_takes_no_file_is_a_mistake_of_what_was_given(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "num_generations: 4")
    with pytest.raises(ConfigError, match=r"directory|busy"):
        run_convert(ConvertOptions(file=file, options=[], project=None, output=Path()))


def test_the_file_names_what_our_config_refuses() -> None:
    made = draft("verl", **{"data.max_response_length": 1 << 21})
    assert "# This config is refused as it is:" in made.text("x.sh")
    assert "max_tokens" in made.problem()


def test_the_file_lists_what_is_lost_with_its_value() -> None:
    option = "actor_rollout_ref.ref.ulysses_sequence_parallel_size"
    text = draft("verl", **{option: 8}).text("run.sh")
    assert f"# - {option} = 8: trainer.context_ranks is that of the actor" in text
    assert "group_size: 4  # actor_rollout_ref.rollout.n" in text
