"""What a test can make the fake do."""

from concurrent.futures import Future

import pytest

from triptych.errors import FailureReason, TransferError
from triptych.transfer.arena import Arena
from triptych.transfer.fake import FakeDataPlane, FakeNetwork
from triptych.transfer.ticket import Ticket


class Scene:
    """A producer with six published pages, page i filled with i + 1, and a consumer."""

    def __init__(self, num_ticks: int = 1, verify_checksums: bool = True) -> None:
        self.network = FakeNetwork(num_ticks)
        self.producer = FakeDataPlane("e0", self.network)
        self.consumer = FakeDataPlane("p0", self.network, verify_checksums)
        self.source, self.destination = Arena.create("source", 6, 8), Arena.create("destination", 6, 8)
        for page in range(6):
            self.source.pages[page] = page + 1
        self.producer.register("ec", self.source)
        self.tickets = [self.publish(page) for page in range(6)]

    def publish(self, page: int) -> Ticket:
        return self.producer.publish("ec", [page], 8, 60.0)

    def read(self, page: int) -> "Future[None]":
        return self.consumer.read(self.tickets[page], self.destination, [page])

    def arrived(self) -> list[int]:
        return self.destination.pages[:, 0].tolist()


def reason_of(future: "Future[None]") -> FailureReason:
    with pytest.raises(TransferError) as caught:
        future.result(0)
    return caught.value.reason


def test_nothing_arrives_before_it_is_delivered() -> None:
    scene = Scene()
    future = scene.read(2)
    assert not future.done()
    assert scene.arrived() == [0] * 6
    scene.network.deliver()
    assert future.result(0) is None
    assert scene.arrived() == [0, 0, 3, 0, 0, 0]


def test_reads_can_be_delivered_in_any_order() -> None:
    scene = Scene()
    futures = [scene.read(page) for page in range(3)]
    order: list[int] = []
    for page, future in enumerate(futures):
        future.add_done_callback(lambda _, page=page: order.append(page))
    first, second, third = scene.network.pending
    scene.network.deliver(third, first)
    assert [future.done() for future in futures] == [True, False, True]
    scene.network.deliver(second)
    assert order == [2, 0, 1]


def test_a_delayed_read_arrives_after_its_ticks_and_those_behind_it_overtake_it() -> None:
    scene = Scene(num_ticks=2)
    slow, quick = scene.read(0), scene.read(1)
    scene.network.pending[0].num_ticks = 3
    done: list[tuple[bool, bool]] = []
    for _ in range(3):
        scene.network.tick()
        done.append((slow.done(), quick.done()))
    assert done == [(False, False), (False, True), (True, True)]


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_dropped_read_is_under_way_until_the_network_gives_it_up_and_leaves_the_others_alone(has_begun: bool) -> None:
    scene = Scene()
    dropped, other = scene.read(0), scene.read(1)
    read = scene.network.pending[0]
    if has_begun:
        scene.network.begin(read)
    scene.network.drop(read)
    scene.network.deliver()
    assert not dropped.done()
    assert other.done()
    scene.network.give_up()
    assert reason_of(dropped) is FailureReason.TIMEOUT
    assert scene.arrived() == [0, 2, 0, 0, 0, 0]


def test_a_read_that_takes_no_tick_is_done_when_it_is_started() -> None:
    scene = Scene(num_ticks=0)
    assert scene.read(2).done()
    assert scene.arrived() == [0, 0, 3, 0, 0, 0]
    assert scene.network.pending == []


def test_a_read_that_has_begun_has_copied_half_of_its_pages_and_cannot_be_cancelled() -> None:
    scene = Scene()
    future = scene.consumer.read(scene.producer.publish("ec", [2, 3], 16, 60.0), scene.destination, [0, 1])
    scene.network.begin(scene.network.pending[0])
    assert scene.arrived()[:2] == [3, 0]
    assert not future.cancel()
    scene.network.deliver()
    assert future.result(0) is None
    assert scene.arrived()[:2] == [3, 4]


@pytest.mark.parametrize("verify_checksums", [True, False])
def test_pages_overwritten_in_the_middle_of_a_copy_are_stale(verify_checksums: bool) -> None:
    scene = Scene(verify_checksums=verify_checksums)
    future = scene.consumer.read(scene.producer.publish("ec", [2, 3], 16, 60.0), scene.destination, [0, 1])
    scene.network.begin(scene.network.pending[0])
    scene.source.recycle([3])
    scene.source.pages[3] = 99
    scene.network.deliver()
    assert scene.arrived()[:2] == [3, 99]
    assert reason_of(future) is FailureReason.STALE


@pytest.mark.parametrize("nbytes_cut", [1, 8, 100])
@pytest.mark.parametrize("verify_checksums", [True, False])
def test_content_cut_short_is_corrupt(nbytes_cut: int, verify_checksums: bool) -> None:
    scene = Scene(verify_checksums=verify_checksums)
    future = scene.read(0)
    scene.network.pending[0].nbytes_cut = nbytes_cut
    scene.network.deliver()
    assert reason_of(future) is FailureReason.CORRUPT


@pytest.mark.parametrize("verify_checksums", [True, False])
def test_pages_recycled_between_the_two_checks_are_stale(verify_checksums: bool) -> None:
    scene = Scene(verify_checksums=verify_checksums)
    future = scene.read(0)
    scene.network.pending[0].is_recycled_during = True
    scene.network.deliver()
    assert reason_of(future) is FailureReason.STALE


def test_pages_recycled_before_the_delivery_are_stale() -> None:
    scene = Scene()
    future = scene.read(0)
    scene.source.recycle([0])
    scene.network.deliver()
    assert reason_of(future) is FailureReason.STALE
    assert scene.arrived() == [0] * 6


def test_a_death_fails_reads_under_way_and_later_ones_at_once() -> None:
    scene = Scene()
    under_way = scene.read(0)
    scene.network.kill("e0")
    assert reason_of(under_way) is FailureReason.PEER_LOST
    assert reason_of(scene.read(1)) is FailureReason.PEER_LOST
    assert scene.network.pending == []


def test_a_death_fails_a_read_that_has_begun_and_one_that_was_dropped() -> None:
    scene = Scene()
    begun, dropped = scene.read(0), scene.read(1)
    first, second = scene.network.pending
    scene.network.begin(first)
    scene.network.drop(second)
    scene.network.kill("e0")
    assert reason_of(begun) is FailureReason.PEER_LOST
    assert reason_of(dropped) is FailureReason.PEER_LOST


def test_a_consumers_death_ends_its_reads_and_nobody_elses() -> None:
    scene = Scene()
    other = FakeDataPlane("p1", scene.network)
    mine = scene.read(0)
    others = other.read(scene.tickets[1], scene.destination, [1])
    scene.network.kill("p0")
    assert reason_of(mine) is FailureReason.INTERNAL
    scene.network.deliver()
    assert others.result(0) is None


def test_a_read_that_was_cancelled_is_not_carried_out() -> None:
    scene = Scene()
    delivered, dropped = scene.read(0), scene.read(1)
    scene.network.drop(scene.network.pending[1])
    assert delivered.cancel()
    assert dropped.cancel()
    scene.network.deliver()
    scene.network.give_up()
    assert scene.network.pending == []
    assert scene.arrived() == [0] * 6
