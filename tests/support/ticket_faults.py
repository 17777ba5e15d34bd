"""Everything that can be wrong with one field of a ticket."""

import math
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st

from triptych.output import ECTicket, KVTicket

T = TypeVar("T", ECTicket, KVTicket)

_INTS = st.one_of(st.integers(-3, 100), st.sampled_from([2**31, 2**63, 2**64, 2**70, -(2**63), 10**30]))
_NAMES = st.one_of(
    st.text(max_size=80), st.sampled_from(["a" * 64, "b" * 64, "../" * 21 + "a", "float16", "kv", "e9", "x" * 10_000])
)
_PAGES = st.one_of(st.lists(_INTS, max_size=6).map(tuple), st.just((3,) * 1000))
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "key": _NAMES,
    "request_id": _NAMES,
    "num_rows": _INTS,
    "num_tokens": _INTS,
    "row_width": _INTS,
    "block_size": _INTS,
    "block_nbytes": _INTS,
    "dtype": _NAMES,
    "model": _NAMES,
    "seal": _NAMES,
    "producer": _NAMES,
    "arena": _NAMES,
    "pages": _PAGES,
    "generations": _PAGES,
    "page_nbytes": _INTS,
    "nbytes": _INTS,
    "checksum": _NAMES,
    "page_checksums": st.lists(_NAMES, max_size=4).map(tuple),
    "first_block": _INTS,
    "lease_s": st.one_of(st.floats(), st.sampled_from([-1.0, math.nan, math.inf, -math.inf])),
    "planes": st.dictionaries(st.sampled_from(["shm", "file", "fake", "ec-file", "nixl"]), _NAMES, max_size=3),
    "subject": _NAMES,
}


def _near(truth: Any) -> list[Any]:
    """What is next to the truth: one page, one byte, one generation off, or one letter."""
    match truth:
        case int():
            return [truth - 1, truth + 1, -truth]
        case str():
            return ["", truth[:-1], truth + "0", truth.upper(), truth[::-1]]
        case (int(), *_):
            return [truth[:-1], (*truth, truth[-1] + 1), truth[::-1], (truth[0],) * len(truth), tuple(each + 1 for each in truth)]
        case _:
            return []


@st.composite
def altered(draw: st.DrawFn, ticket: T) -> tuple[str, T]:
    """The ticket with one field changed, its seal as it was; and the name of the field."""
    own = [name for name in ticket.__struct_fields__ if name != "data"]
    name = draw(st.sampled_from([*own, *ticket.data.__struct_fields__]))
    holder: Any = ticket if name in own else ticket.data
    truth = getattr(holder, name)
    near = _near(truth)
    values = st.one_of(st.sampled_from(near), _FIELDS[name]) if near else _FIELDS[name]
    value = draw(values.filter(lambda value: value != truth))
    changed = msgspec.structs.replace(holder, **{name: value})
    return name, changed if holder is ticket else msgspec.structs.replace(ticket, data=changed)
