"""An item from the first want to residency, in every order in which its messages may come."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import pytest
from engine_rig import item_of
from every_sequence import follow_every_sequence

from triptych.engine.consumer_item import (
    LEGAL_ITEM_CHANGES,
    MAX_UNWANTED,
    ConsumerItem,
    ConsumerItems,
    ItemState,
)
from triptych.engine.encoder_cache_manager import LAST
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import ECTicket
from triptych.transfer.ticket import Ticket

CAT = item_of("cat", 5, 6)
TIMEOUT_S = 10.0


def ticket_for(key: str, num_rows: int = 6, producer: str = "e1") -> ECTicket:
    data = Ticket(producer, "ec", (0, 1), (0, 0), 16, 24, "", 30.0, {})
    return ECTicket(key, num_rows, 1, "float32", data)


def state_of(table: ConsumerItems, key: str) -> ItemState | None:
    item = table.get(key)
    return None if item is None else item.state


def loading_for(*request_ids: str) -> ConsumerItems:
    table = ConsumerItems(TIMEOUT_S)
    for index, request_id in enumerate(request_ids):
        table.want(CAT, request_id, (0, index), now=0.0)
    table.announce(ticket_for(CAT.key), now=4.0)
    table.start_loading(CAT.key)
    return table


# --- waits


@pytest.mark.parametrize("want_first", (True, False))
def test_want_and_announcement_meet_in_either_order(want_first: bool):
    table = ConsumerItems(TIMEOUT_S)
    if want_first:
        assert table.want(CAT, "r", (0, 0, 5), now=0.0), "there is no ticket: it must be asked for"
    table.announce(ticket_for(CAT.key), now=0.0)
    if not want_first:
        assert table.arrived() == [], "nobody wants it yet"
        assert not table.want(CAT, "r", (0, 0, 5), now=0.0), "there is a ticket: it need not be asked for"
    assert [item.key for item in table.arrived()] == [CAT.key]
    table.check_invariants()


def test_what_has_arrived_is_loaded_in_the_order_of_those_who_wait():
    table = ConsumerItems(TIMEOUT_S)
    for name, rank in (("late", (0, 2)), ("urgent", (-1, 3)), ("early", (0, 1))):
        item = item_of(name, 0, 6)
        table.want(item, name, rank, now=0.0)
        table.announce(ticket_for(item.key), now=0.0)
    assert [next(iter(item.waiters)) for item in table.arrived()] == ["urgent", "early", "late"]


def test_the_first_in_line_of_those_who_share_an_item_gives_it_its_rank():
    table = ConsumerItems(TIMEOUT_S)
    assert table.rank_of(CAT.key) == LAST
    for name, rank in (("second", (0, 2)), ("first", (0, 1)), ("third", (0, 3))):
        table.want(CAT, name, rank, now=0.0)
    assert table.rank_of(CAT.key) == (0, 1)


def test_to_want_again_neither_asks_again_nor_prolongs_the_wait():
    table = ConsumerItems(TIMEOUT_S)
    assert table.want(CAT, "r", (0, 0), now=0.0)
    assert not table.want(CAT, "r", (0, 0), now=9.0)
    assert table.next_deadline() == 10.0
    assert table.expire(10.0) == [("r", CAT.key)]


def test_to_want_again_moves_the_wait_to_the_place_of_the_next_use():
    """A request that was preempted needs the first of two uses of a picture again: its own other pictures must make room for that one."""
    table = ConsumerItems(TIMEOUT_S)
    table.want(CAT, "r", (0, 0, 13), now=0.0)
    table.want(CAT, "r", (0, 0, 1), now=1.0)
    assert table.rank_of(CAT.key) == (0, 0, 1)


def test_an_item_leaves_with_its_last_waiter():
    table = ConsumerItems(TIMEOUT_S)
    table.want(CAT, "a", (0, 0), now=0.0)
    table.want(CAT, "b", (0, 1), now=0.0)
    table.leave("a", CAT.key)
    assert state_of(table, CAT.key) == ItemState.REQUESTED
    table.leave("b", CAT.key)
    assert state_of(table, CAT.key) is None
    table.leave("b", CAT.key)
    assert table.num_waits == 0


@pytest.mark.parametrize("ends_well", (True, False))
def test_an_item_whose_copy_runs_is_remembered_though_nobody_waits_any_more(ends_well: bool):
    table = loading_for("r")
    table.leave("r", CAT.key)
    assert state_of(table, CAT.key) == ItemState.LOADING
    table.check_invariants()
    if ends_well:
        item = table.finish(CAT.key)
        assert item is not None
        assert item.waiters == {}
    else:
        table.fail(CAT.key, FailureReason.STALE)
        assert table.settle(CAT.key)[1] == ()
    assert state_of(table, CAT.key) is None


def test_the_waiters_of_an_item_that_came_are_named_with_their_ranks_once():
    table = loading_for("a", "b")
    item = table.finish(CAT.key)
    assert item is not None
    assert {name: waiter.rank for name, waiter in item.waiters.items()} == {"a": (0, 0), "b": (0, 1)}
    assert table.finish(CAT.key) is None


# --- failures


@pytest.mark.parametrize("reason", FailureReason)
def test_a_failed_load_is_asked_for_again_under_the_old_deadline_or_ends_the_waits_by_its_reason(reason: FailureReason):
    table = loading_for("a", "b")
    table.fail(CAT.key, reason)
    assert state_of(table, CAT.key) == ItemState.FAILED
    table.check_invariants()
    assert table.settle(CAT.key) == (reason, ("a", "b"))
    if reason not in (FailureReason.MISMATCH, FailureReason.BAD_MEDIA):
        assert state_of(table, CAT.key) == ItemState.REQUESTED
        assert table.next_deadline() == 10.0
    else:
        assert state_of(table, CAT.key) is None
    table.check_invariants()


def test_a_ticket_that_came_while_another_was_loaded_is_tried_when_that_fails_and_nobody_need_ask():
    table = loading_for("r")
    other = ticket_for(CAT.key, producer="e2")
    table.announce(other, now=5.0)
    table.fail(CAT.key, FailureReason.PEER_LOST)
    assert table.settle(CAT.key)[1] == ()
    (item,) = table.arrived()
    assert item.ticket == other


def test_a_ticket_that_is_told_twice_is_tried_once():
    table = loading_for("r")
    table.announce(ticket_for(CAT.key), now=5.0)
    table.fail(CAT.key, FailureReason.STALE)
    assert table.settle(CAT.key)[1] == ("r",)
    assert state_of(table, CAT.key) == ItemState.REQUESTED


def test_a_ticket_that_comes_after_a_failure_is_tried():
    table = loading_for("r")
    table.fail(CAT.key, FailureReason.STALE)
    table.settle(CAT.key)
    table.announce(ticket_for(CAT.key), now=5.0)
    assert [item.key for item in table.arrived()] == [CAT.key]


# --- tickets for nobody, and of another size


def test_an_announcement_that_nobody_wants_is_dropped_at_its_time_and_wakes_nobody():
    table = ConsumerItems(TIMEOUT_S)
    table.announce(ticket_for(CAT.key), now=0.0)
    assert table.next_deadline() is None
    assert table.expire(9.9) == []
    assert state_of(table, CAT.key) == ItemState.ARRIVED
    assert table.expire(10.0) == []
    assert state_of(table, CAT.key) is None


def test_a_request_that_comes_too_late_for_an_announcement_asks_though_no_step_has_dropped_it_yet():
    table = ConsumerItems(TIMEOUT_S)
    table.announce(ticket_for(CAT.key), now=0.0)
    assert table.want(CAT, "r", (0, 0), now=10.0)
    assert state_of(table, CAT.key) == ItemState.REQUESTED


def test_announcements_that_nobody_wants_are_bounded_and_the_one_heard_of_longest_ago_goes():
    table = ConsumerItems(TIMEOUT_S)
    keys = [item_of(f"item{index}", 0, 6).key for index in range(MAX_UNWANTED + 1)]
    for key in (*keys[:-1], keys[0], keys[-1]):
        table.announce(ticket_for(key), now=0.0)
    assert state_of(table, keys[1]) is None
    assert all(state_of(table, key) == ItemState.ARRIVED for key in (keys[0], *keys[2:]))


def test_of_tickets_for_nobody_the_latest_counts():
    table = ConsumerItems(TIMEOUT_S)
    for num_rows in (7, 6):
        table.announce(ticket_for(CAT.key, num_rows), now=0.0)
    table.want(CAT, "r", (0, 0), now=0.0)
    assert table.misfits() == []


def test_only_those_who_expect_another_size_than_the_ticket_has_are_misfits():
    table = ConsumerItems(TIMEOUT_S)
    table.want(CAT, "six", (0, 0), now=0.0)
    table.want(item_of("cat", 5, 7), "seven", (0, 1), now=0.0)
    assert table.misfits() == [], "nobody knows yet who is right"
    table.announce(ticket_for(CAT.key, 6), now=0.0)
    assert table.misfits() == [("seven", CAT.key)]
    table.announce(ticket_for(CAT.key, 7), now=0.0)
    assert table.misfits() == [("seven", CAT.key)], "the ticket that is here already counts"


# --- each pair of state and event

EVENTS: dict[str, Callable[[ConsumerItems], object]] = {
    "want": lambda table: table.want(CAT, "new", (0, 9), 4.0),
    "last waiter leaves": lambda table: table.leave("r", CAT.key),
    "announce": lambda table: table.announce(ticket_for(CAT.key, producer="e2"), 4.0),
    "start loading": lambda table: table.start_loading(CAT.key),
    "finish": lambda table: table.finish(CAT.key),
    "fail": lambda table: table.fail(CAT.key, FailureReason.STALE),
    "settle": lambda table: table.settle(CAT.key),
    "expire": lambda table: table.expire(10.0),
}
R, A, L, F = ItemState.REQUESTED, ItemState.ARRIVED, ItemState.LOADING, ItemState.FAILED
NO = "refused"  # raises: the caller would have to be wrong
AFTER: dict[ItemState | None, tuple[ItemState | str | None, ...]] = {  # in the order of EVENTS
    None: (R, None, A, NO, None, NO, NO, None),
    R: (R, None, A, NO, None, NO, NO, R),
    A: (A, None, A, L, None, NO, NO, A),
    L: (L, L, L, NO, None, F, NO, L),
    F: (F, F, F, NO, NO, NO, R, F),
}


def table_in(state: ItemState | None) -> ConsumerItems:
    table = ConsumerItems(TIMEOUT_S)
    if state is not None:
        table.want(CAT, "r", (0, 0), now=0.0)
    if state in (A, L, F):
        table.announce(ticket_for(CAT.key), now=0.0)
    if state in (L, F):
        table.start_loading(CAT.key)
    if state == F:
        table.fail(CAT.key, FailureReason.PEER_LOST)
    return table


@pytest.mark.parametrize(("state", "event"), product((None, *ItemState), EVENTS))
def test_each_event_in_each_state_leads_where_the_table_says_or_raises(state: ItemState | None, event: str):
    table = table_in(state)
    assert state_of(table, CAT.key) == state
    wanted = dict(zip(EVENTS, AFTER[state], strict=True))[event]
    if wanted == NO:
        with pytest.raises((AssertionError, KeyError)):
            EVENTS[event](table)
        return
    EVENTS[event](table)
    assert state_of(table, CAT.key) == wanted
    table.check_invariants()


@pytest.mark.parametrize(("state", "following"), product(ItemState, ItemState))
def test_a_change_of_state_that_is_not_in_the_table_raises(state: ItemState, following: ItemState):
    item = ConsumerItem("k", state)
    if following in LEGAL_ITEM_CHANGES[state]:
        item.change_state(following)
        assert item.state == following
    else:
        with pytest.raises(AssertionError):
            item.change_state(following)


# --- every sequence of events, beside a model which keeps only what was said


@dataclass
class Said:
    """What was said about one key; its state follows from it."""

    waits: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])  # id -> (rows, deadline)
    tickets: list[ECTicket] = field(default_factory=list[ECTicket])  # the one at hand, and the latest after it
    kept_until: float = 0.0
    is_loading: bool = False

    @property
    def state(self) -> ItemState | None:
        if self.is_loading:
            return L
        if self.tickets:
            return A
        return R if self.waits else None


@dataclass
class Waiting:
    """The table, and what was said; two requests that disagree on the size of one item, and one of them waits for another item, too."""

    table: ConsumerItems = field(default_factory=lambda: ConsumerItems(TIMEOUT_S))
    said: dict[str, Said] = field(default_factory=lambda: {"X": Said(), "Y": Said()})
    now: float = 0.0

    def want(self, request_id: str, key: str, num_rows: int) -> None:
        said = self.said[key]
        if said.state == A and not said.waits and said.kept_until <= self.now:
            said.tickets = []
        must_ask = not said.tickets and request_id not in said.waits
        said.waits.setdefault(request_id, (num_rows, self.now + TIMEOUT_S))
        media = MediaItem(key, "image", ((0, num_rows),), num_rows)
        assert self.table.want(media, request_id, (0, ord(request_id)), self.now) == must_ask

    def leave(self, request_id: str) -> None:
        for key, said in self.said.items():
            if said.waits.pop(request_id, None) is not None and not said.waits and not said.is_loading:
                said.tickets = []
            self.table.leave(request_id, key)

    def announce(self, key: str, num_rows: int, producer: str) -> None:
        said, ticket = self.said[key], ticket_for(key, num_rows, producer)
        if said.state == A and not said.waits:
            said.tickets = []
        if not said.tickets:
            said.tickets = [ticket]
        elif ticket != said.tickets[0] and num_rows == said.tickets[0].num_rows:
            said.tickets[1:] = [ticket]
        said.kept_until = self.now + TIMEOUT_S
        self.table.announce(ticket, self.now)

    def step(self) -> None:
        """As the scheduler does: those whose time is up and those who misfit end; then what has arrived is loaded."""
        assert sorted(self.table.expire(self.now)) == sorted(
            (name, key) for key, said in self.said.items() for name, (_, deadline) in said.waits.items() if deadline <= self.now
        )
        misfits = sorted(
            (name, key)
            for key, said in self.said.items()
            for name, (rows, _) in said.waits.items()
            if said.tickets and rows != said.tickets[0].num_rows
        )
        assert sorted(self.table.misfits()) == misfits
        over = {name for said in self.said.values() for name, (_, deadline) in said.waits.items() if deadline <= self.now}
        for said in self.said.values():
            if said.state == A and not said.waits and said.kept_until <= self.now:
                said.tickets = []
        for name in over | {name for name, _ in misfits}:
            self.leave(name)
        for item in self.table.arrived():
            self.table.start_loading(item.key)
            self.said[item.key].is_loading = True

    def finish(self, key: str) -> None:
        """By a load, or, if none runs, by this worker's own tower."""
        said = self.said[key]
        item = self.table.finish(key)
        assert (set(item.waiters) if item is not None else set[str]()) == set(said.waits)
        self.said[key] = Said()

    def fail(self, key: str, reason: FailureReason) -> None:
        said = self.said[key]
        if not said.is_loading:
            with pytest.raises((AssertionError, KeyError)):
                self.table.fail(key, reason)
            return
        self.table.fail(key, reason)
        _, request_ids = self.table.settle(key)
        said.is_loading = False
        said.tickets = said.tickets[1:]
        if reason == FailureReason.MISMATCH:
            assert set(request_ids) == set(said.waits), "all end"
            self.said[key] = Said()
        elif said.tickets:
            assert request_ids == (), "another ticket is tried"
        else:
            assert set(request_ids) == set(said.waits), "all ask again"

    def check(self) -> None:
        self.table.check_invariants()
        for key, said in self.said.items():
            assert state_of(self.table, key) == said.state, f"{key} is {state_of(self.table, key)}, said was {said}"
            item = self.table.get(key)
            if item is not None:
                assert [each for each in (item.ticket, item.later_ticket) if each is not None] == said.tickets
        deadlines = [deadline for said in self.said.values() for _, deadline in said.waits.values()]
        assert self.table.next_deadline() == min(deadlines, default=None)
        assert self.table.num_waits == len(deadlines)


def _tick(machine: Waiting) -> None:
    machine.now += 6.0  # two of them are over a deadline


def test_every_sequence_of_events_leads_to_the_state_that_follows_from_what_was_said():
    events: dict[str, Callable[[Waiting], None]] = {
        "a wants X": lambda m: m.want("a", "X", 6),
        "b wants X, with another size": lambda m: m.want("b", "X", 7),
        "a wants Y": lambda m: m.want("a", "Y", 6),
        "a leaves": lambda m: m.leave("a"),
        "b leaves": lambda m: m.leave("b"),
        "ticket for X": lambda m: m.announce("X", 6, "e1"),
        "ticket for X from another": lambda m: m.announce("X", 6, "e2"),
        "ticket for X of another size": lambda m: m.announce("X", 7, "e1"),
        "ticket for Y": lambda m: m.announce("Y", 6, "e1"),
        "step": Waiting.step,
        "X is here": lambda m: m.finish("X"),
        "X fails": lambda m: m.fail("X", FailureReason.STALE),
        "X fails for good": lambda m: m.fail("X", FailureReason.MISMATCH),
        "time": _tick,
    }
    assert follow_every_sequence(Waiting(), events, depth=6) > 10_000
