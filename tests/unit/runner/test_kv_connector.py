"""The lifecycle of the KV connector's step, over the fake data plane."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from triptych.config import EngineConfig
from triptych.errors import FailureReason
from triptych.output import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVLoad,
    KVSave,
    KVTicket,
    SchedulerOutput,
)
from triptych.runner.kv_cache import KVCache
from triptych.runner.kv_connector import ActiveKVConnector, KVConnector, get_kv_connector
from triptych.transfer.arena import Arena
from triptych.transfer.fake import FakeDataPlane, FakeNetwork

NOTHING = SchedulerOutput()


class Worker:
    def __init__(self, config: EngineConfig, name: str, network: FakeNetwork) -> None:
        self.num_wakes = 0
        self.plane = FakeDataPlane(name, network)
        self.cache = KVCache(Arena.create("kv", config.num_kv_blocks, config.kv_block_nbytes), config, torch.device("cpu"))
        connector = get_kv_connector(config, self.cache, self.plane, self.wake)
        assert isinstance(connector, ActiveKVConnector)
        self.connector = connector

    def wake(self) -> None:
        self.num_wakes += 1

    def step(self, body: Callable[[], None] = lambda: None, **metadata: Any) -> KVConnectorOutput:
        given: dict[str, Any] = {"lease_s": 30.0, **metadata}
        scheduler_output = SchedulerOutput(kv_connector_metadata=KVConnectorMetadata(**given))
        with self.connector.step(scheduler_output) as output:
            assert output is not None
            body()
        return output

    def publish(self, num_tokens: int = 6, blocks: tuple[int, ...] = (3, 9)) -> KVTicket:
        return self.step(saves=(KVSave("r", num_tokens, blocks),)).published["r"]


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def producer(engine_config: Callable[..., EngineConfig], network: FakeNetwork) -> Worker:
    worker = Worker(engine_config("P", is_alone=False), "P-1", network)
    worker.cache.blocks[3], worker.cache.blocks[9] = 3.0, 9.0
    return worker


@pytest.fixture
def consumer(engine_config: Callable[..., EngineConfig], network: FakeNetwork) -> Worker:
    worker = Worker(engine_config("D", is_alone=False), "D-1", network)
    worker.cache.blocks.fill_(float("nan"))
    return worker


def test_off_a_step_yields_none_and_makes_no_object(engine_config: Callable[..., EngineConfig], consumer: Worker) -> None:
    connector = get_kv_connector(engine_config("PD", is_alone=False), consumer.cache, None, lambda: None)
    assert type(connector) is KVConnector
    assert connector.step(NOTHING) is connector.step(NOTHING)
    with connector.step(NOTHING) as output:
        assert output is None


def test_the_ticket_says_what_the_blocks_hold(producer: Worker) -> None:
    ticket = producer.publish()
    assert (ticket.request_id, ticket.num_tokens, ticket.block_size, ticket.dtype) == ("r", 6, 4, "float32")
    assert ticket.block_nbytes == 3 * 2 * 4 * 2 * 16 * 4  # layers, K and V, tokens, heads, width, bytes
    assert (ticket.data.pages, ticket.data.nbytes, ticket.data.lease_s) == ((3, 9), 2 * ticket.block_nbytes, 30.0)


def test_a_request_that_the_step_could_not_compute_is_not_published(producer: Worker) -> None:
    saves = (KVSave("bad", 4, (3,)), KVSave("good", 4, (9,)))
    output = producer.step(lambda: producer.connector.withhold({"bad"}), saves=saves)
    assert set(output.published) == {"good"}
    assert set(producer.step(saves=saves[:1]).published) == {"bad"}  # forgotten with the step


def test_a_load_runs_beside_steps_and_is_reported_once_after_a_wake(
    producer: Worker, consumer: Worker, network: FakeNetwork
) -> None:
    assert consumer.step(loads=(KVLoad("r", producer.publish(), (7, 2)),)) == KVConnectorOutput()
    assert consumer.step() == KVConnectorOutput()
    network.deliver()
    assert consumer.num_wakes == 1
    assert consumer.step() == KVConnectorOutput(finished_loads={("r", 0)})
    assert consumer.step() == KVConnectorOutput()


def test_nothing_past_the_last_token_is_left_in_loaded_blocks(producer: Worker, consumer: Worker, network: FakeNetwork) -> None:
    producer.cache.blocks[9, :, :, 2:] = float("nan")  # the producer's own garbage behind 6 tokens
    consumer.step(loads=(KVLoad("r", producer.publish(), (7, 2)),))
    network.deliver()
    consumer.step()
    assert consumer.cache.blocks[7].eq(3.0).all()
    assert consumer.cache.blocks[2, :, :, :2].eq(9.0).all()
    assert consumer.cache.blocks[2, :, :, 2:].eq(0.0).all()


def test_parts_of_one_request_are_read_beside_each_other_and_reported_one_by_one(
    producer: Worker, consumer: Worker, network: FakeNetwork
) -> None:
    saves = (KVSave("r", 4, (3,)), KVSave("s", 10, (9, 5), first_block=1))
    published = producer.step(saves=saves).published
    first = published["r"]
    rest = producer.step(saves=(KVSave("r", 10, (9, 5), first_block=1),)).published["r"]
    assert (first.first_block, first.data.pages, rest.first_block, rest.data.pages) == (0, (3,), 1, (9, 5))
    consumer.step(loads=(KVLoad("r", first, (7,)), KVLoad("r", rest, (2, 6))))
    network.deliver(network.pending[1])
    assert consumer.step() == KVConnectorOutput(finished_loads={("r", 1)})
    network.kill("P-1")
    assert consumer.step() == KVConnectorOutput(failed_loads={("r", 0): FailureReason.PEER_LOST})
    assert consumer.cache.blocks[2].eq(9.0).all()
    assert consumer.cache.blocks[6, :, :, 2:].eq(0.0).all(), "10 tokens end in the middle of the third block"


def test_skipped_blocks_are_not_read_and_may_be_gone(producer: Worker, consumer: Worker, network: FakeNetwork) -> None:
    ticket = producer.publish(num_tokens=6)
    producer.cache.recycle((3,))
    consumer.step(loads=(KVLoad("r", ticket, (2,), num_skipped=1),))
    network.deliver()
    assert consumer.step() == KVConnectorOutput(finished_loads={("r", 0)})
    assert consumer.cache.blocks[2, :, :, :2].eq(9.0).all()
    assert consumer.cache.blocks[2, :, :, 2:].eq(0.0).all()


@pytest.mark.parametrize(("blocks", "num_skipped"), [((7, 2, 5), 0), ((7,), 0), ((7, 2), 1), ((), 2), ((7, 2, 5), -1)])
def test_a_load_whose_blocks_are_not_those_of_the_ticket_is_refused(
    producer: Worker, consumer: Worker, network: FakeNetwork, blocks: tuple[int, ...], num_skipped: int
) -> None:
    output = consumer.step(loads=(KVLoad("r", producer.publish(), blocks, num_skipped),))
    assert output.failed_loads == {("r", 0): FailureReason.MISMATCH}
    assert network.pending == []


@pytest.mark.parametrize(
    ("recycled", "killed", "reason"), [(True, False, FailureReason.STALE), (False, True, FailureReason.PEER_LOST)]
)
def test_a_load_that_goes_wrong_fails_with_its_reason(
    producer: Worker, consumer: Worker, network: FakeNetwork, recycled: bool, killed: bool, reason: FailureReason
) -> None:
    consumer.step(loads=(KVLoad("r", producer.publish(), (7, 2)),))
    if recycled:
        producer.cache.recycle((9,))
    if killed:
        network.kill("P-1")
    network.deliver()
    assert consumer.step().failed_loads == {("r", 0): reason}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 8),
        ("block_nbytes", 64),
        ("dtype", "float16"),
        ("num_tokens", 9),
        ("num_tokens", 4),
        ("num_tokens", 0),
        ("first_block", 1),
        ("first_block", -1),
        ("request_id", "s"),
    ],
)
def test_a_ticket_that_differs_from_the_own_model_is_refused_before_anything_is_read(
    producer: Worker, consumer: Worker, network: FakeNetwork, field: str, value: Any
) -> None:
    ticket = msgspec.structs.replace(producer.publish(), **{field: value})
    output = consumer.step(loads=(KVLoad("r", ticket, (7, 2)),))
    assert output.failed_loads == {("r", ticket.first_block): FailureReason.MISMATCH}
    assert network.pending == []


def test_a_save_that_raises_is_reported_and_the_others_are_published(producer: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = producer.plane.publish

    def fail_for_block_3(name: str, pages: tuple[int, ...], nbytes: int, lease_s: float, **how: Any) -> Any:
        if 3 in pages:
            raise OSError("disk full")
        return publish(name, pages, nbytes, lease_s, **how)

    monkeypatch.setattr(producer.plane, "publish", fail_for_block_3)
    output = producer.step(saves=(KVSave("a", 4, (3,)), KVSave("b", 4, (9,))))
    assert set(output.published) == {"b"}
    assert output.failed_saves == {"a": FailureReason.INTERNAL}


def test_the_bodys_exception_comes_out_and_the_next_step_reports_what_was_found_out(
    producer: Worker, consumer: Worker, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.step(loads=(KVLoad("r", producer.publish(), (7, 2)),))
    network.deliver()

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    def body() -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(consumer.cache, "clear_after", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            consumer.step(body)
    assert consumer.step().failed_loads == {("r", 0): FailureReason.INTERNAL}
    assert consumer.step() == KVConnectorOutput()


def test_saves_of_a_step_whose_body_failed_are_not_published_later(producer: Worker) -> None:
    def body() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        producer.step(body, saves=(KVSave("r", 4, (3,)),))
    assert producer.step() == KVConnectorOutput()
