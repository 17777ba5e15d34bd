"""What an engine counts: each fault under its reason, and what a healthy one does under no reason."""

import pytest
from engine_rig import Engine, item_of, make_engine

from triptych.engine.arithmetic_runner import Fabric
from triptych.errors import FailureReason
from triptych.output import ECTicket

CAT = item_of("cat", 5, 6)
PROMPT = list(range(20))


def reasons(counts: dict[str, int]) -> dict[str, int]:
    return {reason: count for reason, count in counts.items() if count}


def encoded_by(encoder: Engine, encode_id: str) -> ECTicket:
    encoder.encode(encode_id, CAT)
    encoder.run()
    ticket = encoder.encoded[encode_id].ticket
    assert ticket is not None
    return ticket


def test_an_item_that_is_published_again_is_counted_apart():
    encoder = make_engine("E")
    for name in ("first", "second", "third"):
        encoded_by(encoder, name)
    counters = encoder.core.counters
    assert (counters.items_encoded, counters.items_published, counters.items_republished) == (1, 1, 2)


def test_an_item_that_stays_is_not_counted_as_published():
    engine = make_engine("EP")
    engine.encode("stays", CAT, will_stay=True)
    engine.run()
    assert (engine.core.counters.items_encoded, engine.core.counters.items_published) == (1, 0)


@pytest.mark.parametrize("reason", FailureReason)
def test_a_load_that_fails_is_counted_under_its_reason_and_so_is_a_request_that_ends_by_it(reason: FailureReason):
    fabric = Fabric()
    encoder, engine = make_engine("E", fabric=fabric), make_engine("PD", fabric=fabric)
    fabric.failures[CAT.key] = reason
    engine.add("r", PROMPT, (CAT,))
    engine.core.announce(encoded_by(encoder, "e"))
    engine.run()
    counters = engine.core.counters
    assert reasons(counters.item_loads_failed) == {reason: 1}
    assert reasons(counters.requests_failed) == ({} if reason.is_retryable else {reason: 1})
    assert counters.items_loaded == 0


def test_each_call_to_encode_that_fails_is_counted_under_its_reason():
    engine = make_engine("E")
    for name in ("a", "b"):
        engine.encode(name, CAT)
    engine.encode("hangs", item_of("dog", 0, 6))
    engine.step()
    engine.core.scheduler.preparation_failed(CAT.key, "not a picture", FailureReason.BAD_MEDIA)
    engine.step()
    engine.clock.now += 10.0
    engine.step()
    assert reasons(engine.core.counters.encodes_failed) == {FailureReason.BAD_MEDIA: 2, FailureReason.TIMEOUT: 1}


def test_waits_and_leases_that_end_by_time_are_counted_and_those_that_end_well_are_not():
    fabric = Fabric()
    encoder, engine = make_engine("E", fabric=fabric, lease_s=5.0), make_engine("PD", fabric=fabric)
    engine.add("served", PROMPT, (CAT,))
    engine.core.announce(encoded_by(encoder, "lapses"))
    encoded_by(encoder, "is released")
    encoder.core.scheduler.release("is released")
    engine.run()
    engine.add("waits", PROMPT, (item_of("dog", 5, 6),))
    for each in (encoder, engine):
        each.clock.now += 10.0
        each.run()
    assert encoder.core.scheduler.num_leases_expired == 1
    assert engine.core.scheduler.num_item_waits_expired == 1
    assert reasons(engine.core.counters.requests_failed) == {FailureReason.TIMEOUT: 1}


def test_a_lease_of_kv_blocks_that_lapses_is_counted_as_well():
    engine = make_engine("P", lease_s=5.0)
    engine.add("r", PROMPT, hands_over=True)
    engine.run()
    engine.clock.now += 5.0
    engine.run()
    assert engine.core.scheduler.num_leases_expired == 1
