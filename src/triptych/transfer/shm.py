"""`ShmDataPlane`: between processes of one host, by copying out of the producer's mapped memory.

The producer does nothing for a read once its arena is mapped: the copy is made by the consumer's threads, and the generations in
the shared header say whether it was in time (see `arena.py`). First contact and the peer's death are `arena_exchange.py`'s.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from triptych.errors import TransferError
from triptych.transfer.arena import Arena
from triptych.transfer.arena_exchange import ArenaExchange
from triptych.transfer.arena_registry import ArenaRegistry
from triptych.transfer.data_plane import DataPlane
from triptych.transfer.read_checks import check_after, check_before, check_ticket, copy_pages, part_to_read
from triptych.transfer.read_pool import ReadPool
from triptych.transfer.ticket import Ticket


class ShmDataPlane(DataPlane):
    """`connect_timeout_s` bounds the first contact with a producer; reads after it need nothing from the producer's process."""

    name = "shm"

    def __init__(
        self, worker_id: str, num_threads: int = 2, verify_checksums: bool = True, connect_timeout_s: float = 5.0
    ) -> None:
        super().__init__(ArenaRegistry(worker_id, with_checksums=verify_checksums))
        self._verify_checksums = verify_checksums
        self._exchange = ArenaExchange(self._registry, timeout_s=connect_timeout_s)
        self._pool = ReadPool(num_threads, "shm-read")

    @property
    def address(self) -> str:
        return self._exchange.address

    def read(self, ticket: Ticket, arena: Arena, pages: Sequence[int], num_skipped: int = 0) -> "Future[None]":
        result: Future[None] = Future()
        try:
            ticket = part_to_read(ticket, num_skipped)
            address = check_ticket(ticket, self.name, arena, pages)
            source = self._source_of(ticket, address)
        except TransferError as error:
            result.set_exception(error)
            return result
        copy = partial(self._copy, ticket, arena, tuple(pages))
        # No thread waits for a producer's answer: the copy is queued once there is something to copy from.
        source.add_done_callback(lambda source: self._pool.start(result, partial(copy, source)))
        return result

    def close(self) -> None:
        self._exchange.close()
        self._pool.close()

    def _source_of(self, ticket: Ticket, address: str) -> "Future[Arena]":
        """The producer's arena; this worker's own needs no mapping."""
        if address != self.address:
            return self._exchange.obtain(address, ticket.producer, ticket.arena)
        own: Future[Arena] = Future()
        own.set_result(self._registry.get(ticket.arena))
        return own

    def _copy(self, ticket: Ticket, arena: Arena, pages: tuple[int, ...], obtained: "Future[Arena]") -> None:
        source = obtained.result()
        check_before(ticket, source)
        copy_pages(source.pages, ticket.pages, arena.pages, pages, ticket.nbytes)
        check_after(ticket, source, arena, pages, nbytes_arrived=ticket.nbytes, verify_checksum=self._verify_checksums)
