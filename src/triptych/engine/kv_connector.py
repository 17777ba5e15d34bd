"""The scheduler's half of the KV connector: which blocks to load or publish in a step, and who owns blocks that left their request.

prefill:  a request's blocks -> save (this step) -> published under a lease -> released or lapsed -> reclaimed
decode:   reserved blocks -> load (runs over several steps) -> the request's; if the request left meanwhile, the
          blocks are kept until the copy has ended, then reclaimed
"""

from collections.abc import Callable

from triptych.config import EngineConfig
from triptych.output import EMPTY_KV_METADATA, KVConnectorMetadata, KVLoad, KVSave, KVTicket
from triptych.transfer.lease import LeaseTable


class KVConnectorScheduler:
    """Off: nothing is ever loaded or published."""

    def plan(self) -> KVConnectorMetadata:
        return EMPTY_KV_METADATA

    def is_loading(self, request_id: str) -> bool:
        """Whether a copy under this id has not ended, be it for a request that has left."""
        return False

    @property
    def is_copying(self) -> bool:
        """Whether any copy has not ended."""
        return False

    def start_load(self, request_id: str, ticket: KVTicket, block_ids: tuple[int, ...]) -> None:
        raise AssertionError("a KV ticket reached a worker whose KV connector is off")

    def save(self, request_id: str, num_tokens: int, block_ids: tuple[int, ...]) -> None:
        raise AssertionError("a hand-over reached a worker whose KV connector is off")

    def abandon_load(self, request_id: str, block_ids: tuple[int, ...]) -> bool:
        """The request leaves. True if the copy still writes its blocks, which the connector then keeps."""
        return False

    def end_load(self, request_id: str) -> tuple[int, ...]:
        """The copy has ended, well or not: the blocks of a request that left meanwhile."""
        return ()

    def keep(self, request_id: str, block_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Own the published blocks under a lease. The blocks of an earlier lease of the same id, which ends."""
        raise AssertionError("a hand-over reached a worker whose KV connector is off")

    def release(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a lease that ends now; none if it has ended already."""
        return ()

    def expire(self) -> tuple[int, ...]:
        """The blocks of all leases that have lapsed."""
        return ()

    def next_deadline(self) -> float | None:
        return None

    @property
    def num_leases(self) -> int:
        return 0

    @property
    def num_leases_expired(self) -> int:
        return 0


class ActiveKVConnectorScheduler(KVConnectorScheduler):
    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._leases = LeaseTable(clock)
        self._published: dict[str, tuple[int, ...]] = {}
        self._loads: list[KVLoad] = []  # of the next step
        self._saves: list[KVSave] = []
        self._in_flight: set[str] = set()
        self._abandoned: dict[str, tuple[int, ...]] = {}

    def is_loading(self, request_id: str) -> bool:
        return request_id in self._in_flight

    @property
    def is_copying(self) -> bool:
        return bool(self._in_flight)

    @property
    def num_leases(self) -> int:
        return len(self._published)

    @property
    def num_leases_expired(self) -> int:
        return self._leases.num_expired

    def plan(self) -> KVConnectorMetadata:
        if not self._loads and not self._saves:
            return EMPTY_KV_METADATA
        metadata = KVConnectorMetadata(tuple(self._loads), tuple(self._saves), self._lease_s)
        self._in_flight.update(load.request_id for load in self._loads)
        self._loads, self._saves = [], []
        return metadata

    def start_load(self, request_id: str, ticket: KVTicket, block_ids: tuple[int, ...]) -> None:
        self._loads.append(KVLoad(request_id, ticket, block_ids))

    def save(self, request_id: str, num_tokens: int, block_ids: tuple[int, ...]) -> None:
        self._saves.append(KVSave(request_id, num_tokens, block_ids))

    def abandon_load(self, request_id: str, block_ids: tuple[int, ...]) -> bool:
        self._loads = [load for load in self._loads if load.request_id != request_id]
        if request_id not in self._in_flight:
            return False
        self._abandoned[request_id] = block_ids
        return True

    def end_load(self, request_id: str) -> tuple[int, ...]:
        self._in_flight.discard(request_id)
        return self._abandoned.pop(request_id, ())

    def keep(self, request_id: str, block_ids: tuple[int, ...]) -> tuple[int, ...]:
        earlier = self.release(request_id)
        self._published[request_id] = block_ids
        self._leases.grant(request_id, self._lease_s)
        return earlier

    def release(self, request_id: str) -> tuple[int, ...]:
        self._leases.release(request_id)
        return self._published.pop(request_id, ())

    def expire(self) -> tuple[int, ...]:
        lapsed: list[int] = []
        for request_id in self._leases.expired():
            lapsed.extend(self._published.pop(request_id, ()))
        return tuple(lapsed)

    def next_deadline(self) -> float | None:
        return self._leases.next_deadline()


def get_kv_connector_scheduler(config: EngineConfig, clock: Callable[[], float]) -> KVConnectorScheduler:
    """The active one where the role sends or takes; else the no-op."""
    if config.is_kv_producer or config.is_kv_consumer:
        return ActiveKVConnectorScheduler(config.connector.kv_lease_s, clock)
    return KVConnectorScheduler()
