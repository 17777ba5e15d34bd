"""Blocks that leave their request: published under a lease, or written by a copy that outlives it."""

from engine_rig import TurnedClock

from triptych.engine.kv_connector import ActiveKVConnectorScheduler, KVConnectorScheduler
from triptych.output import EMPTY_KV_METADATA, KVLoad, KVSave, KVTicket
from triptych.transfer.ticket import Ticket

TICKET = KVTicket("p", 8, 4, 8, "float32", Ticket("p1", "kv", (0, 1), (0, 0), 8, 16, "", 5.0, {}))
NEXT = KVTicket("p", 16, 4, 8, "float32", TICKET.data, first_block=2)
LOAD, NEXT_LOAD = KVLoad("r", TICKET, (4, 5)), KVLoad("r", NEXT, (6, 7))


def active(clock: TurnedClock | None = None) -> KVConnectorScheduler:
    return ActiveKVConnectorScheduler(5.0, clock or TurnedClock())


def test_off_it_says_the_same_empty_orders_each_step():
    off = KVConnectorScheduler()
    assert off.plan() is off.plan() is EMPTY_KV_METADATA
    assert off.release("r") == off.expire() == off.end_load(LOAD.part) == ()
    assert not off.abandon_loads("r")
    assert not off.is_loading("r")
    assert not off.has_abandoned
    assert off.next_deadline() is None


def test_orders_are_given_once():
    kv = active()
    kv.start_load(LOAD)
    kv.save(KVSave("p", 8, (6, 7)))
    plan = kv.plan()
    assert [load.block_ids for load in plan.loads] == [(4, 5)]
    assert [(save.request_id, save.num_tokens) for save in plan.saves] == [("p", 8)]
    assert plan.lease_s == 5.0
    assert kv.plan() is EMPTY_KV_METADATA


def test_loads_that_were_not_ordered_yet_are_taken_back():
    kv = active()
    kv.start_load(LOAD)
    kv.start_load(NEXT_LOAD)
    assert kv.abandon_loads("r") == frozenset(), "nobody writes the blocks, so they are the caller's"
    assert kv.plan() is EMPTY_KV_METADATA


def test_blocks_of_an_abandoned_part_come_back_when_its_copy_has_ended_and_once():
    kv = active()
    kv.start_load(LOAD)
    kv.start_load(NEXT_LOAD)
    kv.plan()
    kv.start_load(KVLoad("s", TICKET, (8, 9)))
    kv.plan()
    assert kv.end_load(LOAD.part) == (), "its request is there and has them"
    assert kv.abandon_loads("r") == {6, 7}
    assert kv.is_loading("r"), "another load under this id must wait"
    assert kv.has_abandoned
    assert kv.end_load(("s", 0)) == ()
    assert kv.end_load(NEXT_LOAD.part) == (6, 7)
    assert kv.end_load(NEXT_LOAD.part) == ()
    assert not kv.is_loading("r")
    assert not kv.has_abandoned


def test_published_blocks_end_by_release_or_by_time_but_once():
    clock = TurnedClock()
    kv = active(clock)
    kv.keep("a", (0, 1))
    clock.now += 1.0
    kv.keep("b", (2,))
    assert kv.num_leases == 2
    assert kv.release("b") == (2,)
    assert kv.release("b") == ()
    assert kv.next_deadline() == 105.0
    clock.now = 104.9
    assert kv.expire() == ()
    clock.now = 105.0
    assert kv.expire() == (0, 1)
    assert kv.expire() == kv.release("a") == ()
    assert kv.num_leases == 0


def test_a_second_lease_of_one_id_gives_the_first_ones_blocks_back():
    clock = TurnedClock()
    kv = active(clock)
    kv.keep("r", (0, 1))
    clock.now += 4.0
    assert kv.keep("r", (2, 3)) == (0, 1)
    clock.now += 4.0
    assert kv.expire() == (), "the second lease has a time of its own"
    assert kv.release("r") == (2, 3)
