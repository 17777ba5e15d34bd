"""The scheduler's half of the encoder-cache connector: which items to load and to publish in a step.

What it decides on is in two tables: items that requests wait for (consumer_item.py), and items that are kept for peers (producer_item.py).
"""

from collections.abc import Iterable

from triptych.config import EngineConfig
from triptych.engine.consumer_item import ConsumerItem, ConsumerItems
from triptych.engine.encode_scheduler import PlannedEncodes
from triptych.engine.encoder_cache_manager import EncoderCacheManager
from triptych.output import EMPTY_EC_METADATA, ECConnectorMetadata, ECConnectorOutput, ECLoad, ECTicket

NEEDED_LOAD_TIMEOUT_S = 0.25  # a load from a producer that was read before is one copy in memory: it takes milliseconds


class ECConnectorScheduler:
    """Off: items come from this worker's own tower or not at all."""

    def announce(self, ticket: ECTicket, now: float) -> None:
        """A ticket came."""

    def plan_loads(self) -> dict[str, ECLoad]:
        """Reserve pages for what has arrived; the loads of this step, by key."""
        return {}

    def may_read_in_this_step(self, load: ECLoad) -> bool:
        """Whether a window of the step that starts the load may read its rows."""
        return False

    def finish_loads(self, output: ECConnectorOutput) -> None:
        """Take in what the loads gave: their items are resident, or failed and to be settled."""

    def metadata(self, loads: Iterable[ECLoad], encodes: PlannedEncodes) -> ECConnectorMetadata:
        return EMPTY_EC_METADATA


class ActiveECConnectorScheduler(ECConnectorScheduler):
    def __init__(self, cache: EncoderCacheManager, wanted: ConsumerItems, lease_s: float) -> None:
        self._cache = cache
        self._wanted = wanted
        self._lease_s = lease_s
        self._known_producers: set[str] = set()  # a load from them has succeeded: their memory is mapped

    def announce(self, ticket: ECTicket, now: float) -> None:
        if not self._cache.is_resident(ticket.key):
            self._wanted.announce(ticket, now)

    def plan_loads(self) -> dict[str, ECLoad]:
        loads: dict[str, ECLoad] = {}
        for item in self._wanted.arrived():
            load = self._reserve(item)
            if load is None:
                break  # first in line first: a smaller item behind must not take the room away
            loads[item.key] = load
        return loads

    def _reserve(self, item: ConsumerItem) -> ECLoad | None:
        assert item.ticket is not None
        pages = self._cache.allocate(item.key, item.ticket.num_rows, item.rank)
        if pages is None:
            return None
        self._wanted.start_loading(item.key)
        return ECLoad(item.ticket, pages, is_needed=False)

    def may_read_in_this_step(self, load: ECLoad) -> bool:
        return load.ticket.data.producer in self._known_producers

    def finish_loads(self, output: ECConnectorOutput) -> None:
        for key in output.finished_loads:
            self._known_producers.add(self._producer_of(key))
            self._cache.mark_resident(key)
        for key, reason in output.failed_loads.items():
            self._known_producers.discard(self._producer_of(key))
            self._cache.discard(key)
            self._wanted.fail(key, reason)

    def _producer_of(self, key: str) -> str:
        item = self._wanted.get(key)
        assert item is not None and item.ticket is not None, "a load ended that was not started"
        return item.ticket.data.producer

    def metadata(self, loads: Iterable[ECLoad], encodes: PlannedEncodes) -> ECConnectorMetadata:
        return ECConnectorMetadata(tuple(loads), encodes.saves, encodes.republish, self._lease_s, NEEDED_LOAD_TIMEOUT_S)


def get_ec_connector_scheduler(config: EngineConfig, cache: EncoderCacheManager, wanted: ConsumerItems) -> ECConnectorScheduler:
    """The active one where the role sends or takes; else the no-op."""
    if config.is_ec_producer or config.is_ec_consumer:
        return ActiveECConnectorScheduler(cache, wanted, config.connector.ec_lease_s)
    return ECConnectorScheduler()
