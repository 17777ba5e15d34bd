"""`FakeDataPlane` and its `FakeNetwork`: reads that happen when a test says so, and go wrong when it says so.

Reproduced: real arenas, real tickets, the same checks and the same copy as the shm data plane; delay, loss and reordering of reads;
content cut short; copies that are half done while their producer goes on; the death of a worker, after which reads from
it fail at once; addresses that are never used again.

Not reproduced: threads (all happens in the caller's, inside `begin`, `deliver` and `tick`), other processes, a first contact
that takes time or times out, and the throughput of anything.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from triptych.errors import FailureReason, TransferError
from triptych.transfer.arena import Arena
from triptych.transfer.arena_registry import ArenaRegistry
from triptych.transfer.data_plane import DataPlane
from triptych.transfer.read_checks import check_after, check_before, check_ticket, copy_pages, part_to_read
from triptych.transfer.ticket import Ticket

_SCRIBBLE = 0xEE


@dataclass(slots=True, eq=False)
class FakeRead:
    """A read under way. Tests change `num_ticks`, `nbytes_cut` and `is_recycled_during` before it is delivered."""

    ticket: Ticket
    address: str
    arena: Arena
    pages: tuple[int, ...]
    consumer: "FakeDataPlane"
    num_ticks: int  # until `tick` delivers it
    nbytes_cut: int = 0  # bytes that do not arrive
    is_recycled_during: bool = False  # the producer gives the pages up, and overwrites them, between the two checks
    has_begun: bool = False
    result: "Future[None]" = field(default_factory=Future[None])

    @property
    def nbytes_arriving(self) -> int:
        return max(0, self.ticket.nbytes - self.nbytes_cut)


class FakeNetwork:
    """All that happens between its planes. `pending` holds the reads under way, in the order in which they were started."""

    def __init__(self, num_ticks: int = 1) -> None:
        self.num_ticks = num_ticks  # what a new read takes; one that takes none is done when it is started
        self.pending: list[FakeRead] = []
        self._dropped: list[FakeRead] = []
        self._planes: dict[str, FakeDataPlane] = {}  # those alive, by address
        self._num_addresses = 0

    def begin(self, read: FakeRead) -> None:
        """Make the first check and copy the first half of the pages; `deliver` does the rest. It cannot be cancelled any more."""
        read.has_begun = True
        if not read.result.set_running_or_notify_cancel():
            self._forget(read)
            return
        try:
            _copy_first_half(read, self._source_of(read))
        except TransferError as error:
            self._end(read, error)

    def deliver(self, *reads: FakeRead) -> None:
        """Finish these reads, in this order (any order is possible); without arguments, all that are pending."""
        for read in reads or tuple(self.pending):
            if not read.has_begun:
                self.begin(read)
            if read.result.done():  # cancelled, or failed at the first check
                continue
            try:
                _copy_second_half(read, self._source_of(read))
            except TransferError as error:
                self._end(read, error)
            else:
                self._end(read, None)

    def tick(self) -> None:
        """One step of time: deliver the reads that are due."""
        for read in self.pending:
            read.num_ticks -= 1
        due = [read for read in self.pending if read.num_ticks <= 0]
        if due:
            self.deliver(*due)

    def drop(self, read: FakeRead) -> None:
        """Its content never comes: it is under way until `give_up`."""
        self.pending.remove(read)
        self._dropped.append(read)

    def give_up(self) -> None:
        """End the dropped reads as TIMEOUT, as a real data plane does with each in bounded time."""
        for read in tuple(self._dropped):
            if read.has_begun or read.result.set_running_or_notify_cancel():
                self._end(read, TransferError(FailureReason.TIMEOUT, f"{read.ticket.producer} does not answer."))
            else:
                self._forget(read)

    def kill(self, producer: str) -> None:
        """The worker dies: reads from it that are under way fail now, later ones at once."""
        for plane in [plane for plane in self._planes.values() if plane.worker_id == producer]:
            self.detach(plane)

    def attach(self, plane: "FakeDataPlane") -> str:
        """A new plane's address."""
        self._num_addresses += 1
        address = f"fake-{self._num_addresses}"
        self._planes[address] = plane
        return address

    def detach(self, plane: "FakeDataPlane") -> None:
        """The plane is closed, or its worker dead."""
        if self._planes.pop(plane.address, None) is None:
            return
        for read in [*self.pending, *self._dropped]:
            if read.address == plane.address or read.consumer is plane:
                self.deliver(read)

    def start(self, read: FakeRead) -> None:
        """A read from a worker that is dead, or by one, fails at once."""
        self.pending.append(read)
        if read.num_ticks <= 0 or read.address not in self._planes or read.consumer.address not in self._planes:
            self.deliver(read)

    def _source_of(self, read: FakeRead) -> Arena:
        if read.consumer.address not in self._planes:
            raise TransferError(FailureReason.INTERNAL, "the data plane was closed.")
        if read.address not in self._planes:
            raise TransferError(FailureReason.PEER_LOST, f"{read.ticket.producer} is dead.")
        return self._planes[read.address].arena_of(read.ticket)

    def _end(self, read: FakeRead, error: TransferError | None) -> None:
        self._forget(read)
        if error is None:
            read.result.set_result(None)
        else:
            read.result.set_exception(error)

    def _forget(self, read: FakeRead) -> None:
        for reads in (self.pending, self._dropped):
            if read in reads:
                reads.remove(read)


