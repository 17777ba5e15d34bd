"""The scheduler's half of the KV connector: which blocks to load or publish in a step, and who owns blocks that left their request.

prefill:  a request's blocks -> save (this step) -> published under a lease -> released or lapsed -> reclaimed
decode:   reserved blocks -> loads, one per part (they run over several steps) -> the request's; if the request left meanwhile,
          the blocks of each part are kept until its copy has ended, then reclaimed
"""

from collections.abc import Callable

from triptych.config import EngineConfig
from triptych.output import EMPTY_KV_METADATA, KVConnectorMetadata, KVLoad, KVPart, KVSave
from triptych.transfer.lease import LeaseTable


class KVConnectorScheduler:
    """Off: nothing is ever loaded or published."""

    def plan(self) -> KVConnectorMetadata:
        return EMPTY_KV_METADATA

    def is_loading(self, request_id: str) -> bool:
        """Whether a copy under this id has not ended, be it for a request that has left."""
        return False

    @property
    def written_block_ids(self) -> frozenset[int]:
        """Blocks into which copies are under way."""
        return frozenset()

    @property
    def has_abandoned(self) -> bool:
        """Whether a copy for a request that has left has not ended."""
        return False

    def start_load(self, load: KVLoad) -> None:
        raise AssertionError("a KV ticket reached a worker whose KV connector is off")

    def save(self, save: KVSave) -> None:
        raise AssertionError("a hand-over reached a worker whose KV connector is off")

    def abandon_loads(self, request_id: str) -> frozenset[int]:
        """The request leaves. The blocks that copies still write, which the connector keeps."""
        return frozenset()

    def end_load(self, part: KVPart) -> tuple[int, ...]:
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
        self._in_flight: dict[KVPart, tuple[int, ...]] = {}  # the blocks that its copy writes
        self._abandoned: set[KVPart] = set()  # of those in flight

    def is_loading(self, request_id: str) -> bool:
        return any(id == request_id for id, _ in self._in_flight)

    @property
    def written_block_ids(self) -> frozenset[int]:
        return frozenset(block_id for block_ids in self._in_flight.values() for block_id in block_ids)

    @property
    def has_abandoned(self) -> bool:
        return bool(self._abandoned)

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
        self._in_flight.update((load.part, load.block_ids) for load in self._loads)
        self._loads, self._saves = [], []
        return metadata

    def start_load(self, load: KVLoad) -> None:
        self._loads.append(load)

    def save(self, save: KVSave) -> None:
        self._saves.append(save)

    def abandon_loads(self, request_id: str) -> frozenset[int]:
        self._loads = [load for load in self._loads if load.request_id != request_id]
        parts = [part for part in self._in_flight if part[0] == request_id]
        self._abandoned.update(parts)
        return frozenset(block_id for part in parts for block_id in self._in_flight[part])

    def end_load(self, part: KVPart) -> tuple[int, ...]:
        block_ids = self._in_flight.pop(part, ())
        if part not in self._abandoned:
            return ()
        self._abandoned.remove(part)
        return block_ids

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
