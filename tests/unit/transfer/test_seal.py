"""A seal holds for the fields and the secret that it was made with, and for no others."""

from itertools import pairwise

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from triptych.transfer.seal import is_sealed, seal_of

SECRET = "0123456789abcdef0123456789abcdef"
FIELDS = (b"e0", b"ec", bytes(range(64)), b"")

some_fields = st.lists(st.binary(max_size=20), max_size=5).map(tuple)


def test_a_seal_is_keyed_blake3_over_length_prefixed_fields() -> None:
    key = blake3(SECRET.encode(), derive_key_context="triptych cluster seal 1").digest()
    content = b"\2\0\0\0\0\0\0\0e0" + b"\2\0\0\0\0\0\0\0ec" + b"\x40\0\0\0\0\0\0\0" + bytes(range(64)) + bytes(8)
    assert seal_of(SECRET, *FIELDS) == blake3(content, key=key).hexdigest()[:32]


@pytest.mark.parametrize("secret", [SECRET, ""])
def test_a_seal_holds_for_what_it_was_made_of(secret: str) -> None:
    assert is_sealed(seal_of(secret, *FIELDS), secret, *FIELDS)


@pytest.mark.parametrize("secret", [SECRET, ""])
@given(some_fields, some_fields)
def test_other_fields_have_another_seal(secret: str, fields: tuple[bytes, ...], others: tuple[bytes, ...]) -> None:
    assert is_sealed(seal_of(secret, *fields), secret, *others) == (fields == others)


@pytest.mark.parametrize("place", range(len(FIELDS) - 1))
def test_one_changed_bit_of_any_field_breaks_the_seal(place: int) -> None:
    field = FIELDS[place]
    changed = (*FIELDS[:place], bytes([field[0] ^ 1]) + field[1:], *FIELDS[place + 1 :])
    assert not is_sealed(seal_of(SECRET, *FIELDS), SECRET, *changed)


def test_a_byte_that_shifts_from_one_field_to_the_next_breaks_the_seal() -> None:
    cuts = [seal_of(SECRET, b"abcd"[:cut], b"abcd"[cut:]) for cut in range(5)]
    assert len({*cuts, seal_of(SECRET, b"abcd")}) == 6


@pytest.mark.parametrize("other", ["", SECRET[:-1], SECRET + "0", SECRET.upper()])
def test_another_secret_gives_another_seal(other: str) -> None:
    assert not is_sealed(seal_of(other, *FIELDS), SECRET, *FIELDS)


@pytest.mark.parametrize("forged", ["", "0" * 32, "é" * 32, seal_of(SECRET, *FIELDS)[:-1], seal_of(SECRET, *FIELDS).upper()])
def test_what_is_no_seal_holds_for_nothing(forged: str) -> None:
    assert not is_sealed(forged, SECRET, *FIELDS)


def test_seals_are_short_and_of_one_form() -> None:
    seals = [seal_of(SECRET, bytes(length)) for length in range(20)]
    assert all(len(seal) == 32 and set(seal) <= set("0123456789abcdef") for seal in seals)
    assert all(seal != following for seal, following in pairwise(seals))
