"""Text as it comes, against the tokenizer's own decoding of everything at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from triptych.demo import CHECKPOINT
from triptych.router.detokenizer import Detokenizer
from triptych.router.prompt_tokenizer import PromptTokenizer

ORACLE = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
TOKENIZER = PromptTokenizer(CHECKPOINT)


def ids_of(text: str) -> list[int]:
    return ORACLE.encode(text, add_special_tokens=False).ids


def feed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    pieces: list[str] = []
    for id in ids:
        pieces.append(detokenizer.add(id))
        if detokenizer.is_stopped:
            return pieces
    return [*pieces, detokenizer.flush()]


@given(st.lists(st.integers(0, 1023), max_size=40))
@settings(max_examples=300, deadline=None)
def test_the_pieces_of_any_tokens_add_up_to_their_text(ids: list[int]) -> None:
    assert "".join(feed(Detokenizer(TOKENIZER), ids)) == ORACLE.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_no_piece_of_a_text_holds_half_a_character(text: str) -> None:
    pieces = feed(Detokenizer(TOKENIZER), ids_of(text))
    assert "".join(pieces) == ORACLE.decode(ids_of(text))
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_several_tokens_comes_with_its_last() -> None:
    ids = ids_of("漢")
    assert len(ids) == 3
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.add(id) for id in ids] == ["", "", "漢"]


@given(st.text("ab ", max_size=25), st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_the_text_ends_before_the_first_stop_string_and_no_part_of_it_was_sent(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(TOKENIZER, stops)
    sent = "".join(feed(detokenizer, ids_of(text)))
    found = [text.index(stop) for stop in stops if stop in text]
    assert detokenizer.is_stopped == bool(found)
    if not found:
        assert sent == text
        return
    # Token by token: a stop string that is complete sooner wins over one that begins sooner.
    first_complete = next(
        ORACLE.decode(ids_of(text)[:count])
        for count in range(1, len(ids_of(text)) + 1)
        if any(stop in ORACLE.decode(ids_of(text)[:count]) for stop in stops)
    )
    assert sent == first_complete[: min(first_complete.index(stop) for stop in stops if stop in first_complete)]


def test_what_may_become_a_stop_string_is_held_back_and_given_out_when_it_does_not() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["END"])
    ids = ids_of("E") + ids_of("N") + ids_of("x")
    assert [detokenizer.add(id) for id in ids] == ["", "", "ENx"]
    assert [detokenizer.add(id) for id in ids[:2]] == ["", ""]
    assert detokenizer.flush() == "EN"


@pytest.mark.parametrize(("min_tokens", "stopped"), [(0, True), (1, False)])
def test_stop_strings_within_the_least_number_of_tokens_do_not_count(min_tokens: int, stopped: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, ["E"], min_tokens)
    detokenizer.add(ids_of("E")[0])
    assert detokenizer.is_stopped == stopped


def test_special_tokens_are_left_out() -> None:
    assert "".join(feed(Detokenizer(TOKENIZER), [*ids_of("a"), 2, 1, *ids_of("b")])) == "ab"
