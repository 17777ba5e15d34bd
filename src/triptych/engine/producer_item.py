"""`ProducerItems`: the items that this worker keeps for peers: who holds a lease on which, and who is still to get a ticket.

                encoded and published                last lease released or lapsed
    ENCODING ----------------------> PUBLISHED(leases) ---------------------------> absent: EVICTABLE, then gone
    in the encode queue               ^      |                                        |
                     next step, ticket|      | encode asked again                     | encode asked again
                                      |      v                                        |
                                      ASKED(callers) <--------------------------------+

ENCODING is the encode queue's to know (`EncodeState`), EVICTABLE the encoder cache's (`EntryState`). An item is in this table as long as
somebody holds a lease on it or waits for its ticket, and just as long it has one pin in the encoder cache that yields to nobody.

A call for an item that is resident is answered by the next step, which publishes it again: an earlier ticket may have outlived what the data
plane keeps under it. That wait needs no deadline, as the step that a call wakes answers it, well or not. One encode id holds one thing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from triptych.engine.encoder_cache_manager import EncoderCacheManager
from triptych.transfer.lease import LeaseTable

PEERS = "peers"  # the holder of the pins


class ProducerState(Enum):
    ASKED = auto()  # the next step makes a ticket; there may be leases for earlier ones
    PUBLISHED = auto()


@dataclass(slots=True)
class ProducerItem:
    key: str
    asked_by: list[str] = field(default_factory=list[str])  # encode ids
    leases: set[str] = field(default_factory=set[str])  # encode ids

    @property
    def state(self) -> ProducerState | None:
        """None if nobody holds it any more."""
        if self.asked_by:
            return ProducerState.ASKED
        return ProducerState.PUBLISHED if self.leases else None


class ProducerItems:
    def __init__(self, cache: EncoderCacheManager, lease_s: float, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._lease_s = lease_s
        self._leases = LeaseTable(clock)
        self._items: dict[str, ProducerItem] = {}
        self._key_of: dict[str, str] = {}  # encode id -> the item that it holds

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_leases_expired(self) -> int:
        return self._leases.num_expired

    def state(self, key: str) -> ProducerState | None:
        item = self._items.get(key)
        return None if item is None else item.state

    def ask(self, key: str, encode_id: str) -> None:
        """Have the next step publish a resident item for the one who called for it."""
        self._hold(key, encode_id).asked_by.append(encode_id)

    def lease(self, key: str, encode_id: str) -> None:
        """Keep a published item for the one who called for it, from now on."""
        self._hold(key, encode_id).leases.add(encode_id)
        self._leases.grant(encode_id, self._lease_s)

    def asked(self) -> tuple[str, ...]:
        """The items that are to be published again."""
        return tuple(key for key, item in self._items.items() if item.state == ProducerState.ASKED)

    def take_callers(self, key: str) -> list[str]:
        """Those who wait for the item's ticket, which is made now, or cannot be made."""
        item = self._items.get(key)
        callers = list(item.asked_by) if item is not None else []
        for encode_id in callers:
            self.leave(encode_id)
        return callers

    def leave(self, encode_id: str) -> str | None:
        """End what `encode_id` holds, if anything; the key of the item whose ticket it still waited for."""
        self._leases.release(encode_id)
        key = self._key_of.pop(encode_id, None)
        if key is None:
            return None
        item = self._items[key]
        was_asking = encode_id in item.asked_by
        if was_asking:
            item.asked_by.remove(encode_id)
        item.leases.discard(encode_id)
        if item.state is None:
            del self._items[key]
            self._cache.unpin(key, PEERS)
        return key if was_asking else None

    def expire(self) -> None:
        for encode_id in self._leases.expired():
            self.leave(encode_id)

    def next_deadline(self) -> float | None:
        return self._leases.next_deadline()

    def _hold(self, key: str, encode_id: str) -> ProducerItem:
        self.leave(encode_id)  # an id that is used again gives up what it held
        self._cache.pin(key, PEERS)
        self._key_of[encode_id] = key
        return self._items.setdefault(key, ProducerItem(key))

    def check_invariants(self) -> None:
        holds = {encode_id: key for key, item in self._items.items() for encode_id in (*item.asked_by, *item.leases)}
        assert holds == self._key_of, "an encode id holds something that it cannot give back"
        assert sum(len(item.asked_by) + len(item.leases) for item in self._items.values()) == len(holds), "an id holds two things"
        assert sum(len(item.leases) for item in self._items.values()) == len(self._leases), (
            "a lease without deadline, or the reverse"
        )
        assert self._cache.keys_pinned_by(PEERS) == set(self._items), "an item is kept for nobody, or is not kept"
        assert all(item.state is not None for item in self._items.values()), "an item is remembered for nobody"
