"""Checks of the sources of `data.train`: their sampling, and the rewards that score them."""

from typing import TYPE_CHECKING

from pydantic import ValidationError

from tidemill.common.config.section import Rules, listed

if TYPE_CHECKING:
    from tidemill.common.config.run import RunConfig


def find_problems(run: "RunConfig") -> Rules:
    sources = run.data.prompt_sources
    limit = run.rollout.sampling.max_tokens
    names = {source.name for source in sources}
    sets = run.data.eval
    scorable = {*names, *sets}
    if run.data.sources and run.trainer.epochs is not None:
        yield (
            "trainer.epochs counts passes over one training set, and sources of data.train have `epochs` "
            "of their own; give trainer.steps in its place"
        )
    for source in sources:
        whose = f"source {source.name!r}"
        try:
            max_tokens = run.sampling_of(source).max_tokens
        except ValidationError as error:
            from tidemill.common.config.problems import explain_problem

            raise ValueError(f"sampling of {whose}: {explain_problem(error.errors()[0])}") from None
        if max_tokens > limit:
            yield (
                f"sampling.max_tokens of {whose} ({max_tokens}) exceeds rollout.sampling.max_tokens "
                f"({limit}), which is the run's limit; raise that one, or lower this one"
            )
        if max_tokens != limit and run.trainer.algorithm.overlong.penalty:
            yield (
                f"{whose} has sampling.max_tokens of its own, and trainer.algorithm.overlong punishes "
                "what comes near rollout.sampling.max_tokens: choose one"
            )
        if source.environment and run.rollout.environment.is_single_turn:
            yield (
                f"{whose} names an environment, and rollout.environment.use is single_turn; name there "
                "what offers several, or leave it out"
            )
    for name, reward in run.reward.rewards.items():
        unknown = sorted({*reward.sources} - scorable)
        if reward.sources and not names:
            yield (
                f"reward.rewards.{name} has sources, and data.train lists none: list them, or choose by "
                "`applies_to`"
            )
        if unknown:
            yield (
                f"reward.rewards.{name}.sources names {listed(unknown)}; data.train has the sources "
                f"{listed(sorted(names))}, and data.eval has {listed(sets)}"
            )
    for kind, lane, declared in (("source", "train", names), ("evaluation set", "eval", sets)):
        scoring = [reward for reward in run.reward.named.values() if lane in reward.lanes]
        for name in sorted(declared):
            is_scored = any(not reward.sources or name in reward.sources for reward in scoring)
            if not is_scored:
                yield f"no reward scores {kind} {name!r}: add it to `sources` of one"
