"""The curriculum: what is left out, what comes more often, and from which commits."""

import json
from typing import Any

import numpy as np
import pytest

from tests.support.trajectories import make_commit
from tidemill.common.config.sources import CurriculumConfig
from tidemill.common.wire.messages import Commit, Outcome
from tidemill.services.trainer.batch.curriculum import Curriculum, Deck
from tidemill.services.trainer.batch.prompts import Prompt, PromptSource


def source(count: int, name: str = "", first_row: int = 0, shuffle: bool = False) -> PromptSource:
    rows = [first_row + 2 * i for i in range(count)]  # every other row was too long
    prompts = [Prompt(np.array([row], np.int32), "", "", None, {}, row, "", name) for row in rows]
    return PromptSource(prompts, 0, shuffle, name)


def make_deck(count: int, **config: Any) -> Deck:
    return Deck(source(count), CurriculumConfig(**({"focus": 0.0} | config)))


def draws(deck: Deck, count: int) -> list[int]:
    return [deck.draw() for _ in range(count)]


def commit(step: int, *outcomes: Outcome, dropped: tuple[int, ...] = ()) -> Commit:
    left_out = tuple((ticket, -1, "zero_variance") for ticket in dropped)
    return make_commit(step, groups=(), dropped=left_out, outcomes=outcomes)


class TestDeck:
    def test_what_is_always_or_never_solved_is_left_out_until_it_is_revisited(self):
        """Row 2 (place 1) is solved 9 of 10 times, row 6 (place 3) never, in epoch 1; both are back in 4."""
        deck = make_deck(4, revisit=3)
        assert draws(deck, 4) == [0, 1, 2, 3]
        deck.learn(2, 9, 10)
        deck.learn(6, 0, 10)
        assert draws(deck, 6) == [0, 2] * 3
        assert draws(deck, 4) == [0, 1, 2, 3]

    def test_bounds_are_the_config_s(self):
        deck = make_deck(4, easy=0.75, hard=0.25)
        for row, num_solved in ((0, 3), (2, 2), (4, 1), (6, 4)):
            deck.learn(row, num_solved, 4)
        assert draws(deck, 3) == [1, 1, 1]
        assert deck.shares() == {"easy": 0.5, "hard": 0.25, "between": 0.25, "untried": 0.0}

    def test_a_quarter_of_the_draws_goes_to_what_lies_between_the_one_that_waits_for_longest_first(self):
        """Draws 4, 8, 12 and 16 are those; the other twelve follow the order."""
        deck = make_deck(6, focus=0.25)
        for index in (4, 2):
            deck.learn(2 * index, 1, 2)
        drawn = draws(deck, 16)
        assert drawn[3::4] == [4, 2, 4, 2]
        del drawn[3::4]
        assert drawn == [0, 1, 2, 3, 4, 5] * 2

    def test_a_rate_remembers_half_of_what_it_was(self):
        """1.0, then 0.5 * 1.0 + 0.5 * 0.0, then 0.5 * 0.5 + 0.5 * 0.25."""
        deck = make_deck(2)
        for num_solved, rate in ((4, 1.0), (0, 0.5), (1, 0.375)):
            deck.learn(0, num_solved, 4)
            assert deck.tried[0].rate == rate

    def test_where_all_is_left_out_prompts_come_early_rather_than_not_at_all(self):
        deck = make_deck(3, revisit=100)
        for row in (0, 2, 4):
            deck.learn(row, 4, 4)
        assert draws(deck, 4) == [0, 1, 2, 0]

    def test_rows_that_were_too_long_and_groups_without_scores_say_nothing(self):
        deck = make_deck(3)
        for row, num_scored in ((1, 4), (99, 4), (0, 0)):
            deck.learn(row, 0, num_scored)
        assert not deck.tried


def reference(
    sources: int, rows: int, drawn: list[tuple[int, int]], commits: list[Commit], focus: int, revisit: int
) -> list[int]:
    """The rule once more, from the start for each ticket and as slowly as that is: (source, min_version) of
    each ticket -> its place. Rows in order, easy 0.9, hard 0, memory 0.5, one draw of `focus` for between."""
    result = []
    for number in range(len(drawn)):
        rates: dict[tuple[int, int], tuple[float, int]] = {}
        between: dict[int, list[int]] = {s: [] for s in range(sources)}
        position = [0] * sources
        count = [0] * sources
        applied = 0
        for which, min_version in drawn[: number + 1]:
            while applied < min(min_version, len(commits)):
                for name, row, solved, scored in commits[applied].outcomes:
                    s = int(name)
                    index = row // 2
                    new = solved / scored
                    new = (rates[s, index][0] + new) / 2 if (s, index) in rates else new
                    rates[s, index] = new, position[s] // rows
                    if 0 < new < 0.9 and index not in between[s]:
                        between[s].append(index)
                    elif not 0 < new < 0.9 and index in between[s]:
                        between[s].remove(index)
                applied += 1
            count[which] += 1
            if count[which] % focus == 0 and between[which]:
                index = between[which].pop(0)
                between[which].append(index)
                continue
            begun = position[which]
            for tried in range(begun, begun + rows):
                index = tried % rows
                rate, epoch = rates.get((which, index), (0.5, 0))
                if 0 < rate < 0.9 or tried // rows - epoch >= revisit:
                    position[which] = tried + 1
                    break
            else:
                index = begun % rows
                position[which] = begun + 1
        result.append(index)
    return result


