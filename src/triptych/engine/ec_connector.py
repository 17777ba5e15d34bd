"""The scheduler's half of the encoder-cache connector: what to load and publish in a step, and what is kept for peers.

As consumer it leads an item from the first want to residency (item_table.py). As producer it keeps published items under leases:

    encode called -> resident -> published: a ticket, and a lease of `lease_s` per call -> released or lapsed -> evictable

The lease is a pin in the encoder cache. A second call for the same item publishes it again under a lease of its own; nothing is prepared
or encoded twice.
"""

from collections.abc import Callable, Iterable

from triptych.config import EngineConfig
from triptych.engine.encoder_cache_manager import LAST, EncoderCacheManager, Rank
from triptych.engine.item_table import ItemTable, WantedItem
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import EMPTY_EC_METADATA, ECConnectorMetadata, ECConnectorOutput, ECLoad, ECTicket
from triptych.transfer.lease import LeaseTable

NEEDED_LOAD_TIMEOUT_S = 0.25  # a load from a producer that was read before is one copy in memory: it takes milliseconds


class ECConnectorScheduler:
    """Off: items come from this worker's own tower or not at all. The waits and their deadlines are the same."""

    def __init__(self, cache: EncoderCacheManager, timeout_s: float) -> None:
        self._cache = cache
        self._table = ItemTable(timeout_s)

    # --- waits

    def want(self, item: MediaItem, request_id: str, rank: Rank, now: float) -> bool:
        """Wait for an item that is not resident. True if the request must say so: this is its first want, and no ticket is here."""
        is_new = not self._table.is_wanted_by(item.key, request_id)
        return self._table.want(item, request_id, rank, now).ticket is None and is_new

    def leave(self, request_id: str) -> None:
        self._table.leave(request_id)

    def rank_of(self, key: str) -> Rank:
        """The rank of the first in line who waits for the item; LAST if nobody does."""
        item = self._table.get(key)
        return item.rank if item is not None and item.waiters else LAST

    def seconds_since_announced(self, key: str, now: float) -> float:
        """How long the ticket of an item that requests wait for has been here; 0 without one."""
        item = self._table.get(key)
        return now - item.announced_at if item is not None and item.ticket is not None else 0.0

    def became_resident(self, key: str) -> dict[str, Rank]:
        """The item's waiters, with their ranks."""
        return self._table.finish(key)

    def expired_waits(self, now: float) -> list[tuple[str, str]]:
        return self._table.expired(now)

    def next_deadline(self) -> float | None:
        return self._table.next_deadline()

    # --- consumer

    def announce(self, ticket: ECTicket, now: float) -> None:
        """A ticket came. Nothing is taken from others here."""

    def plan_loads(self) -> dict[str, ECLoad]:
        """Reserve pages for what has arrived; the loads of this step, by key."""
        return {}

    def may_read_in_this_step(self, load: ECLoad) -> bool:
        """Whether a window of the step that starts the load may read its rows."""
        return False

    def finish_loads(self, output: ECConnectorOutput) -> dict[str, FailureReason]:
        """Take in what the step's loads gave; the failed ones, whose waiters wait on if the reason is retryable."""
        return {}

    def fail(self, key: str) -> tuple[str, ...]:
        """A load failed: its waiters wait for another ticket."""
        return ()

    # --- producer

    def lease(self, encode_id: str, ticket: ECTicket) -> None:
        """Keep a published item for the one who called for it."""

    def release(self, encode_id: str) -> None:
        """End a lease; nothing happens if it has ended."""

    def expire_leases(self) -> None: ...

    def metadata(self, loads: Iterable[ECLoad], saves: Iterable[str], republish: Iterable[str]) -> ECConnectorMetadata:
        return EMPTY_EC_METADATA

    @property
    def is_producer(self) -> bool:
        return False

    @property
    def num_waits(self) -> int:
        return self._table.num_waits

    @property
    def num_leases(self) -> int:
        return 0

    def check_invariants(self) -> None:
        self._table.check_invariants()


