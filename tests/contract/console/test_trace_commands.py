"""`tidemill trace`, `step` and `timeline` on a run whose every number was written down before."""

import json

import pytest

from tests.support.histories import DIGESTS, commits, write_small_run
from tests.support.numbered import append_numbered
from tests.support.traces import problems_of
from tests.support.trajectories import make_trajectory
from tidemill.common.errors import ConfigError
from tidemill.common.history.records import STAGES, SampleFacts
from tidemill.common.wire.messages import Score, ScoreStatus
from tidemill.services.console.records.timeline import Stretch, Trace

HOSTILE = "[bold red]\x1b[2J\u202e"


@pytest.fixture(autouse=True)
def small_run(act, keys):
    """Ticket 3 has a second score, ticket 7 waits for more of everything."""
    again = Score(ticket=3, index=0, status=ScoreStatus.OK, value=9.0, worker="reward-late")
    tried = Score(
        ticket=7, index=0, status=ScoreStatus.OK, value=1.0, attempts=2, worker="reward-0", latency_s=3.5,
        tries=(("judge", 2.0, 0.0, f"HTTP 429 {HOSTILE}"), ("judge", 1.0, 0.5, "")),
    )  # fmt: skip
    waiting = [make_trajectory(7, index, group_size=4, text=HOSTILE, worker=HOSTILE) for index in (0, 1)]
    act(lambda broker: write_small_run(broker, keys, again, tried, *waiting))


class TestTrace:
    def test_a_trained_sample_leads_to_its_step_micro_batch_and_version(self, tidemill):
        tree = json.loads(tidemill("trace", "4.1", "--json").output)
        (sample,) = tree["samples"]
        assert tree["commit"]["step"] == 1 and tree["is_trained"]
        assert sample["places"] == [{"mini_batch": 0, "micro_batch": 1, "position": 1}]
        assert (sample["advantage"], sample["score"]["value"]) == (1.0, 1.0)
        assert tree["commit"]["digest"] == tree["manifest"]["digest"] == DIGESTS[2]

    def test_each_version_is_shown_with_the_tokens_it_made(self, tidemill):
        shown = tidemill("trace", "4.1").output
        assert "0 made tokens 0 to 1" in shown and "1 made tokens 2 to 2" in shown
        assert "the judge read 4.1" in shown and "completion 1 of ticket 4" in shown
        assert "mini 0, micro 1" in shown and "1.0 s from the ticket to the start of its group" in shown

    def test_a_group_is_shown_with_its_rewards_and_advantages_side_by_side(self, tidemill):
        shown = tidemill("trace", "3").output
        assert "trained in step 1, which made version 2" in shown
        for expected in ("3.0", "3.1", "0.25", "0.75", "rollout-1", "completion 0 of ticket 3"):
            assert expected in shown

    def test_advantages_stay_with_their_samples_where_one_was_left_out(self, tidemill):
        samples = json.loads(tidemill("trace", "1", "--json").output)["samples"]
        assert [(s["advantage"], s["left_out"]) for s in samples] == [(0.0, ""), (None, "failed_score")]
        assert "left out of step 0: failed_score" in tidemill("trace", "1.1").output
        assert "no answer within 5 s" in tidemill("trace", "1.1").output

    def test_a_dropped_group_leads_to_the_ticket_that_replaced_it_and_back(self, tidemill):
        tree = json.loads(tidemill("trace", "2", "--json").output)
        assert (tree["is_trained"], tree["dropped_as"], tree["replaced_by"]) == (False, "zero_variance", 4)
        shown = tidemill("trace", "2").output
        assert "dropped before step 1: zero_variance" in shown and "replaced by" in shown
        assert "it could not be read" in shown, "its dead letter"
        assert "ticket 2" in tidemill("trace", "4").output

    def test_the_first_score_counts_and_later_ones_are_named(self, tidemill):
        tree = json.loads(tidemill("trace", "3.0", "--json").output)
        assert tree["samples"][0]["score"]["value"] == 0.25
        assert tree["samples"][0]["later_scores"][0]["value"] == 9.0
        assert "not counted: 9 from reward-late" in tidemill("trace", "3.0").output

    def test_every_attempt_at_a_score_is_shown(self, tidemill):
        shown = tidemill("trace", "7.0").output
        assert "2.0 s: HTTP 429" in shown and "1.0 s, after a pause of 500 ms: answered" in shown
        assert "no step has trained on it: 2 of 4 samples generated, 1 scored" in shown

    def test_what_models_and_servers_say_does_nothing(self, tidemill):
        for what in ("7", "7.0", "7.1"):
            shown = tidemill("trace", what).output
            assert "[bold red]" in shown and "\x1b" not in shown and "\u202e" not in shown

    @pytest.mark.parametrize(
        ("what", "words"),
        [
            ("99", "knows no ticket 99 of the lane train: prompts has tickets 0 to 4"),
            ("3.7", "ticket 3 has no sample 7 in the streams; it has 0, 1"),
            ("x.1", "is no ticket"),
        ],
    )
    def test_what_is_not_there_is_a_plain_error(self, tidemill, what, words):
        with pytest.raises(ConfigError) as caught:
            tidemill("trace", what)
        assert words in str(caught.value) and caught.value.exit_code == 2


