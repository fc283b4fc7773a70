"""The `trainer.algorithm` section: advantages, loss, and what corrects and regularises them.

Every combination of options that would not do what it says is refused here, with the reason. An advantage
and a loss are a file each in `algorithms/`, with equation, paper, traits and the settings that they add to
this section; docs/algorithms.md says which to choose.
"""

import difflib
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from tidemill.common.config.algorithm_sections import (
    EntropyControlConfig,
    ImportanceConfig,
    KlConfig,
    KlControlConfig,
    LengthPenaltyConfig,
    OverlongConfig,
    ReferenceConfig,
    RejectionConfig,
    RouterConfig,
    TeacherTermConfig,
    ValueConfig,
)
from tidemill.common.config.algorithms.advantage import AdvantageTraits
from tidemill.common.config.algorithms.loss import LossTraits
from tidemill.common.config.algorithms.table import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
    PRESETS,
    SETTINGS,
    Correction,
    Preset,
)
from tidemill.common.config.section import PathText, Rules, Section, filled_in

DUAL_CLIP = 3.0
"""Bound of the ratio with `dual_clip: auto`."""

Normalisation = Literal["sequence", "token", "constant", "prompt", "sequence_sum"]


def is_users_own(name: str) -> bool:
    """Whether a name of an advantage or loss is `path/to/file.py:name` or `package.module:name`."""
    return bool(re.match(r"^.+:[A-Za-z_][A-Za-z0-9_.]*$", name))


def is_known_advantage(name: str) -> bool:
    """Whether it is built in, or names a function of the user's own."""
    return name in ADVANTAGES or is_users_own(name)


def _known(names: Collection[str]) -> AfterValidator:
    """Validator of a field that holds one of `names`, or names a function of the user's own."""

    def check(name: str) -> str:
        if name in names or is_users_own(name):
            return name
        if names is ADVANTAGES:
            from tidemill.common.config.algorithms.moved import check_not_moved

            check_not_moved(name)
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"take one of {', '.join(names)}, or path.py:name"
        raise ValueError(f"no such algorithm {name!r}; {hint}")

    return AfterValidator(check)