class ActiveECConnectorScheduler(ECConnectorScheduler):
    def __init__(
        self, cache: EncoderCacheManager, timeout_s: float, lease_s: float, is_producer: bool, clock: Callable[[], float]
    ) -> None:
        super().__init__(cache, timeout_s)
        self._lease_s = lease_s
        self._is_producer = is_producer
        self._leases = LeaseTable(clock)
        self._leased_keys: dict[str, str] = {}  # encode id -> key
        self._misfits: dict[str, FailureReason] = {}  # found in this step: tickets of another size than the requests' items
        self._known_producers: set[str] = set()  # a load from them has succeeded: their memory is mapped

    # --- consumer

    def announce(self, ticket: ECTicket, now: float) -> None:
        if not self._cache.is_known(ticket.key):
            self._table.announce(ticket.key, ticket, now)

    def plan_loads(self) -> dict[str, ECLoad]:
        loads: dict[str, ECLoad] = {}
        for item in self._table.arrived():
            if self._cache.is_known(item.key):  # our own tower has it, or is at it
                continue
            if not item.fits:
                self._misfits[item.key] = FailureReason.MISMATCH
                continue
            load = self._reserve(item)
            if load is None:
                break  # first in line first: a smaller item behind must not take the room away
            loads[item.key] = load
        return loads

    def _reserve(self, item: WantedItem) -> ECLoad | None:
        assert item.ticket is not None
        pages = self._cache.allocate(item.key, item.ticket.num_rows, item.rank)
        if pages is None:
            return None
        self._table.start_loading(item.key)
        return ECLoad(item.ticket, pages, is_needed=False)

    def may_read_in_this_step(self, load: ECLoad) -> bool:
        return load.ticket.data.producer in self._known_producers

    def finish_loads(self, output: ECConnectorOutput) -> dict[str, FailureReason]:
        for key in output.finished_loads:
            item = self._table.get(key)
            if item is not None and item.ticket is not None:
                self._known_producers.add(item.ticket.data.producer)
            self._cache.mark_resident(key)
        for key in output.failed_loads:
            self._cache.discard(key)
        misfits, self._misfits = self._misfits, {}
        return output.failed_loads | misfits

    def fail(self, key: str) -> tuple[str, ...]:
        item = self._table.get(key)
        if item is None:
            return ()
        if item.ticket is not None:
            self._known_producers.discard(item.ticket.data.producer)
        return self._table.fail(key)

    # --- producer

    def lease(self, encode_id: str, ticket: ECTicket) -> None:
        self._end_lease(encode_id)  # an id that is used again gives up what it held
        self._leases.grant(encode_id, self._lease_s)
        self._leased_keys[encode_id] = ticket.key
        self._cache.pin(ticket.key, _lease_holder(encode_id))

    def release(self, encode_id: str) -> None:
        self._leases.release(encode_id)
        self._end_lease(encode_id)

    def expire_leases(self) -> None:
        for encode_id in self._leases.expired():
            self._end_lease(encode_id)

    def _end_lease(self, encode_id: str) -> None:
        key = self._leased_keys.pop(encode_id, None)
        if key is not None:
            self._cache.unpin(key, _lease_holder(encode_id))

    def metadata(self, loads: Iterable[ECLoad], saves: Iterable[str], republish: Iterable[str]) -> ECConnectorMetadata:
        return ECConnectorMetadata(tuple(loads), tuple(saves), tuple(republish), self._lease_s, NEEDED_LOAD_TIMEOUT_S)

    def next_deadline(self) -> float | None:
        deadlines = [each for each in (super().next_deadline(), self._leases.next_deadline()) if each is not None]
        return min(deadlines, default=None)

    @property
    def is_producer(self) -> bool:
        return self._is_producer

    @property
    def num_leases(self) -> int:
        return len(self._leased_keys)


def _lease_holder(encode_id: str) -> str:
    return f"lease:{encode_id}"


def get_ec_connector_scheduler(
    config: EngineConfig, cache: EncoderCacheManager, clock: Callable[[], float]
) -> ECConnectorScheduler:
    """The active one where the role sends or takes; else the no-op."""
    connector = config.connector
    if config.is_ec_producer or config.is_ec_consumer:
        return ActiveECConnectorScheduler(cache, connector.ec_timeout_s, connector.ec_lease_s, config.is_ec_producer, clock)
    return ECConnectorScheduler(cache, connector.ec_timeout_s)
