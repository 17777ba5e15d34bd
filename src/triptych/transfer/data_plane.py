"""`DataPlane`: the one interface through which arenas are read from afar.

A producer registers its arenas and makes tickets; a consumer reads a ticket's pages into pages of its own arena. Reads are
one-sided: the producer takes no part in them and needs no acknowledgement, since the ticket carries generations which
the consumer compares before and after its copy.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

from triptych.transfer.arena import Arena
from triptych.transfer.arena_registry import ArenaRegistry
from triptych.transfer.ticket import Ticket


class DataPlane(ABC):
    """Thread-safe. One per worker and plane; `close` ends its threads and forgets its peers."""

    name: str

    def __init__(self, registry: ArenaRegistry) -> None:
        self._registry = registry
        self.worker_id = registry.worker_id

    @property
    @abstractmethod
    def address(self) -> str:
        """Where peers reach this worker's arenas on this plane; goes into tickets."""

    def register(self, name: str, arena: Arena) -> None:
        """Make `arena` readable by peers under `name`. At most once per name."""
        self._registry.add(name, arena)

    def publish(
        self, name: str, pages: Sequence[int], nbytes: int, lease_s: float, subject: str = "", *, is_divisible: bool = False
    ) -> Ticket:
        """A ticket for the content of `pages` of the registered arena `name`. The pages must not change while it is leased.

        `subject` says what the content is, and goes into the checksum: a ticket for something else cannot stand for it. Of a ticket that
        `is_divisible`, a reader may skip the first pages: each page has a checksum of its own.
        """
        planes = {self.name: self.address}
        return self._registry.make_ticket(name, pages, nbytes, lease_s, planes, subject, is_divisible=is_divisible)

    @abstractmethod
    def read(self, ticket: Ticket, arena: Arena, pages: Sequence[int], num_skipped: int = 0) -> "Future[None]":
        """Start to copy the ticket's content, less its first `num_skipped` pages, into `pages` of the consumer's `arena`; returns at once.

        The future ends in bounded time, and raises `TransferError` with STALE, PEER_LOST, CORRUPT, MISMATCH (page sizes or counts do
        not fit, or the ticket is not divisible; checked before a byte is touched), MISSING or TIMEOUT (the producer's process does not
        answer). Until it is done, nobody else may use the destination pages; after a failure their content is undefined.
        """

    @abstractmethod
    def close(self) -> None:
        """Idempotent, in bounded time: reads under way end with an error. Close it before the arenas."""
