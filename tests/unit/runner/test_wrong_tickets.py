"""Tickets that are wrong in one or two fields, from the door to the arena: refused with a type, or right; no byte changes elsewhere.

At the door they have lost their seal. Behind it nobody looks at seals: what is loaded here could come from a producer's bug, or from somebody
who knows the secret.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ticket_faults import altered
from transfer_rig import NUM_PAGES, ROWS_PER_PAGE, UNTOUCHED, Pair, config_of, pair_of

from triptych.config import EngineConfig
from triptych.engine.admission import check_ec_ticket, check_kv_ticket
from triptych.errors import FailureReason, RequestError
from triptych.output import (
    ECConnectorMetadata,
    ECLoad,
    ECTicket,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVLoad,
    KVSave,
    KVTicket,
    SchedulerOutput,
    sealed,
)
from triptych.runner.ec_connector import ActiveECConnector
from triptych.runner.kv_cache import KVCache
from triptych.runner.kv_connector import ActiveKVConnector, get_kv_connector
from triptych.transfer.arena import Arena
from triptych.transfer.fake import FakeDataPlane, FakeNetwork

KEY, OTHER = "a" * 64, "b" * 64
SOURCE, PAGES, NUM_ROWS = (3, 9), (1, 0), 6
LOAD_FAILURES = set(FailureReason) - {FailureReason.INTERNAL, FailureReason.BAD_MEDIA, FailureReason.EVICTED}


def draw_wrong(data: st.DataObject, ticket: Any) -> Any:
    """Changed in one field or two."""
    wrong = ticket
    for _ in range(data.draw(st.integers(1, 2))):
        wrong = data.draw(altered(wrong))[1]
    assume(wrong != ticket)
    return wrong


# --- items


@dataclass
class Published:
    """An item, with a neighbour in the producer's arena and directory, and a consumer that nothing has come to."""

    pair: Pair
    ticket: ECTicket
    rows: torch.Tensor
    connector: ActiveECConnector

    @property
    def config(self) -> EngineConfig:
        return self.pair.consumer.config

    def load(self, ticket: ECTicket) -> tuple[set[str], dict[str, FailureReason]]:
        """What has arrived and what has failed, after the load has ended."""
        metadata = ECConnectorMetadata(loads=(ECLoad(ticket, PAGES, is_needed=False),))
        with self.connector.step(SchedulerOutput(ec_connector_metadata=metadata)) as first:
            self.pair.network.deliver()
        self.connector._reads.wait([ticket.key], 10.0)  # pyright: ignore[reportPrivateUsage]
        with self.connector.step(SchedulerOutput()) as second:
            pass
        return first.finished_loads | second.finished_loads, first.failed_loads | second.failed_loads

    def forget_all(self) -> None:
        self.pair.consumer.cache.reset()
        self.pair.consumer.cache.arena.pages[:] = UNTOUCHED