class CoreAlgorithmConfig(Section):
    """Advantages and loss; docs/algorithms.md says what to choose. Defaults: GRPO, normalised by token
    (DAPO), truncated importance weights."""

    preset: Preset | None = None
    """Defaults of a published algorithm; fields given beside it win."""
    advantage: Annotated[PathText, _known(ADVANTAGES)] = "grpo"
    """The advantage: a built-in name, or `path.py:name`."""
    loss: Annotated[PathText, _known(LOSSES)] = "ppo"
    """Objective of each token: a built-in name, or `path.py:name`."""
    normalisation: Normalisation = "token"
    """Divisor of sums over tokens: as in GRPO, DAPO, Dr. GRPO, ScaleRL, LUSPO, in this order."""
    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    """The ratio is clipped at 1 - clip_low; dppo and gmpo bound other measures with it."""
    clip_high: float = Field(0.28, ge=0.0, le=100.0)
    """The ratio is clipped at 1 + clip_high (DAPO's asymmetric bound)."""
    dual_clip: Annotated[float, Field(gt=1.0, le=1000.0)] | Literal["auto"] | None = "auto"
    """Bound of the ratio where the advantage is negative, above 1 + clip_high. `auto` is 3 for `ppo` and
    `gspo`; null is none."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """The ratio is to the policy at the step's start (decoupled PPO, arXiv 2505.24298), or to the rollout's
    logprobs."""
    correction: Correction | None = None
    """Defaults of `old_logprobs`, `importance` and `rejection` by verl's names."""
    importance: ImportanceConfig = ImportanceConfig()
    rejection: RejectionConfig = RejectionConfig()
    off_policy_threshold: float | None = Field(None, gt=0.0, le=1e6)
    """Leaves out tokens with a negative advantage in sequences whose mean of log(rollout / current) exceeds
    it (DeepSeek-V3.2, arXiv 2512.02556)."""
    top_entropy_quantile: float = Field(1.0, gt=0.0, le=1.0)
    """Share of a mini-batch's tokens, of highest entropy, in the policy's term (arXiv 2506.01939: 0.2)."""
    rollout_penalty: float = Field(0.0, ge=0.0, le=100.0)
    """Weight of log(p / q)^2, with q at the rollout (Kimi K2.5, arXiv 2602.02276; prime-rl's `kl_tau`)."""
    entropy_coefficient: float = Field(0.0, ge=0.0, le=100.0)
    """Weight of an entropy bonus on every trained token."""
    entropy_control: EntropyControlConfig = EntropyControlConfig()
    kl: KlConfig = KlConfig()
    kl_control: KlControlConfig = KlControlConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherTermConfig = TeacherTermConfig()
    router: RouterConfig = RouterConfig()
    value: ValueConfig = ValueConfig()
    gamma: float = Field(1.0, gt=0.0, le=1.0)
    """Discount of later rewards; for `gae` and `reinforce_plus_plus`."""
    gamma_per: Literal["token", "turn"] = "token"
    """`gamma` discounts every later token, or every later turn."""
    success_threshold: float = Field(0.5, ge=-1e6, le=1e6)
    """A reward of at least this solves its prompt."""
    overlong: OverlongConfig = OverlongConfig()
    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
    filter_zero_variance: bool = False
    """Replace groups whose rewards are all equal (DAPO)."""
    max_filter_rounds: int | None = Field(None, ge=1, le=1_000_000)
    """A step that needs more than this times `groups_per_step` groups ends the run; null: after 256 groups,
    or eight steps' worth, without one to train."""
    mask_truncated: bool = False
    """Leave truncated completions out of the loss (DAPO)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        preset = values.get("preset") if isinstance(values, dict) else None
        if isinstance(preset, str) and preset not in PRESETS:
            from tidemill.common.config.algorithms.moved import check_preset_not_moved

            check_preset_not_moved(preset)
        # The correction first: its fields win over those of the preset.
        for field, table in (("correction", CORRECTIONS), ("preset", PRESETS)):
            values = (
                filled_in(values, table.get(str(values.get(field)), {}))
                if isinstance(values, dict)
                else values
            )
        return values

    def rules(self) -> Rules:
        yield from self._ratio_rules()
        yield from self._loss_rules()
        yield from self._part_rules()
        yield from self._shaping_rules()

    @property
    def importance_mode(self) -> Literal["truncate", "mask", "off"]:
        if self.importance.mode != "auto":
            return self.importance.mode
        return "off" if self.old_logprobs == "rollout" else "truncate"

    @property
    def dual_clip_bound(self) -> float | None:
        """`dual_clip` with `auto` resolved; never below the ordinary clip."""
        if self.dual_clip != "auto":
            return self.dual_clip
        return max(DUAL_CLIP, 1.0 + self.clip_high) if self.loss_traits.has_dual_clip else None

    @property
    def advantage_traits(self) -> AdvantageTraits:
        """What follows from the advantage's name; a user's own may use a group of one."""
        return ADVANTAGES.get(self.advantage, AdvantageTraits(compares_siblings=False))

    @property
    def loss_traits(self) -> LossTraits:
        """What follows from the loss's name; a user's own has the defaults."""
        return LOSSES.get(self.loss, LossTraits())

    @property
    def is_adaptive(self) -> bool:
        """Whether coefficients move while the run goes on."""
        return self.kl_control.target is not None or self.entropy_control.target is not None

    @property
    def needs_reference(self) -> bool:
        """Whether the reference model's logprobs are needed for every trained token."""
        return self.reference.model != "off"

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether a token's loss looks at the other tokens of its sequence, as a user's own may."""
        rejection = self.rejection
        return (
            is_users_own(self.loss)
            or self.loss_traits.level == "sequence"
            or self.importance.level != "token"
            or self.off_policy_threshold is not None
            or bool(rejection.of_sequences or rejection.veto)
            or rejection.denominator == "kept"
            or self.router.is_on
        )

    @property
    def needs_start_logprobs(self) -> bool:
        """Whether statistics over a mini-batch need logprobs from the start of the step."""
        return self.importance.normalise or self.loss_traits.choose is not None

    @property
    def needs_start_entropies(self) -> bool:
        return self.top_entropy_quantile < 1.0

    @property
    def needs_statistics(self) -> bool:
        """Whether a mini-batch has statistics, for which it waits for its last group."""
        return self.needs_start_logprobs or self.needs_start_entropies

    @property
    def has_token_advantages(self) -> bool:
        """Whether tokens of one sequence have different advantages, as far as the built-in ones go."""
        is_spread = self.needs_values or self.kl.place == "reward" or self.gamma < 1.0
        return self.advantage_traits.has_discount and is_spread

    @property
    def needs_values(self) -> bool:
        return self.advantage_traits.needs_values

    def _ratio_rules(self) -> Rules:
        """Checks that loss, ratio and corrections fit together."""
        old = self.old_logprobs
        loss = self.loss_traits
        is_sequence = self.loss_traits.level == "sequence"
        if loss.weighs_by_rollout and old != "rollout":
            yield (
                f"loss: {self.loss} weighs each token by its bounded ratio to the rollout: set "
                "`old_logprobs: rollout` (with recompute `importance` does the weighing, and the loss is "
                "reinforce)"
            )
        if not loss.has_ratio and old == "rollout":
            yield (
                f"loss: {self.loss} has no ratio, so `old_logprobs: rollout` would leave staleness "
                "uncorrected; take recompute, whose `importance` weights correct for it"
            )
        if self.importance.mode in ("truncate", "mask") and old == "rollout":
            yield (
                f"importance.mode: {self.importance.mode} would weigh every token twice, for with "
                "`old_logprobs: rollout` the ratio is the importance weight; take recompute, or mode off"
            )
        if is_sequence and self.importance_mode != "off" and self.importance.level == "token":
            yield (
                f"loss: {self.loss} keeps or clips whole sequences, importance.level: token would weigh or "
                "mask single tokens of them; take level sequence or geometric, or mode off"
            )
        if self.importance.normalise and self.importance_mode != "truncate":
            yield (
                "importance.normalise brings truncated weights to a mean of 1, and importance.mode is "
                f"{self.importance_mode}; take mode truncate, or leave it out"
            )
        if isinstance(self.dual_clip, float):
            if not loss.has_dual_clip:
                yield f"dual_clip bounds the ratio of ppo and gspo; loss: {self.loss} has no use for it"
            if self.dual_clip <= 1.0 + self.clip_high:
                yield (
                    f"dual_clip ({self.dual_clip}) must exceed 1 + clip_high ({1.0 + self.clip_high}): it "
                    "bounds what the ordinary clip leaves open"
                )

    def _loss_rules(self) -> Rules:
        """Checks that what leaves out tokens, and advantages of single tokens, fit the loss."""
        rejection = self.rejection
        is_sequence = self.loss_traits.level == "sequence"
        if self.top_entropy_quantile < 1.0 and is_sequence:
            yield (
                f"loss: {self.loss} has one ratio for a sequence, whose gradient reaches all its tokens: "
                "top_entropy_quantile could not leave out any; take a loss of tokens"
            )
        if rejection.denominator == "kept" and self.normalisation == "prompt":
            yield (
                "rejection.denominator: kept is defined for normalisation token and sequence, and "
                "normalisation: prompt averages over the tokens of a group; leave it at all, or take another "
                "normalisation"
            )
        if rejection.of_tokens and is_sequence:
            yield (
                f"loss: {self.loss} has one ratio for a sequence, and "
                f"rejection.bounds.{''.join(rejection.of_tokens[:1])} would leave out single tokens of it; "
                "take a criterion of sequences (seq_...), or another loss"
            )
        if is_sequence and self.has_token_advantages:
            yield (
                f"loss: {self.loss} has one ratio for a sequence and needs one advantage for it, but "
                f"advantage: {self.advantage} gives one for each token (with gae, a KL penalty in the "
                "reward, or gamma below 1). Take loss ppo, or another advantage"
            )

    def _part_rules(self) -> Rules:
        """Checks that KL, reference, teacher, entropy control and advantage fit together."""
        teacher = self.teacher
        entropy = self.entropy_control
        if teacher.gamma and teacher.place == "loss":
            yield (
                f"teacher.gamma ({teacher.gamma}) discounts rewards, and teacher.place is loss: take place: "
                "reward, or leave gamma out"
            )
        if self.kl.place != "off" and not self.needs_reference:
            yield (
                f"kl.place: {self.kl.place} needs a reference model to compare with: set reference.model to "
                "frozen or updated"
            )
        if self.kl.place == "reward" and self.kl.estimator in ("k3+", "corrected_k3"):
            yield (
                f"kl.estimator: {self.kl.estimator} is k3 with another gradient, and a penalty in the reward "
                "has none: take k3, or kl.place: loss"
            )
        if entropy.target is not None and not entropy.low <= self.entropy_coefficient <= entropy.high:
            yield (
                f"entropy_coefficient ({self.entropy_coefficient:g}) is where entropy_control begins, and "
                f"lies outside of its low and high ({entropy.low:g} to {entropy.high:g})"
            )
        if self.gamma < 1.0 and not self.advantage_traits.has_discount:
            yield (
                f"gamma ({self.gamma}) discounts the rewards of later tokens, and advantage: "
                f"{self.advantage} knows one reward for a sequence; leave it at 1, or take gae or "
                "reinforce_plus_plus"
            )

    def _shaping_rules(self) -> Rules:
        """Checks that reward shaping fits the advantage."""
        traits = self.advantage_traits
        has_length = self.length_penalty.is_on
        for name, is_set in (
            ("overlong.penalty shapes the sum", self.overlong.penalty > 0),
            ("length_penalty shapes the sum", has_length),
            ("kl.place: reward shapes the sum", self.kl.place == "reward"),
            ("filter_zero_variance replaces groups whose sums are equal", self.filter_zero_variance),
        ):
            if traits.compares_rewards and is_set:
                yield (
                    f"{name}, and advantage: {self.advantage} compares each reward by itself; take another "
                    "advantage, or leave it out"
                )
        if has_length and traits.is_binary:
            yield (
                f"length_penalty makes good rewards differ, and advantage: {self.advantage} only asks "
                "whether they reach success_threshold; take another advantage, or leave it out"
            )
        if has_length and traits.has_greedy_baseline:
            yield (
                f"length_penalty compares the lengths of a group, and advantage: {self.advantage} compares "
                "each completion with a greedy one alone; take another advantage, or leave it out"
            )
        if has_length and self.mask_truncated:
            yield (
                "length_penalty measures completions against the longest of their group, and mask_truncated "
                "leaves those at the length limit out of the loss; choose one"
            )
        if self.overlong.penalty > 0 and self.mask_truncated:
            yield (
                "overlong.penalty punishes completions at the length limit, mask_truncated leaves them out "
                "of the loss; choose one"
            )


if TYPE_CHECKING:

    class AlgorithmConfig(CoreAlgorithmConfig):
        """The section, with the settings of all algorithms."""

else:
    AlgorithmConfig = create_model(
        "AlgorithmConfig",
        # pydantic takes the fields of the last base first: those of single algorithms come after the others.
        __base__=(*SETTINGS, CoreAlgorithmConfig),
        __module__=__name__,
        __doc__=CoreAlgorithmConfig.__doc__,
    )
