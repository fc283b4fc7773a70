"""Which complete groups a step takes, in both batch orders.

`in_order`: exactly the groups of the step's own tickets, in the order in which they complete.
`as_ready`: complete groups, oldest ticket first, as long as every other outstanding group can still be
trained before it becomes too old. A group whose oldest token has version u must be trained by step u + k
(its deadline). Where the groups due by some step h fill all places up to h, only they are eligible:
earliest-deadline-first scheduling, which waits for slow groups instead of dropping them.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from services.trainer.intake import PendingGroup


def select_groups(
    groups: Mapping[int, PendingGroup],
    complete: Sequence[int],
    *,
    order: Literal["in_order", "as_ready"],
    step: int,
    places: int,
    groups_per_step: int,
    max_staleness: int,
) -> list[int]:
    """Tickets of complete groups that `step` may train now, at most `places` of them."""
    if order == "in_order":
        return [ticket for ticket in complete if groups[ticket].step == step][:places]
    deadlines = {
        ticket: group.oldest_version + max_staleness for ticket, group in groups.items() if not group.is_taken
    }
    horizons = range(step, step + max_staleness + 1)
    due = {h: sum(deadline <= h for deadline in deadlines.values()) for h in horizons}
    capacity = {h: places + (h - step) * groups_per_step for h in horizons}
    chosen: list[int] = []
    waiting = sorted(complete)
    while len(chosen) < places:
        tight = next((h for h in horizons if due[h] >= capacity[h]), None)
        eligible = [ticket for ticket in waiting if tight is None or deadlines[ticket] <= tight]
        if not eligible:
            break
        chosen.append(eligible[0])
        waiting.remove(eligible[0])
        for h in horizons:
            capacity[h] -= 1
            due[h] -= deadlines[eligible[0]] <= h
    return chosen