@pytest.fixture(scope="module", params=["fake", "file"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    with pair_of(request.param, tmp_path_factory.mktemp("items")) as pair:
        ticket, rows = pair.publish(KEY, SOURCE, NUM_ROWS)
        pair.publish(OTHER, (4, 8), NUM_ROWS, seed=2)
        consumer = pair.consumer
        yield Published(pair, ticket, rows, ActiveECConnector(consumer.config, consumer.cache, consumer.transfer, lambda: None))


def test_a_ticket_that_is_right_is_taken_at_the_door_and_loaded(published: Published) -> None:
    published.forget_all()
    check_ec_ticket(published.ticket, published.config)
    assert published.load(published.ticket) == ({KEY}, {})
    assert torch.equal(published.pair.arrived(PAGES, NUM_ROWS), published.rows)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_an_item_of_a_wrong_ticket_is_refused_at_the_door(published: Published, data: st.DataObject) -> None:
    wrong = draw_wrong(data, published.ticket)
    with pytest.raises(RequestError) as caught:
        check_ec_ticket(wrong, published.config)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_an_item_of_a_wrong_ticket_behind_the_door_is_refused_with_a_type_or_right_and_nothing_else_is_written(
    published: Published, data: st.DataObject
) -> None:
    published.forget_all()
    wrong: ECTicket = draw_wrong(data, published.ticket)
    arrived, failed = published.load(wrong)
    assert arrived | set(failed) == {wrong.key}
    assert set(failed.values()) <= LOAD_FAILURES
    assert published.pair.is_untouched_but_for(PAGES)
    cache = published.pair.consumer.cache
    assert arrived <= {KEY}, "under its own key or not at all"
    assert arrived == {key for key in (KEY, OTHER, wrong.key) if key in cache}
    if arrived:
        assert torch.equal(published.pair.arrived(PAGES, NUM_ROWS), published.rows)


@pytest.mark.parametrize("lease_s", [-1.0, -1e-9, float("nan"), float("inf"), float("-inf")])
def test_a_lease_that_is_no_duration_is_refused_whatever_its_seal(published: Published, lease_s: float) -> None:
    ticket = published.ticket
    wrong = msgspec.structs.replace(ticket, data=msgspec.structs.replace(ticket.data, lease_s=lease_s))
    with pytest.raises(RequestError, match="has a lease of"):
        check_ec_ticket(wrong, published.config)


ENDLESS: dict[str, dict[str, Any]] = {
    "a type": {"dtype": "f" * 10_000},
    "a model": {"model": "d" * 10_000},
    "a producer": {"data": {"producer": "e" * 10_000}},
    "an arena": {"data": {"arena": "e" * 10_000}},
    "an address": {"data": {"planes": {"shm": "x" * 10_000}}},
    "planes": {"data": {"planes": {f"plane {number}": "" for number in range(5000)}}},
    "pages": {"data": {"pages": tuple(range(NUM_PAGES + 1))}},
    "generations": {"data": {"generations": (0,) * 10_000}},
    "rows": {"num_rows": NUM_PAGES * ROWS_PER_PAGE + 1},
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_is_too_large_to_be_true_is_refused_although_the_seal_is_right(published: Published, what: str) -> None:
    fields = dict(ENDLESS[what])
    data = msgspec.structs.replace(published.ticket.data, **fields.pop("data", {}))
    with pytest.raises(RequestError) as caught:
        check_ec_ticket(sealed(msgspec.structs.replace(published.ticket, data=data, **fields), ""), published.config)
    assert len(caught.value.message) < 300


# --- KV


class KVEnd:
    def __init__(self, role: str, network: FakeNetwork) -> None:
        self.config = config_of(role, Path("/nowhere"))
        arena = Arena.create("kv", self.config.num_kv_blocks, self.config.kv_block_nbytes)
        arena.pages[:] = UNTOUCHED
        self.cache = KVCache(arena, self.config, torch.device("cpu"))
        connector = get_kv_connector(self.config, self.cache, FakeDataPlane(role, network), lambda: None)
        assert isinstance(connector, ActiveKVConnector)
        self.connector = connector

    def step(self, network: FakeNetwork, **metadata: Any) -> KVConnectorOutput:
        with self.connector.step(SchedulerOutput(kv_connector_metadata=KVConnectorMetadata(**metadata))) as output:
            network.deliver()
        return output


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_kv_of_a_wrong_ticket_is_refused_at_the_door_and_behind_it_refused_with_a_type_or_right(data: st.DataObject) -> None:
    network = FakeNetwork()
    producer, consumer = KVEnd("P", network), KVEnd("D", network)
    producer.cache.arena.pages[3], producer.cache.arena.pages[5] = 3, 5
    ticket = producer.step(network, saves=(KVSave("r", 6, (3, 5)),), lease_s=60.0).published["r"]
    check_kv_ticket(ticket, consumer.config)
    wrong: KVTicket = draw_wrong(data, ticket)
    with pytest.raises(RequestError):
        check_kv_ticket(wrong, consumer.config)
    output = consumer.step(network, loads=(KVLoad("r", wrong, (7, 2)),))
    assert output.finished_loads | set(output.failed_loads) == {("r", wrong.first_block)}
    assert set(output.failed_loads.values()) <= LOAD_FAILURES
    others = [block for block in range(consumer.config.num_kv_blocks) if block not in (7, 2)]
    assert (consumer.cache.arena.pages[others] == UNTOUCHED).all()
    if output.finished_loads:
        assert (consumer.cache.arena.pages[7] == 3).all()