class TestCurriculum:
    def make(self, sources: int = 2, rows: int = 5, **config: Any) -> Curriculum:
        named = [source(rows, str(number)) for number in range(sources)]
        return Curriculum(named, CurriculumConfig(**({"focus": 0.0} | config)))

    def test_an_outcome_counts_from_the_first_ticket_that_may_not_start_before_it_is_committed(self):
        """Step 0 is committed before ticket 1 is issued, and ticket 1 could have been issued before it."""
        curriculum = self.make(1, 3)
        assert curriculum.draw(0, 0, 0) == 0
        curriculum.take_commit(commit(0, ("0", 2, 4, 4)))
        assert curriculum.draw(1, 0, 0) == 1
        assert [curriculum.draw(number, 0, 1) for number in (2, 3, 4)] == [2, 0, 2]

    def test_a_replacement_for_an_earlier_step_sees_what_the_tickets_before_it_saw(self):
        curriculum = self.make(1, 3)
        curriculum.take_commit(commit(0, ("0", 0, 4, 4)))
        assert curriculum.draw(0, 0, 1) == 1
        assert curriculum.draw(1, 0, 0) == 2
        assert curriculum.draw(2, 0, 0) == 1

    def test_only_the_next_ticket_can_be_drawn(self):
        curriculum = self.make()
        assert (curriculum.draw(0, 1, 0), curriculum.draw(1, 1, 0)) == (0, 1)
        with pytest.raises(ValueError, match="ticket 7 cannot be drawn: the next one is 2"):
            curriculum.draw(7, 0, 0)

    def test_what_a_replaced_group_said_is_kept_until_a_commit_reports_it(self):
        curriculum = self.make()
        curriculum.unreported = {3: ("0", 0, 4, 4), 5: ("1", 2, 0, 4)}
        curriculum.take_commit(commit(0, ("0", 0, 4, 4), dropped=(3,)))
        assert curriculum.unreported == {5: ("1", 2, 0, 4)}

    def test_tickets_whose_commits_are_lost_stand_and_the_decks_draw_for_them_when_these_come_again(self):
        """Tickets 0 and 1 follow from nothing, 2 from a step that was lost; 3 takes the place of one while
        that step is trained again, after which rows 0 and 2 (places 0 and 1) are too easy."""
        curriculum = self.make(1, 5)
        for number, version in ((0, 0), (1, 0), (2, 1)):
            curriculum.adopt(number, 0, version)
        assert curriculum.draw(3, 0, 0) == 3
        again = self.make(1, 5)
        again.restore(json.loads(json.dumps(curriculum.state())))
        assert again.state() == curriculum.state()
        again.take_commit(commit(0, ("0", 0, 4, 4), ("0", 2, 4, 4)))
        assert [again.draw(number, 0, 1) for number in (4, 5, 6)] == [4, 2, 3]

    @pytest.mark.parametrize("seed", range(4))
    def test_tickets_adopted_without_their_commits_change_no_prompt_after_these_are_made_again(self, seed):
        rng = np.random.default_rng(seed)
        commits = []
        for step in range(12):
            outcomes = [("0", 2 * int(rng.integers(0, 7)), int(rng.choice([0, 4])), 4) for _ in range(3)]
            commits.append(commit(step, *outcomes))
        tickets = [(step, max(0, step - 2)) for step in range(12) for _ in range(3)]
        expected = reference(1, 7, [(0, version) for _, version in tickets], commits, focus=4, revisit=3)
        curriculum = self.make(1, 7, focus=0.25, revisit=3)
        for number in range(15):  # those of step 4 follow from steps 0 and 1, of which none stands
            curriculum.adopt(number, 0, tickets[number][1])
        for number, (step, version) in enumerate(tickets):
            if number >= 15:
                assert curriculum.draw(number, 0, version) == expected[number], number
            if number % 3 == 2:
                curriculum.take_commit(commits[step])

    @pytest.mark.parametrize("seed", range(6))
    def test_it_agrees_with_the_rule_written_down_once_more_also_when_it_is_resumed_anywhere(self, seed):
        rng = np.random.default_rng(seed)
        steps = 25
        staleness = int(rng.integers(0, 3))
        groups = 4
        commits = []
        for step in range(steps):
            outcomes = []
            for _ in range(groups):
                name = str(rng.integers(0, 2))
                row = 2 * int(rng.integers(0, 5))
                outcomes.append((name, row, int(rng.choice([0, 0, 2, 4])), 4))
            commits.append(commit(step, *outcomes))
        tickets = [
            (int(rng.integers(0, 2)), max(0, step - staleness))
            for step in range(steps)
            for _ in range(groups)
        ]
        tickets[10:10] = [(0, 0)]  # in place of one of an early step
        expected = reference(2, 5, tickets, commits, focus=4, revisit=3)
        curriculum = self.make(focus=0.25, revisit=3)
        num_applied = 0
        for number, (which, min_version) in enumerate(tickets):
            while num_applied < min_version:
                curriculum.take_commit(commits[num_applied])
                num_applied += 1
            if rng.random() < 0.2:
                again = self.make(focus=0.25, revisit=3)
                again.restore(json.loads(json.dumps(curriculum.state())))
                assert again.state() == curriculum.state()
                curriculum = again
            assert curriculum.draw(number, which, min_version) == expected[number], number
