"""Options of prime-rl that its table cannot express."""

from collections.abc import Mapping
from typing import Any

from tidemill.services.console.convert.draft import Draft
from tidemill.services.console.convert.fit import EVALUATION, WARMUP, F

O = "orchestrator."  # noqa: E741
T = "trainer."
PROMPT_TOKENS = 1024
WRITTEN_BY_HAND = (
    "environments of verifiers: their rows as JSONL and their rubric as a reward function; those of several "
    "turns in rollout.environment (examples/verifiers plays them unchanged)"
)


def convert_prime_rl(draft: Draft, _: str) -> None:
    draft.copy()
    _convert_sources(draft)
    _convert_lengths(draft)
    _convert_evaluation(draft)
    _convert_machine(draft)
    warmup = draft.take(T + "scheduler.warmup_steps")
    kind = draft.take(T + "scheduler.type")
    warmup = 10 if warmup is None and kind in ("linear", "cosine") else warmup
    if warmup:
        draft.put(WARMUP, warmup, T + "scheduler.warmup_steps")
    if kind == "linear" and draft.take(T + "scheduler.decay_steps") != 0:
        draft.say("lost", T + "scheduler.decay_steps", "the rate stays to the end")
    if "trainer.steps" not in draft.fields:
        draft.say("lost", "max_steps", "without it prime-rl goes on for ever: here for 100 steps")


def _named(draft: Draft, lane: str) -> dict[str, Mapping[str, Any]]:
    """The environments of a lane by name."""
    sources = [source for source in draft.take(f"{O}{lane}.source") or () if isinstance(source, dict)]
    tasks = [(source.get("env") or {}).get("taskset") or {} for source in sources]
    return {
        str(source.get("name") or task.get("id") or source.get("id") or lane): source
        for source, task in zip(sources, tasks, strict=True)
    }


def _convert_sources(draft: Draft) -> None:
    """Environments have no counterpart as such: data and reward are named for the user to write."""
    option = O + "train.source"
    sources = _named(draft, "train") or {"train": {}}
    default = draft.take(O + "group_size")
    sizes = {name: source.get("group_size", default) for name, source in sources.items()}
    size = max(sizes.values())
    rows: list[Any] = [f"{name}.jsonl" for name in sources]
    ratios = {name: source.get("ratio", 1.0) for name, source in sources.items()}
    if len(set(sizes.values())) > 1 or set(ratios.values()) != {1.0}:
        rows = [
            {"name": name, "path": f"{name}.jsonl", "group_size": sizes[name], "weight": ratios[name]}
            for name in sources
        ]
    draft.put("data.train", rows, option, "the rows of each environment: write them there")
    guess = "math" if all("math" in name for name in sources) else "gsm8k"
    draft.put("reward.function", guess, option, "put the environment's rubric in its place")
    draft.say("lost", option, f"{', '.join(sources)}: {WRITTEN_BY_HAND}")
    draft.put("trainer.groups_per_step", max(draft.take(O + "batch_size") // size, 1), O + "batch_size")
    draft.put("trainer.group_size", size, O + "group_size")
    curricula = [source["curriculum"] for source in sources.values() if source.get("curriculum")]
    if any((it.get("sampler") or {}).get("type") == "difficulty_pool" for it in curricula):
        draft.put("data.curriculum", {}, option, "difficulty_pool")
        draft.say("approximated", option, "pools by reward are data.curriculum, by how often solved")
    if any(it.get("gates") for it in curricula) and min(sizes.values()) > 1:
        draft.put(F + "filter_zero_variance", True, option, "gates")
        draft.say("approximated", option, "gates are filter_zero_variance: equal rewards are replaced")


def _convert_lengths(draft: Draft) -> None:
    names = ("seq_len", O + "seq_len", T + "model.seq_len", "inference.vllm.max_model_len")
    total = min(
        [int(draft.take(name)) for name in names if name in draft.options], default=draft.take("seq_len")
    )
    completion = draft.take(O + "train.sampling.max_completion_tokens")
    fits = completion and completion < total
    prompt = total - completion if fits else min(PROMPT_TOKENS, total // 2)
    draft.put("model.max_model_len", total, note="the smallest of seq_len and max_model_len")
    draft.put("data.max_prompt_tokens", prompt, note="what the completion leaves")
    draft.put("rollout.sampling.max_tokens", total - prompt, note="max_completion_tokens")
    if not fits:
        text = f"prime-rl cuts whole sequences: here prompts have at most {prompt} tokens"
        draft.say("approximated", "seq_len", text)


def _convert_evaluation(draft: Draft) -> None:
    """One setting for all sets: the shortest interval, the largest group."""
    sources = _named(draft, "eval")
    if not sources:
        return
    option = O + "eval.source"
    files = {name: f"{name}.jsonl" for name in sources}
    draft.put("data.eval", files, option, "the rows of each: write them there")
    draft.say("lost", option, f"environments ({', '.join(sources)}): their rows as JSONL files")
    for field, name, choose in (("every", "interval", min), ("samples", "group_size", max)):
        set_values = [source[name] for source in sources.values() if name in source]
        draft.put(EVALUATION + field, choose([draft.get(EVALUATION + field), *set_values]), f"{O}eval.{name}")


def _convert_machine(draft: Draft) -> None:
    nodes = draft.take("deployment.num_train_nodes")
    per_node = draft.take("deployment.gpus_per_node")
    gpus = draft.take("deployment.num_infer_gpus")
    infer_nodes = draft.take("deployment.num_infer_nodes")
    ranks = nodes * per_node if nodes else draft.take("deployment.num_train_gpus")
    gpus = infer_nodes * per_node if infer_nodes else gpus
    draft.put("trainer.num_ranks", ranks, note="deployment")
    workers = max(gpus // draft.get("rollout.vllm.tensor_parallel_size", 1), 1)
    draft.put("rollout.workers", workers, note="GPUs of the engines / tensor_parallel_size")
    draft.put("trainer.gradient_checkpointing", draft.take(T + "model.ac") is not False, T + "model.ac")
    if any(name.startswith(("monitors.wandb.", "wandb.")) for name in draft.options):
        draft.put("trainer.loggers", ["wandb"], note="monitors.wandb")
