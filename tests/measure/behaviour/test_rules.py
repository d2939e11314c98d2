"""The judgements of single behaviours, without a server."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.measure.behaviour import needles, registry
from q38.measure.behaviour.answer import Answer, Call, Piece
from q38.measure.behaviour.cancelled_stream import NEAR_TIE, compare
from q38.measure.behaviour.context_limit import Ruler
from q38.measure.behaviour.finite_logprobs import entry_faults
from q38.measure.behaviour.json_output import is_right, json_fault
from q38.measure.behaviour.repetition import repeated_tail
from q38.measure.behaviour.row import capability, protocol
from q38.measure.behaviour.scripts import REPLACEMENT, stream_faults
from q38.measure.behaviour.stop_strings import choose_stops, stop_faults
from q38.measure.behaviour.target import Target
from q38.measure.behaviour.tool_conversation import answer_faults, growth_faults
from q38.serving.client import Client


def answer(*pieces: str, finish: str = "length", **fields: Any) -> Answer:
    return Answer(finish, [Piece(float(i), piece) for i, piece in enumerate(pieces)], **fields)


class TestRepeatedTail:
    @given(st.text(min_size=1, max_size=40), st.integers(5, 60))
    def test_a_phrase_again_and_again_is_found_whatever_comes_before(self, phrase: str, times: int) -> None:
        tail = phrase * times
        found = repeated_tail("Once upon a time there was a mill. " + tail)
        if len(tail.rstrip()) >= 160 and phrase.strip() == phrase:
            assert found is not None
            assert len(found[0]) <= len(phrase) and found[1] >= times

    @given(st.integers(1, 300), st.integers())
    def test_words_in_random_order_are_not_a_loop(self, count: int, seed: int) -> None:
        order = random.Random(seed)
        words = [order.choice(["river", "stone", "lamp", "window", "bread", "salt"]) for _ in range(count)]
        assert repeated_tail(" ".join(words)) is None

    @pytest.mark.parametrize("text", ["", "ha" * 4, "-" * 150, "| a | b |\n" * 4])
    def test_short_repetitions_are_ordinary_text(self, text: str) -> None:
        assert repeated_tail(text) is None

    def test_a_loop_that_was_left_is_no_loop(self) -> None:
        assert repeated_tail("la " * 100 + "and then the song ended, and everybody went home.") is None


class TestScripts:
    def test_a_split_character_is_the_streams_fault(self) -> None:
        assert "replacement character" in stream_faults(answer("海", REPLACEMENT * 3), answer("海の"))[0]

    def test_bytes_that_are_no_text_are_the_models(self) -> None:
        text = f"海{REPLACEMENT}"
        assert stream_faults(answer(text), answer(text)) == []

    def test_another_answer_is_not_judged(self) -> None:
        assert stream_faults(answer("海a"), answer(f"山{REPLACEMENT}")) == []

    def test_surrogates_are_a_split_code_point(self) -> None:
        assert "surrogates" in stream_faults(answer("\ud83d", "\ude00"), answer("x"))[0]

    @given(st.text(), st.data())
    def test_a_stream_equal_to_the_whole_answer_has_no_fault(self, text: str, data: st.DataObject) -> None:
        cut = data.draw(st.integers(0, len(text)))
        assert stream_faults(answer(text[:cut], text[cut:]), answer(text)) == []


class TestStopStrings:
    @given(st.lists(st.text("abcdefgh ", min_size=1, max_size=6), min_size=4, max_size=20))
    def test_chosen_stops_are_in_the_text_and_not_before_it(self, pieces: list[str]) -> None:
        text = "".join(pieces)
        for stop in choose_stops(pieces):
            assert text.index(stop) > 0
            assert stop_faults(text[: text.index(stop)], "stop", stop, text) == []
            assert stop_faults(text, "length", stop, text) == ["the stop string is in the text"]

    def test_one_of_the_stops_lies_across_two_pieces(self) -> None:
        pieces = ["The light", "house stands", " on a cliff", " by the sea."]
        text = "".join(pieces)
        borders = [len(text.partition(piece)[0]) for piece in pieces[1:]]
        starts = [text.index(stop) for stop in choose_stops(pieces)]
        assert any(start < border < start + 4 for start in starts for border in borders)

    def test_a_stop_string_that_began_to_show_is_a_fault(self) -> None:
        faults = stop_faults("The light ho", "stop", "house", "The light house stands")
        assert "goes on into the stop string" in faults[0]

    def test_a_wrong_finish_reason_is_a_fault(self) -> None:
        faults = stop_faults("The light ", "length", "house", "The light house stands")
        assert "finish reason 'length'" in faults[0]

    def test_another_answer_without_the_stop_string_has_no_fault(self) -> None:
        assert stop_faults("A lamp on a rock", "length", "house", "The light house stands") == []

    def test_a_stop_string_that_the_server_cannot_see_is_not_taken(self) -> None:
        pieces = ["The light", "house stands", " on a cliff", " by the sea."]
        searched = "The light<hidden>house stands on a cliff by the sea."
        seen = choose_stops(pieces, searched)
        assert seen and all(stop in searched for stop in seen)
        assert choose_stops(pieces, "nothing of it") == []

    def test_a_short_answer_has_no_place_to_stop(self) -> None:
        assert choose_stops(["ab"]) == []


class TestJson:
    @pytest.mark.parametrize("text", ['{"city": "Paris", "letters": 5}', "{}", ' {"a": [1, 2]}\n'])
    def test_an_object_passes(self, text: str) -> None:
        assert json_fault(answer(text, finish="stop")) is None

    @pytest.mark.parametrize("text", ["", "Paris", "[1]", '{"city": "Par', "```json\n{}\n```"])
    def test_a_finished_answer_that_is_no_object_fails(self, text: str) -> None:
        assert json_fault(answer(text, finish="stop"))

    @given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.integers())), st.data())
    def test_every_beginning_of_an_object_may_be_cut(
        self, value: dict[str, Any], data: st.DataObject
    ) -> None:
        import json

        text = json.dumps(value)
        cut = data.draw(st.integers(0, len(text)))
        assert json_fault(answer(text[:cut], finish="length")) is None

    @pytest.mark.parametrize("text", ["Paris is", "[1, 2", '{"a" 1'])
    def test_a_cut_answer_that_never_was_json_fails(self, text: str) -> None:
        assert json_fault(answer(text, finish="length"))

    def test_the_right_content_is_told_from_the_wrong(self) -> None:
        assert is_right('{"city": "Paris", "letters": 5}')
        assert not is_right('{"city": "Paris", "letters": 6}')
        assert not is_right("Paris, 5")


def logprobs(*values: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"token": token, "logprob": value} for token, value in values]


class TestRepeatedAnswer:
    def test_the_same_text_passes(self) -> None:
        assert compare(answer("ab"), answer("ab"))[0] is None

    @pytest.mark.parametrize(("gap", "passed"), [(NEAR_TIE / 2, True), (NEAR_TIE * 3, False)])
    def test_answers_may_part_at_a_near_tie_only(self, gap: float, passed: bool) -> None:
        one = answer("ab", logprobs=logprobs(("a", -0.1), ("b", -1.0)))
        other = answer("ac", logprobs=logprobs(("a", -0.1), ("c", -1.0 - gap)))
        fault, note = compare(one, other)
        assert (fault is None) is passed
        assert "token 1" in (fault or note)

    @pytest.mark.parametrize(("text", "passed"), [("The bread rises", True), ("Salt", False)])
    def test_without_log_probabilities_half_must_be_equal(self, text: str, passed: bool) -> None:
        assert (compare(answer("The bread is baked"), answer(text))[0] is None) is passed


class TestLogprobs:
    @pytest.mark.parametrize(
        ("entry", "word"),
        [
            ({"logprob": float("nan")}, "nan"),
            ({"logprob": float("-inf")}, "-inf"),
            ({"logprob": None}, "None"),
            ({"logprob": 0.5}, "0.5"),
            ({"logprob": -1.0, "top_logprobs": [{"logprob": float("nan")}]}, "nan"),
            ({"logprob": -1.0, "top_logprobs": [{"logprob": -0.5}]}, "greedy choice"),
            ({"logprob": -0.1, "top_logprobs": [{"logprob": -0.1}, {"logprob": -0.2}]}, "more than one"),
        ],
    )
    def test_a_wrong_entry_is_named(self, entry: dict[str, Any], word: str) -> None:
        assert word in entry_faults(entry)[0]

    def test_a_right_one_passes(self) -> None:
        top = [{"logprob": -0.5}, {"logprob": -1.5}]
        assert entry_faults({"logprob": -0.5, "top_logprobs": top}) == []
        assert entry_faults({"logprob": 0.0}) == []


class TestTools:
    def good(self, **fields: Any) -> Answer:
        return Answer("tool_calls", [], [Call("a", "f", "{}")], {"prompt_tokens": 3}, **fields)

    def test_a_good_call_passes(self) -> None:
        assert answer_faults(self.good()) == []

    @pytest.mark.parametrize(
        ("calls", "word"),
        [
            ([], "without a call"),
            ([Call("a", "", "{}")], "without a name"),
            ([Call("", "f", "{}")], "without a id"),
            ([Call("a", "f", "{")], "no JSON object"),
            ([Call("a", "f", "[1]")], "no JSON object"),
            ([Call("a", "f", "{}"), Call("a", "g", "{}")], "one id"),
        ],
    )
    def test_a_broken_call_is_named(self, calls: list[Call], word: str) -> None:
        broken = self.good()
        broken.calls = calls
        assert word in answer_faults(broken)[0]

    def test_an_unknown_finish_reason_is_a_fault(self) -> None:
        assert "'abort'" in answer_faults(Answer("abort", usage={"prompt_tokens": 1}))[0]

    def test_prompts_must_grow(self) -> None:
        assert growth_faults([Answer(usage={"prompt_tokens": n}) for n in (5, 9, 12)]) == []
        assert growth_faults([Answer(usage={"prompt_tokens": n}) for n in (5, 9, 9)])


@given(st.integers(0, 60), st.integers(1, 3), st.integers(1, 10**6))
def test_a_ruler_gives_the_fewest_units_that_reach_a_length(overhead: int, rate: int, tokens: int) -> None:
    units = Ruler(float(overhead), float(rate)).units(tokens)
    assert units >= 1 and overhead + units * rate >= tokens
    assert units == 1 or overhead + (units - 1) * rate < tokens


class TestRows:
    def test_a_capability_that_is_not_judged_is_no_pass(self) -> None:
        for found in (True, False):
            row = capability("x", found, judged=False)
            assert row.check.passed is None and "recorded" in row.check.note
        assert capability("x", True, judged=True).check.passed is True
        assert capability("x", False, judged=True).check.passed is False

    def test_the_first_fault_is_the_note(self) -> None:
        check = protocol("x", ["first", "second"]).check
        assert (check.passed, check.note, len(check.faults)) == (False, "first", 2)


class TestRegistry:
    def names(self, **options: Any) -> list[str]:
        return [behaviour.name for behaviour in registry.choose(registry.Options(**options))]

    def test_everything_but_needles_runs_by_default(self) -> None:
        assert set(self.names()) == set(registry.NAMES) - {registry.NEEDLES}

    def test_needles_run_at_each_length(self) -> None:
        assert self.names(needles=[64, 128], only=["needles"]) == ["needles-64", "needles-128"]

    def test_skip_wins_over_only(self) -> None:
        assert self.names(only=["one-token", "scripts"], skip=["scripts"]) == ["one-token"]

    @pytest.mark.parametrize(
        "options",
        [
            {"only": ["speed"]},
            {"skip": ["speed"]},
            {"only": ["scripts"], "skip": ["scripts"]},
            {"only": ["needles"]},
            {"needles": [0]},
            {"depths": [1.5]},
            {"depths": []},
            {"long_prompt": 0},
            {"max_nll": 0.0},
        ],
        ids=str,
    )
    def test_senseless_choices_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(InputError):
            self.names(**options)


class TestNeedles:
    @given(st.integers(1, 10), st.integers(0, 5))
    def test_places_and_codes_are_all_different(self, count: int, seed: int) -> None:
        notes = needles.make_notes(count, random.Random(seed))
        assert len(set(notes)) == len(set(notes.values())) == count
        assert all(len(code) == 6 for code in notes.values())

    @settings(max_examples=20)
    @given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(2000, 6000))
    def test_each_note_lies_at_its_depth_and_the_question_is_last(
        self, depths: list[float], length: int
    ) -> None:
        depths = sorted(depths)
        with Client("http://127.0.0.1:1") as client:
            target = Target(client, "m")
            notes = needles.make_notes(len(depths), random.Random(0))
            prompt = needles.build(target, length, notes, depths)
        assert abs(target.estimate(prompt) - length) <= 0.2 * length
        places = [prompt.index(f"the code of the {place} is {code}.") for place, code in notes.items()]
        assert places == sorted(places)
        assert all(abs(at / len(prompt) - depth) < 0.25 for at, depth in zip(places, depths, strict=True))
        assert prompt.endswith(f"{', '.join(notes)}.")
