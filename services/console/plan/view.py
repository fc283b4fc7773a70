"""Prints a plan: the times of the stages, the formulas with their numbers, and what the run needs."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.console.plan.sizing import (
    HEAD_ROOM,
    Plan,
    Workers,
    archive_backlog,
    disk_bytes,
    least_step,
    limit_of_scores,
    records_held,
    redis_bytes,
    slowest_other,
    step_time,
    time_for_scores,
)
from services.console.text.formats import NOTHING, plural, short, size
from services.console.text.tables import listing


def print_plan(console: Console, plan: Plan) -> None:
    """For people."""
    console.print(Text.assemble(("times  ", "bold"), plan.times.source), soft_wrap=True)
    console.print()
    console.print(_stages(plan))
    console.print(_verdict(plan), soft_wrap=True)
    console.print()
    needs = Table.grid(padding=(0, 2))
    needs.add_column(style="bold", no_wrap=True)
    needs.add_column(overflow="fold")
    for name, text in _needs(plan):
        needs.add_row(name, text)
    console.print(needs)


def _stages(plan: Plan) -> Table:
    now, needed, more = plan.step(plan.now), plan.step(plan.needed), plan.one_more
    titles = ("stage", "workers", "seconds", "needed", "seconds", "step with one more")
    table = listing(titles, titles[1:])
    for role in ("rollout", "reward"):
        table.add_row(
            role,
            str(getattr(plan.now, role)),
            short(getattr(now, f"{role}_s")),
            str(getattr(plan.needed, role)),
            short(getattr(needed, f"{role}_s")),
            f"{short(more[role].step_s)} s",
        )
    table.add_row("trainer", "1", short(now.trainer_s), "1", short(needed.trainer_s), NOTHING)
    table.add_row("Redis", "1", short(now.redis_s), "1", short(needed.redis_s), NOTHING)
    table.add_row("staleness", "", short(now.way_s), "", short(needed.way_s), NOTHING)
    table.add_row(Text("a step", "bold"), "", short(now.step_s), "", short(needed.step_s), NOTHING)
    if plan.times.step_s:
        table.add_row("  as measured", "", short(plan.times.step_s), "", "", "")
    return table


def _verdict(plan: Plan) -> Text:
    if plan.verdict is not None:
        return Text.assemble(("slowest  ", "bold magenta"), f"{plan.verdict.text}. {plan.verdict.advice}")
    words = {
        "staleness": "no stage is: tickets take longer on their way than max_staleness allows. Raise "
        "trainer.max_staleness, or make generation or scores faster",
        "trainer": "the trainer; more workers would not help",
    }
    return Text.assemble(("slowest  ", "bold magenta"), words.get(plan.bottleneck, plan.bottleneck))


def _needs(plan: Plan) -> list[tuple[str, str]]:
    config, times = plan.config, plan.times
    lines = [("rollout", _rollout(plan)), ("reward", _reward(plan))]
    if limit := _limit(plan):
        lines.append(("", limit))
    lines.append(("staleness", _staleness(plan)))
    memory = redis_bytes(config, times.record_bytes)
    waiting = archive_backlog(config, times.record_bytes)
    backlog = f"; {size(waiting)} that wait for the archive" if waiting else ""
    each = f"{size(times.record_bytes)} each" if times.record_bytes else "of full length"
    lines.append(
        (
            "Redis",
            f"{size(memory)}: {records_held(config):,} trajectories and scores, {each}, and the commits of "
            f"{config.trainer.steps:,} steps{backlog}. maxmemory of at least {size(2 * memory)}",
        )
    )
    disk = disk_bytes(config, times, plan.model_bytes)
    parts = ", ".join(f"{name} {size(count)}" for name, count in disk.items() if count)
    lines.append(("disk", f"{size(sum(disk.values()))}: {parts}" if parts else "not known before a run"))
    return lines


def _rollout(plan: Plan) -> str:
    times, least_s = plan.times, least_step(plan.config, plan.times)
    work = f"{times.completions:,.0f} completions x {times.completion_tokens:,.0f} tokens"
    speed = f"{times.rollout_tokens_per_s:,.0f} tok/s x {short(least_s)} s that a step takes anyhow"
    return f"{plural(plan.needed.rollout, 'worker')}: {work} / ({speed})"


def _reward(plan: Plan) -> str:
    config, times, now = plan.config, plan.times, plan.now.rollout
    speed = f"{short(times.scores_per_s)} scores/s x {short(time_for_scores(config, times, now))} s"
    tail = f"mean {short(times.score_s)} s, 95 % below {short(times.score_p95_s)} s"
    return (
        f"{plural(plan.needed.reward, 'worker')}: {times.completions:,.0f} scores / ({speed}), where the "
        f"slowest other takes {short(slowest_other(config, times, now))} s, less {HEAD_ROOM:.0%} head room "
        f"and the tail of scores ({tail})"
    )


def _limit(plan: Plan) -> str:
    """Where the run's limits allow fewer scores than are needed: workers cannot help."""
    name, per_s = limit_of_scores(plan.config, plan.times)
    wanted = plan.times.completions / max(1e-9, slowest_other(plan.config, plan.times, plan.now.rollout))
    if not name or per_s >= wanted:
        return ""
    return (
        f"the limits of {name} allow {per_s:.3g} scores/s, {wanted:.3g} are needed: raise them "
        f"(reward.rewards.{name}.{plan.config.reward.named[name].kind}.limits); more workers would not help"
    )


def _staleness(plan: Plan) -> str:
    k, times = plan.config.trainer.max_staleness, plan.times
    if k == 0:
        alone = step_time(plan.config, times, Workers(max(1, plan.now.rollout), max(1, plan.now.reward)))
        overlapped_s = max(alone.rollout_s, alone.reward_s, times.trainer_s + times.redis_s)
        return (
            f"max_staleness 0: the stages take turns. With 1 they overlap, and a step would take "
            f"{short(overlapped_s)} s at best"
        )
    way_s = times.generation_s + times.score_p95_s + times.trainer_s + times.redis_s
    return (
        f"max_staleness {k}: a ticket's way of {short(way_s)} s over {1 + k} steps: none is shorter than "
        f"{short(way_s / (1 + k))} s"
    )