class TestStep:
    def test_what_went_in_adds_up(self, tidemill):
        tree = json.loads(tidemill("step", "1", "--json").output)
        assert [group["ticket"] for group in tree["groups"]] == [3, 4]
        rewards = [[sample["reward"] for sample in group["samples"]] for group in tree["groups"]]
        assert rewards == [[0.25, 0.75], [-1.0, 1.0]]
        assert tree["commit"]["dropped"] == [[2, -1, "zero_variance"]]
        assert [batch["keys"] for batch in tree["micro_batches"]] == [[[4, 0], [3, 0]], [[3, 1], [4, 1]]]
        assert [batch["num_tokens"] for batch in tree["micro_batches"]] == [6, 6]

    def test_the_stages_of_a_sample_follow_each_other_until_the_commit(self, tidemill):
        tree = json.loads(tidemill("step", "0", "--json").output)
        sample = tree["groups"][1]["samples"][0]
        assert sample["key"] == [1, 0]
        assert list(sample["stages_s"]) == list(STAGES)
        assert list(sample["stages_s"].values()) == pytest.approx([1.0, 2.0, 0.3, 0.2, 6.0], abs=1e-5)

    def test_it_says_where_the_time_went_and_what_came_out(self, tidemill):
        shown = tidemill("step", "1").output
        for expected in ("version 1 → 2", "wait groups", "60%", DIGESTS[2], "zero_variance: 1 group (2)"):
            assert expected in shown
        assert "4.1, 7.5 s after the step began: queued 1.0 s, generated 3.0 s" in shown
        assert "failed_score: 1 sample (1.1)" in tidemill("step", "0").output

    def test_a_group_whose_advantages_go_against_its_rewards_is_pointed_at(self, tidemill, act, keys):
        advantages = {"3": [1.0, -1.0], "4": [-1.0, 1.0]}
        fields = {"step": 2, "version": 3, "passes": 3, "advantages": advantages}
        flipped = commits()[1].model_copy(update=fields)
        act(lambda broker: append_numbered(broker, keys.commits, [(2, flipped)]))
        for step, reversed_groups in (("1", []), ("2", [3])):
            assert json.loads(tidemill("step", step, "--json").output)["reversed_groups"] == reversed_groups
        shown = tidemill("step", "2").output
        assert "ticket 3: its advantages fall where its rewards rise" in shown and "3 times over" in shown
        assert "times over" not in tidemill("step", "1").output

    def test_a_step_that_is_not_there_is_a_plain_error(self, tidemill):
        with pytest.raises(ConfigError, match="no commit of step 7: it has steps 0 to 1, counted from 0"):
            tidemill("step", "7")


class TestTimeline:
    def test_the_file_keeps_the_rules_of_its_format(self, tidemill, tmp_path):
        file = tmp_path / "trace.json"
        shown = tidemill("timeline", "--from-step", "0", "--to-step", "1", "-o", str(file)).output
        assert "trace.json: steps 0 to 1" in shown and "ui.perfetto.dev" in shown
        tree = json.loads(file.read_text())
        assert problems_of(tree["traceEvents"]) == []
        names = {event["name"] for event in tree["traceEvents"] if event["ph"] == "X"}
        assert {"step 0", "step 1", "4.1", "ticket 3"} <= names
        assert "7.0" in names, "what was under way is drawn too, though no step has trained on it"

    def test_the_records_are_not_put_into_words_as_the_command_ends(self, tidemill, tmp_path, monkeypatch):
        asked: list[object] = []
        for kind in (Trace, Stretch, SampleFacts):
            monkeypatch.setattr(kind, "__repr__", lambda record: str(asked.append(record)))
        tidemill("timeline", "--from-step", "0", "--to-step", "1", "-o", str(tmp_path / "trace.json"))
        assert asked == []

    def test_a_stretch_begins_with_the_first_of_its_own_tickets(self, tidemill, tmp_path):
        file = tmp_path / "trace.json"
        tidemill("timeline", "--from-step", "1", "--to-step", "9", "-o", str(file))
        names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
        assert "step 1" in names and "step 0" not in names and "0.0" not in names

    def test_mistakes_are_answered_in_plain_words(self, tidemill, tmp_path):
        for first, last, file, words in (
            ("5", "9", "a.json", "has no commit of steps 5 to 9"),
            ("1", "0", "a.json", "--from-step 1 is after --to-step 0"),
            ("0", "1", "nowhere/a.json", "in a folder that exists"),
        ):
            with pytest.raises(ConfigError, match=words):
                tidemill("timeline", "--from-step", first, "--to-step", last, "-o", str(tmp_path / file))