def _copy_first_half(read: FakeRead, source: Arena) -> None:
    check_before(read.ticket, source)
    half = len(read.pages) // 2
    nbytes = min(half * source.page_nbytes, read.nbytes_arriving)
    copy_pages(source.pages, read.ticket.pages[:half], read.arena.pages, read.pages[:half], nbytes)


def _copy_second_half(read: FakeRead, source: Arena) -> None:
    ticket, half = read.ticket, len(read.pages) // 2
    if read.is_recycled_during:
        source.recycle(ticket.pages)
        source.pages[list(ticket.pages)] = _SCRIBBLE
    nbytes = max(0, read.nbytes_arriving - half * source.page_nbytes)
    copy_pages(source.pages, ticket.pages[half:], read.arena.pages, read.pages[half:], nbytes)
    verify = read.consumer.verify_checksums
    check_after(ticket, source, read.arena, read.pages, nbytes_arrived=read.nbytes_arriving, verify_checksum=verify)


class FakeDataPlane(DataPlane):
    name = "fake"

    def __init__(self, worker_id: str, network: FakeNetwork, verify_checksums: bool = True) -> None:
        super().__init__(ArenaRegistry(worker_id, with_checksums=verify_checksums))
        self.verify_checksums = verify_checksums
        self._network = network
        self._address = network.attach(self)

    @property
    def address(self) -> str:
        return self._address

    def read(self, ticket: Ticket, arena: Arena, pages: Sequence[int], num_skipped: int = 0) -> "Future[None]":
        try:
            ticket = part_to_read(ticket, num_skipped)
            address = check_ticket(ticket, self.name, arena, pages)
        except TransferError as error:
            refused: Future[None] = Future()
            refused.set_exception(error)
            return refused
        read = FakeRead(ticket, address, arena, tuple(pages), self, self._network.num_ticks)
        self._network.start(read)
        return read.result

    def close(self) -> None:
        self._network.detach(self)

    def arena_of(self, ticket: Ticket) -> Arena:
        """Raises `TransferError` (MISMATCH) if the ticket is another worker's or names an arena that this one has not got."""
        if ticket.producer != self.worker_id:
            raise TransferError(FailureReason.MISMATCH, f"the ticket names {ticket.producer}, but {self.worker_id} lives there.")
        return self._registry.get(ticket.arena)
