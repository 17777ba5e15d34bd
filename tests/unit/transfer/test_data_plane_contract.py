"""What every data plane owes its callers, run over each of them."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from triptych.errors import FailureReason, InternalError, TransferError
from triptych.transfer.arena import Arena
from triptych.transfer.data_plane import DataPlane
from triptych.transfer.fake import FakeDataPlane, FakeNetwork
from triptych.transfer.file import FileDataPlane
from triptych.transfer.shm import ShmDataPlane
from triptych.transfer.ticket import Ticket

NUM_PAGES = 12
PAGE_NBYTES = 1000
UNTOUCHED = 0xAA
TIMEOUT_S = 10.0


@dataclass
class Pair:
    """A producer whose arena holds random bytes, and a consumer whose arena holds UNTOUCHED."""

    make: Callable[[str], DataPlane]
    settle: Callable[[], None]
    producer: DataPlane
    consumer: DataPlane
    source: Arena
    destination: Arena

    def publish(self, pages: list[int], nbytes: int) -> tuple[Ticket, bytes]:
        """The ticket, and the bytes which it stands for."""
        content = b"".join(self.source.pages[page].tobytes() for page in pages)[:nbytes]
        return self.producer.publish("kv", pages, nbytes, lease_s=60.0), content

    def read(self, ticket: Ticket, pages: list[int], reader: DataPlane | None = None) -> None:
        future = (reader or self.consumer).read(ticket, self.destination, pages)
        self.settle()
        future.result(TIMEOUT_S)

    def arrived(self, pages: list[int], nbytes: int) -> bytes:
        return b"".join(self.destination.pages[page].tobytes() for page in pages)[:nbytes]

    def recycle(self, pages: list[int]) -> None:
        """What an owner does that gives pages to somebody else."""
        self.source.recycle(pages)
        self.source.pages[pages] = 0xEE
        if isinstance(self.producer, FileDataPlane):
            self.producer.sweep()

    def is_untouched(self) -> bool:
        return bool((self.destination.pages == UNTOUCHED).all())


def random_arena(num_pages: int = NUM_PAGES, seed: int = 1) -> Arena:
    arena = Arena.create("source", num_pages, PAGE_NBYTES)
    arena.pages[:] = np.frombuffer(np.random.default_rng(seed).bytes(arena.pages.size), np.uint8).reshape(arena.pages.shape)
    return arena


@pytest.fixture(params=["shm", "file", "fake"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    network = FakeNetwork()
    makers: dict[str, Callable[[str], DataPlane]] = {
        "shm": ShmDataPlane,
        "file": lambda worker_id: FileDataPlane(worker_id, tmp_path),
        "fake": lambda worker_id: FakeDataPlane(worker_id, network),
    }
    make = makers[request.param]
    made: list[DataPlane] = []

    def make_and_close_later(worker_id: str) -> DataPlane:
        made.append(make(worker_id))
        return made[-1]

    source, destination = random_arena(), Arena.create("destination", NUM_PAGES, PAGE_NBYTES)
    destination.pages[:] = UNTOUCHED
    producer, consumer = make_and_close_later("e0"), make_and_close_later("p0")
    producer.register("kv", source)
    yield Pair(make_and_close_later, network.deliver, producer, consumer, source, destination)
    for plane in made:
        plane.close()
    assert not list(tmp_path.iterdir())


def reason_of(action: Callable[[], None]) -> FailureReason:
    with pytest.raises(TransferError) as caught:
        action()
    return caught.value.reason


LAYOUTS = [
    ([0, 1, 2], [4, 5, 6]),  # one run
    ([3, 4, 7, 8, 1], [9, 10, 2, 3, 0]),  # several runs
    ([5, 4, 3], [0, 1, 2]),  # no run on the producer's side
    ([0, 1, 2], [11, 0, 5]),  # no run on the consumer's side
    ([6], [6]),
]


@pytest.mark.parametrize(("source_pages", "pages"), LAYOUTS)
@pytest.mark.parametrize("short_by", [0, 1, 999])
def test_a_read_delivers_exactly_the_published_bytes(
    pair: Pair, source_pages: list[int], pages: list[int], short_by: int
) -> None:
    nbytes = len(pages) * PAGE_NBYTES - short_by
    ticket, content = pair.publish(source_pages, nbytes)
    pair.read(ticket, pages)
    assert pair.arrived(pages, nbytes) == content
    # Neither other pages nor the rest of the last one are written.
    assert (pair.destination.pages[pages[-1], PAGE_NBYTES - short_by :] == UNTOUCHED).all()
    assert (np.delete(pair.destination.pages, pages, axis=0) == UNTOUCHED).all()


def test_a_ticket_still_works_after_a_trip_as_json(pair: Pair) -> None:
    ticket, content = pair.publish([1, 2], 1500)
    pair.read(msgspec.json.decode(msgspec.json.encode(ticket), type=Ticket), [0, 1])
    assert pair.arrived([0, 1], 1500) == content


def test_the_checksum_is_blake3_over_the_content(pair: Pair) -> None:
    ticket, content = pair.publish([3, 4, 9], 2345)
    assert ticket.checksum == blake3(content).hexdigest()[:16]


def test_one_ticket_can_be_read_often_and_by_several(pair: Pair) -> None:
    ticket, content = pair.publish([1, 2], 2000)
    other = pair.make("p1")
    for pages, reader in (([0, 1], pair.consumer), ([2, 3], pair.consumer), ([4, 5], other)):
        pair.read(ticket, pages, reader)
        assert pair.arrived(pages, 2000) == content


def test_reads_of_many_tickets_at_once_do_not_mix(pair: Pair) -> None:
    published = [pair.publish([page], PAGE_NBYTES) for page in range(NUM_PAGES)]
    futures = [pair.consumer.read(ticket, pair.destination, [11 - i]) for i, (ticket, _) in enumerate(published)]
    pair.settle()
    for future in futures:
        future.result(TIMEOUT_S)
    assert [pair.arrived([11 - i], PAGE_NBYTES) for i in range(NUM_PAGES)] == [content for _, content in published]


def test_a_worker_can_read_its_own_ticket(pair: Pair) -> None:
    ticket, content = pair.publish([8, 2], 1001)
    pair.read(ticket, [0, 1], pair.producer)
    assert pair.arrived([0, 1], 1001) == content


def test_pages_published_again_after_recycling_have_the_new_content_only(pair: Pair) -> None:
    old, _ = pair.publish([4], PAGE_NBYTES)
    pair.recycle([4])
    new, content = pair.publish([4], PAGE_NBYTES)
    assert content == bytes([0xEE]) * PAGE_NBYTES
    pair.read(new, [0])
    assert pair.arrived([0], PAGE_NBYTES) == content
    reason_of(lambda: pair.read(old, [1]))
    assert (pair.destination.pages[1] == UNTOUCHED).all()


def test_recycled_pages_are_never_delivered(pair: Pair) -> None:
    ticket, _ = pair.publish([4, 5], 2000)
    pair.recycle([5])
    expected = FailureReason.MISSING if pair.producer.name == "file" else FailureReason.STALE
    assert reason_of(lambda: pair.read(ticket, [0, 1])) is expected
    assert pair.is_untouched()


def test_a_closed_producer_is_a_lost_peer(pair: Pair) -> None:
    ticket, _ = pair.publish([4, 5], 2000)
    pair.producer.close()

    def read_until_lost() -> None:  # a read that overtakes the news of the death may still succeed
        while True:
            pair.read(ticket, [0, 1])

    assert reason_of(read_until_lost) is FailureReason.PEER_LOST


def test_a_lost_peer_does_not_stand_in_the_way_of_its_successor(pair: Pair) -> None:
    ticket, _ = pair.publish([4], PAGE_NBYTES)
    pair.read(ticket, [0])
    pair.producer.close()
    successor = pair.make("e0")
    successor.register("kv", pair.source)
    new = successor.publish("kv", [5], PAGE_NBYTES, 60.0)
    pair.read(new, [1])
    assert pair.arrived([1], PAGE_NBYTES) == pair.source.pages[5].tobytes()


def test_content_with_another_checksum_is_corrupt(pair: Pair) -> None:
    ticket, _ = pair.publish([4, 5], 2000)
    wrong = msgspec.structs.replace(ticket, checksum="0" * 16)
    assert reason_of(lambda: pair.read(wrong, [0, 1])) is FailureReason.CORRUPT


def publish_divisible(pair: Pair, pages: list[int], nbytes: int) -> Ticket:
    return pair.producer.publish("kv", pages, nbytes, lease_s=60.0, subject="r", is_divisible=True)


def test_a_divisible_ticket_has_a_checksum_for_each_page_and_its_subject(pair: Pair) -> None:
    ticket = publish_divisible(pair, [3, 9], 1500)
    contents = (pair.source.pages[3].tobytes(), pair.source.pages[9, :500].tobytes())
    assert ticket.page_checksums == tuple(blake3(content + b"r").hexdigest()[:16] for content in contents)
    assert ticket.checksum == ""


@pytest.mark.parametrize("num_skipped", [0, 1, 2])
def test_pages_that_a_reader_skips_are_not_read(pair: Pair, num_skipped: int) -> None:
    ticket = publish_divisible(pair, [3, 9, 4], 2500)
    if pair.producer.name != "file":  # whose file goes with the first of its pages
        pair.source.recycle([3, 9][:num_skipped])
    pages = [0, 5, 2][num_skipped:]
    future = pair.consumer.read(ticket, pair.destination, pages, num_skipped)
    pair.settle()
    future.result(TIMEOUT_S)
    content = b"".join(pair.source.pages[page].tobytes() for page in (3, 9, 4))[: ticket.nbytes]
    assert pair.arrived(pages, 2500 - num_skipped * PAGE_NBYTES) == content[num_skipped * PAGE_NBYTES :]
    assert (np.delete(pair.destination.pages, pages, axis=0) == UNTOUCHED).all()


@pytest.mark.parametrize("num_skipped", [0, 1])
def test_one_page_with_another_checksum_makes_what_was_read_corrupt_unless_it_was_skipped(pair: Pair, num_skipped: int) -> None:
    ticket = publish_divisible(pair, [3, 9], 2000)
    for place in (0, 1):
        checksums = [*ticket.page_checksums]
        checksums[place] = "0" * 16
        wrong = msgspec.structs.replace(ticket, page_checksums=tuple(checksums))
        future = pair.consumer.read(wrong, pair.destination, [0, 1][num_skipped:], num_skipped)
        pair.settle()
        if place < num_skipped:
            assert future.result(TIMEOUT_S) is None
        else:
            assert reason_of(lambda future=future: future.result(TIMEOUT_S)) is FailureReason.CORRUPT


@pytest.mark.parametrize("num_skipped", [1, 2, 3])
def test_a_ticket_that_is_not_divisible_or_not_that_long_is_not_read_in_part(pair: Pair, num_skipped: int) -> None:
    whole, _ = pair.publish([3, 9], 2000)
    divisible = publish_divisible(pair, [3, 9], 2000)
    tickets = (whole, divisible) if num_skipped > 2 else (whole,)
    for ticket in tickets:
        future = pair.consumer.read(ticket, pair.destination, [0, 1][num_skipped:], num_skipped)
        pair.settle()
        assert reason_of(lambda future=future: future.result(TIMEOUT_S)) is FailureReason.MISMATCH
    assert pair.is_untouched()


UNFIT: dict[str, dict[str, object]] = {
    "other page size": {"page_nbytes": PAGE_NBYTES - 8},
    "a page too few": {"pages": (4,), "generations": (0,)},
    "a generation too many": {"generations": (0, 0, 0)},
    "more bytes than pages": {"nbytes": 2001},
    "fewer bytes than pages": {"nbytes": 1000},
    "no bytes": {"nbytes": 0},
    "negative bytes": {"nbytes": -1},
    "a checksum of a page too few": {"checksum": "", "page_checksums": ("0" * 16,)},
    "on no plane": {"planes": {}},
    "on other planes": {"planes": {"smoke signals": "hill"}},
    "at no address": {"planes": {"shm": "", "file": "", "fake": ""}},
    "at somebody's path": {"planes": {"shm": "../..", "file": "../..", "fake": "../.."}},
}


@pytest.mark.parametrize("fault", UNFIT)
def test_a_ticket_that_does_not_fit_is_refused_before_a_byte_is_touched(pair: Pair, fault: str) -> None:
    ticket, _ = pair.publish([4, 5], 2000)
    wrong = msgspec.structs.replace(ticket, **UNFIT[fault])
    expected = FailureReason.MISMATCH
    if pair.consumer.name == "fake" and fault.startswith("at "):
        expected = FailureReason.PEER_LOST  # any address that nobody lives at
    assert reason_of(lambda: pair.read(wrong, [0, 1])) is expected
    assert pair.is_untouched()


@pytest.mark.parametrize("pages", [[0, NUM_PAGES], [-1, 0], [0], [0, 1, 2], [3, 3], []])
def test_destination_pages_that_do_not_fit_are_refused_before_a_byte_is_touched(pair: Pair, pages: list[int]) -> None:
    ticket, _ = pair.publish([4, 5], 2000)
    assert reason_of(lambda: pair.read(ticket, pages)) is FailureReason.MISMATCH
    assert pair.is_untouched()


UNKNOWN: dict[str, dict[str, object]] = {
    "another arena": {"arena": "ec"},
    "an endless name": {"arena": "a" * 10**6},
    "another worker": {"producer": "e1"},
    "pages past the end": {"pages": (NUM_PAGES - 1, NUM_PAGES)},
    "pages before the start": {"pages": (-1, 0)},
    "pages past every end": {"pages": (2**70, 2**70 + 1)},
}


@pytest.mark.parametrize("fault", UNKNOWN)
def test_a_ticket_for_what_the_producer_does_not_have_is_refused(pair: Pair, fault: str) -> None:
    ticket, _ = pair.publish([4, 5], 2000)
    wrong = msgspec.structs.replace(ticket, **UNKNOWN[fault])
    expected = FailureReason.MISSING if pair.producer.name == "file" else FailureReason.MISMATCH
    assert reason_of(lambda: pair.read(wrong, [0, 1])) is expected
    assert pair.is_untouched()
    pair.read(ticket, [0, 1])  # the next one is served as if nothing had been


def test_generations_that_never_were_are_refused(pair: Pair) -> None:
    ticket, _ = pair.publish([4, 5], 2000)
    wrong = msgspec.structs.replace(ticket, generations=(0, 2**80))
    expected = FailureReason.MISSING if pair.producer.name == "file" else FailureReason.STALE
    assert reason_of(lambda: pair.read(wrong, [0, 1])) is expected
    assert pair.is_untouched()


def test_an_arena_without_pages_can_be_registered_published_and_read(pair: Pair) -> None:
    empty = Arena.create("empty", 0, PAGE_NBYTES)
    pair.producer.register("ec", empty)
    ticket = pair.producer.publish("ec", [], 0, 60.0)
    future = pair.consumer.read(ticket, Arena.create("also empty", 0, PAGE_NBYTES), [])
    pair.settle()
    assert future.result(TIMEOUT_S) is None
    one = msgspec.structs.replace(ticket, pages=(0,), generations=(0,), nbytes=1)
    assert reason_of(lambda: pair.read(one, [0])) in (FailureReason.MISMATCH, FailureReason.MISSING)
    assert pair.is_untouched()


def test_content_that_does_not_fill_its_pages_cannot_be_published(pair: Pair) -> None:
    for nbytes in (0, 1000, 2001):
        with pytest.raises(InternalError):
            pair.producer.publish("kv", [0, 1], nbytes, 60.0)


def test_an_arena_is_registered_once(pair: Pair) -> None:
    with pytest.raises(InternalError):
        pair.producer.register("kv", pair.source)


def test_close_is_idempotent_and_reads_fail_after_it(pair: Pair) -> None:
    ticket, _ = pair.publish([4, 5], 2000)
    pair.consumer.close()
    pair.consumer.close()
    assert reason_of(lambda: pair.read(ticket, [0, 1])) is FailureReason.INTERNAL
    assert pair.is_untouched()


def test_everybody_elses_death_costs_a_producer_nothing(pair: Pair) -> None:
    ticket, content = pair.publish([4, 5], 2000)
    for name in ("p1", "p2"):
        reader = pair.make(name)
        pair.read(ticket, [0, 1], reader)
        reader.close()
    pair.read(ticket, [2, 3])
    assert pair.arrived([2, 3], 2000) == content
    assert pair.source.generations_of([4, 5]) == (0, 0)


def test_closing_gives_back_every_file_descriptor(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    producer, consumer = pair.make("e9"), pair.make("p9")
    producer.register("kv", pair.source)
    ticket = producer.publish("kv", [0], PAGE_NBYTES, 60.0)
    pair.read(ticket, [0], consumer)
    consumer.close()
    producer.close()
    assert len(os.listdir("/proc/self/fd")) <= before
