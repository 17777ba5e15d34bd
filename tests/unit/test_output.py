"""Seals of tickets; the dataclasses of output.py have no behaviour of their own."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ticket_faults import altered

from triptych.output import ECTicket, KVTicket, is_genuine, sealed
from triptych.transfer.ticket import Ticket

DATA = Ticket("e1", "ec", (3, 1), (7, 9), 4096, 5000, "0123456789abcdef", 30.0, {"shm": "a", "file": "b"}, "a" * 64)
EC = ECTicket("a" * 64, 16, 192, "float32", DATA, "d" * 64)
KV = KVTicket("r", 20, 16, 4096, "float32", DATA)


@pytest.mark.parametrize("secret", ["", "s3cret", "é" * 1000])
@pytest.mark.parametrize("ticket", [EC, KV], ids=["EC", "KV"])
def test_a_sealed_ticket_is_genuine_for_who_has_the_secret_also_after_a_trip_as_json(ticket: Any, secret: str) -> None:
    given_out = sealed(ticket, secret)
    arrived: Any = msgspec.json.decode(msgspec.json.encode(given_out), type=type(ticket))
    assert is_genuine(given_out, secret)
    assert is_genuine(arrived, secret)
    assert not is_genuine(arrived, secret + "!")
    assert not is_genuine(ticket, secret), "without a seal"
    assert msgspec.structs.replace(given_out, seal="") == ticket


@pytest.mark.parametrize("field", [{"lease_s": 20}, {"pages": [3, 1]}])
def test_what_looks_different_after_a_trip_as_json_is_sealed_as_it_arrives(field: dict[str, Any]) -> None:
    given_out = sealed(msgspec.structs.replace(EC, data=msgspec.structs.replace(DATA, **field)), "s")
    assert is_genuine(msgspec.json.decode(msgspec.json.encode(given_out), type=ECTicket), "s")
    assert is_genuine(given_out, "s")


@pytest.mark.parametrize("field", [{"lease_s": float("nan")}, {"pages": None}, {"planes": {"shm": 5}}])
def test_a_ticket_that_nobody_could_decode_is_not_given_out(field: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        sealed(msgspec.structs.replace(EC, data=msgspec.structs.replace(DATA, **field)), "s")


@pytest.mark.parametrize("key", ["", "a" * 63, "A" * 64, "../" + "a" * 61, "a" * 64 + "\n"])
def test_a_ticket_whose_key_is_no_digest_is_not_given_out(key: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        sealed(msgspec.structs.replace(EC, key=key), "s")


def test_the_order_in_which_planes_are_named_is_no_change() -> None:
    turned = msgspec.structs.replace(DATA, planes=dict(reversed(DATA.planes.items())))
    assert is_genuine(msgspec.structs.replace(sealed(EC, "s"), data=turned), "s")


@settings(max_examples=300, deadline=None)
@given(fault=st.one_of(altered(sealed(EC, "s")), altered(sealed(KV, "s"))))
def test_a_ticket_of_which_any_one_field_was_changed_is_not_genuine(fault: tuple[str, Any]) -> None:
    assert not is_genuine(fault[1], "s"), fault[0]
