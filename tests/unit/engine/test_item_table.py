"""An item from the first want to residency, in every order in which its messages may come."""

import pytest
from engine_rig import item_of

from triptych.engine.item_table import MAX_UNWANTED, ItemState, ItemTable
from triptych.output import ECTicket
from triptych.transfer.ticket import Ticket

CAT = item_of("cat", 5, 6)


def ticket_for(key: str, num_rows: int = 6) -> ECTicket:
    data = Ticket("e1", "ec", (0, 1), (0, 0), 16, 24, "", 30.0, {})
    return ECTicket(key, num_rows, 1, "float32", data)


def state_of(table: ItemTable, key: str) -> ItemState | None:
    item = table.get(key)
    return None if item is None else item.state


@pytest.mark.parametrize("want_first", (True, False))
def test_want_and_announcement_meet_in_either_order(want_first: bool):
    table = ItemTable(10.0)
    if want_first:
        table.want(CAT, "r", (0, 0, 5), now=0.0)
    table.announce(CAT.key, ticket_for(CAT.key), now=0.0)
    if not want_first:
        assert table.arrived() == [], "nobody wants it yet"
        table.want(CAT, "r", (0, 0, 5), now=0.0)
    assert [item.key for item in table.arrived()] == [CAT.key]
    table.check_invariants()


def test_what_has_arrived_is_loaded_in_the_order_of_those_who_wait():
    table = ItemTable(10.0)
    for name, rank in (("late", (0, 2)), ("urgent", (-1, 3)), ("early", (0, 1))):
        item = item_of(name, 0, 6)
        table.want(item, name, rank, now=0.0)
        table.announce(item.key, ticket_for(item.key), now=0.0)
    assert [next(iter(item.waiters)) for item in table.arrived()] == ["urgent", "early", "late"]


def test_the_first_in_line_of_those_who_share_an_item_gives_it_its_rank():
    table = ItemTable(10.0)
    table.want(CAT, "second", (0, 2), now=0.0)
    assert table.want(CAT, "first", (0, 1), now=0.0).rank == (0, 1)


def test_to_want_again_does_not_prolong_the_wait():
    table = ItemTable(10.0)
    table.want(CAT, "r", (0, 0), now=0.0)
    table.want(CAT, "r", (0, 0), now=9.0)
    assert table.next_deadline() == 10.0
    assert table.expired(10.0) == [("r", CAT.key)]


def test_a_failed_load_is_waited_for_again_under_the_old_deadline():
    table = ItemTable(10.0)
    table.want(CAT, "r", (0, 0), now=0.0)
    table.announce(CAT.key, ticket_for(CAT.key), now=4.0)
    table.start_loading(CAT.key)
    assert table.fail(CAT.key) == ("r",)
    assert state_of(table, CAT.key) == ItemState.REQUESTED
    assert table.next_deadline() == 10.0
    table.check_invariants()


def test_an_item_leaves_with_its_last_waiter():
    table = ItemTable(10.0)
    table.want(CAT, "a", (0, 0), now=0.0)
    table.want(CAT, "b", (0, 1), now=0.0)
    table.leave("a")
    assert state_of(table, CAT.key) == ItemState.REQUESTED
    table.leave("b")
    assert state_of(table, CAT.key) is None
    table.leave("b")
    assert table.num_waits == 0


@pytest.mark.parametrize("ends_well", (True, False))
def test_an_item_whose_copy_runs_is_remembered_though_nobody_waits_any_more(ends_well: bool):
    table = ItemTable(10.0)
    table.want(CAT, "r", (0, 0), now=0.0)
    table.announce(CAT.key, ticket_for(CAT.key), now=0.0)
    table.start_loading(CAT.key)
    table.leave("r")
    assert state_of(table, CAT.key) == ItemState.LOADING
    table.check_invariants()
    if ends_well:
        assert table.finish(CAT.key) == {}
    else:
        assert table.fail(CAT.key) == ()
    assert state_of(table, CAT.key) is None


def test_a_second_ticket_does_not_disturb_an_item_on_its_way():
    table = ItemTable(10.0)
    table.want(CAT, "r", (0, 0), now=0.0)
    first = ticket_for(CAT.key)
    table.announce(CAT.key, first, now=0.0)
    table.announce(CAT.key, ticket_for(CAT.key, 7), now=0.0)
    item = table.get(CAT.key)
    assert item is not None
    assert item.ticket is first


def test_the_waiters_of_an_item_that_came_are_named_with_their_ranks():
    table = ItemTable(10.0)
    table.want(CAT, "a", (0, 0), now=0.0)
    table.want(CAT, "b", (0, 1), now=0.0)
    assert table.finish(CAT.key) == {"a": (0, 0), "b": (0, 1)}
    assert table.finish(CAT.key) == {}


def test_an_announcement_that_nobody_ever_wants_is_dropped_at_its_time():
    table = ItemTable(10.0)
    table.announce(CAT.key, ticket_for(CAT.key), now=0.0)
    assert table.expired(9.9) == []
    assert state_of(table, CAT.key) == ItemState.ARRIVED
    table.expired(10.0)
    assert state_of(table, CAT.key) is None


def test_announcements_that_nobody_wants_are_bounded_and_the_oldest_goes():
    table = ItemTable(10.0)
    keys = [item_of(f"item{index}", 0, 6).key for index in range(MAX_UNWANTED + 1)]
    for key in keys:
        table.announce(key, ticket_for(key), now=0.0)
    assert state_of(table, keys[0]) is None
    assert state_of(table, keys[1]) == ItemState.ARRIVED
    assert state_of(table, keys[-1]) == ItemState.ARRIVED


def test_a_ticket_of_another_number_of_rows_does_not_fit():
    table = ItemTable(10.0)
    item = table.want(CAT, "r", (0, 0), now=0.0)
    table.announce(CAT.key, ticket_for(CAT.key, 7), now=0.0)
    assert not item.fits
    table.fail(CAT.key)
    table.announce(CAT.key, ticket_for(CAT.key, 6), now=0.0)
    assert item.fits
