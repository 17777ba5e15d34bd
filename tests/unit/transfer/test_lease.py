import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.transfer.lease import LeaseTable


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_lease_is_held_until_its_time_is_over(clock: Clock) -> None:
    table = LeaseTable(clock)
    table.grant("a", 5.0)
    clock.now_s = 104.9
    assert table.expired() == []
    clock.now_s = 105.0
    assert table.expired() == ["a"]
    assert table.expired() == []


def test_leases_expire_in_the_order_of_their_deadlines(clock: Clock) -> None:
    table = LeaseTable(clock)
    for id, lease_s in (("late", 3.0), ("early", 1.0), ("middle", 2.0), ("never", 99.0)):
        table.grant(id, lease_s)
    clock.now_s = 110.0
    assert table.expired() == ["early", "middle", "late"]
    assert len(table) == 1


def test_granting_again_renews_and_never_shortens(clock: Clock) -> None:
    table = LeaseTable(clock)
    table.grant("a", 5.0)
    table.grant("a", 1.0)
    assert table.next_deadline() == 105.0
    table.grant("a", 9.0)
    assert table.next_deadline() == 109.0
    clock.now_s = 108.0
    assert table.expired() == []


def test_a_released_lease_never_expires(clock: Clock) -> None:
    table = LeaseTable(clock)
    table.grant("a", 5.0)
    table.release("a")
    table.release("a")
    table.release("never granted")
    assert table.next_deadline() is None
    clock.now_s = 200.0
    assert table.expired() == []


def test_a_new_lease_after_a_release_may_be_shorter(clock: Clock) -> None:
    table = LeaseTable(clock)
    table.grant("a", 5.0)
    table.release("a")
    table.grant("a", 1.0)
    clock.now_s = 101.0
    assert table.expired() == ["a"]
    clock.now_s = 105.0
    assert table.expired() == []


def test_renewals_and_releases_do_not_pile_up(clock: Clock) -> None:
    table = LeaseTable(clock)
    for number in range(10_000):
        clock.now_s += 0.001
        table.grant("renewed", 5.0)
        table.grant(f"released {number}", 5.0)
        table.release(f"released {number}")
    assert len(table) == 1


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.sampled_from("abcde"), st.integers(0, 8)),
        st.tuples(st.just("release"), st.sampled_from("abcde"), st.just(0)),
        st.tuples(st.just("expire"), st.just(""), st.just(0)),
        st.tuples(st.just("wait"), st.just(""), st.integers(0, 5)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(operations=OPERATIONS)
def test_it_agrees_with_a_plain_dictionary_of_deadlines(operations: list[tuple[str, str, int]]) -> None:
    clock = Clock()
    table, deadlines = LeaseTable(clock), dict[str, float]()
    for kind, id, number in operations:
        if kind == "grant":
            table.grant(id, number)
            deadlines[id] = max(deadlines.get(id, 0.0), clock.now_s + number)
        elif kind == "release":
            table.release(id)
            deadlines.pop(id, None)
        elif kind == "wait":
            clock.now_s += number
        else:
            ended = {each for each, deadline in deadlines.items() if deadline <= clock.now_s}
            assert set(table.expired()) == ended
            deadlines = {each: deadline for each, deadline in deadlines.items() if each not in ended}
        assert table.next_deadline() == min(deadlines.values(), default=None)
        assert len(table) == len(deadlines)
