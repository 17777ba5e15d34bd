from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.media.key import media_key

FIELDS: dict[str, bytes | str] = {
    "modality": "image",
    "data": b"bytes",
    "settings": b"{}",
    "layout": b"",
    "weights_digest": "ab",
    "dtype": "float32",
    "tenant_salt": "",
}


def key(fields: dict[str, bytes | str]) -> str:
    return media_key(**fields)  # type: ignore[arg-type]


def test_a_key_is_64_hex_digits_and_always_the_same() -> None:
    assert len(key(FIELDS)) == 64
    assert set(key(FIELDS)) <= set("0123456789abcdef")
    assert key(FIELDS) == key(dict(FIELDS))


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_changes_the_key(name: str) -> None:
    value = FIELDS[name]
    changed = value + "x" if isinstance(value, str) else value + b"x"
    assert key({**FIELDS, name: changed}) != key(FIELDS)


@given(values=st.lists(st.text("ab\0", max_size=4), min_size=7, max_size=7), data=st.data())
def test_bytes_that_shift_between_fields_change_the_key(values: list[str], data: st.DataObject) -> None:
    """Cut the same concatenation elsewhere."""
    joined = "".join(values)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(joined)), min_size=6, max_size=6))), len(joined)]
    other = [joined[start:end] for start, end in pairwise(cuts)]

    def to_fields(strings: list[str]) -> dict[str, bytes | str]:
        return {
            name: string.encode() if isinstance(FIELDS[name], bytes) else string
            for name, string in zip(FIELDS, strings, strict=True)
        }

    assert (key(to_fields(values)) == key(to_fields(other))) == (values == other)
