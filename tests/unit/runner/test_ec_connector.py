"""The lifecycle of the EC connector's step, over the fake data plane: what is loaded, saved, reported, and that nothing is left behind."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import torch

from triptych.config import EngineConfig
from triptych.errors import ConfigError, FailureReason, TransferError
from triptych.output import ECConnectorMetadata, ECConnectorOutput, ECLoad, ECTicket, SchedulerOutput
from triptych.runner.ec_connector import ActiveECConnector, ECConnector, get_ec_connector
from triptych.runner.encoder_cache import EncoderCache, RowWindow
from triptych.transfer.arena import Arena
from triptych.transfer.fake import FakeDataPlane, FakeNetwork

KEY, OTHER = "a" * 64, "b" * 64
NOTHING = SchedulerOutput()
WIDTH = 64


class Worker:
    """A cache, a plane and a connector."""

    def __init__(self, config: EngineConfig, name: str, network: FakeNetwork) -> None:
        self.num_wakes = 0
        self.plane = FakeDataPlane(name, network)
        arena = Arena.create("ec", config.num_encoder_pages, config.encoder_page_nbytes)
        self.cache = EncoderCache(arena, config, torch.device("cpu"))
        connector = get_ec_connector(config, self.cache, self.plane, self.wake)
        assert isinstance(connector, ActiveECConnector)
        self.connector = connector

    def wake(self) -> None:
        self.num_wakes += 1

    def step(self, body: Callable[[ECConnectorOutput], None] = lambda _: None, **metadata: Any) -> ECConnectorOutput:
        given: dict[str, Any] = {"lease_s": 30.0, **metadata}
        scheduler_output = SchedulerOutput(ec_connector_metadata=ECConnectorMetadata(**given))
        with self.connector.step(scheduler_output) as output:
            assert output is not None
            body(output)
        self.cache.check_invariants()
        return output

    def publish(self, key: str, pages: tuple[int, ...], num_rows: int, number: float = 7.0) -> ECTicket:
        """Add an item in a step, as the tower would, and publish it."""
        rows = torch.full((num_rows, WIDTH), number)
        return self.step(lambda _: self.cache.write(key, pages, rows), saves=(key,)).published[key]


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def producer(engine_config: Callable[..., EngineConfig], network: FakeNetwork) -> Worker:
    return Worker(engine_config("E", is_alone=False), "E-1", network)


@pytest.fixture
def consumer(engine_config: Callable[..., EngineConfig], network: FakeNetwork) -> Worker:
    return Worker(engine_config("P", is_alone=False), "P-1", network)


def first_number(worker: Worker, pages: tuple[int, ...], num_rows: int) -> set[float]:
    return set(worker.cache.gather([RowWindow(pages, 0, num_rows)]).flatten().tolist())


# --- off ---------------------------------------------------------------------------------------------------------------


def test_off_a_step_yields_none_and_makes_no_object(engine_config: Callable[..., EngineConfig], consumer: Worker) -> None:
    connector = get_ec_connector(engine_config("EPD"), consumer.cache, None, lambda: None)
    assert type(connector) is ECConnector
    assert connector.step(NOTHING) is connector.step(NOTHING)
    for _ in range(2):
        with connector.step(NOTHING) as output:
            assert output is None


@pytest.mark.parametrize(
    ("role", "is_active"), [("E", True), ("P", True), ("PD", True), ("EPD", True), ("EP", True), ("ED", True), ("D", False)]
)
def test_it_is_active_in_roles_that_send_or_take_items(
    engine_config: Callable[..., EngineConfig], role: str, is_active: bool, consumer: Worker, network: FakeNetwork
) -> None:
    plane = FakeDataPlane("w", network)
    connector = get_ec_connector(engine_config(role, is_alone=False), consumer.cache, plane, lambda: None)
    assert isinstance(connector, ActiveECConnector) is is_active


def test_a_worker_among_others_needs_a_data_plane(engine_config: Callable[..., EngineConfig], consumer: Worker) -> None:
    with pytest.raises(ConfigError, match="needs a data plane"):
        get_ec_connector(engine_config("E", is_alone=False), consumer.cache, None, lambda: None)


# --- save --------------------------------------------------------------------------------------------------------------


def test_what_the_body_added_is_published_after_it_and_only_that(producer: Worker) -> None:
    def body(output: ECConnectorOutput) -> None:
        assert output.published == {}
        producer.cache.write(KEY, (3, 9), torch.ones(6, WIDTH))
        producer.cache.write(OTHER, (4,), torch.ones(2, WIDTH))

    output = producer.step(body, saves=(KEY, "c" * 64))  # "c" failed to be encoded
    ticket = output.published.pop(KEY)
    assert output == ECConnectorOutput()
    assert (ticket.key, ticket.num_rows, ticket.row_width, ticket.dtype) == (KEY, 6, WIDTH, "float32")
    assert (ticket.data.pages, ticket.data.nbytes, ticket.data.lease_s) == ((3, 9), 6 * WIDTH * 4, 30.0)


def test_an_item_that_is_resident_is_published_again_on_demand_and_an_absent_one_is_reported(producer: Worker) -> None:
    first = producer.publish(KEY, (3, 9), 6)
    output = producer.step(republish=(KEY, OTHER))
    assert output.published[KEY].data.pages == first.data.pages
    assert output.failed_saves == {OTHER: FailureReason.INTERNAL}


def test_a_save_that_raises_is_reported_and_the_others_are_published(producer: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = producer.plane.publish

    def fail_for_page_3(name: str, pages: tuple[int, ...], nbytes: int, lease_s: float, subject: str) -> Any:
        if 3 in pages:
            raise TransferError(FailureReason.PEER_LOST, "the directory is gone.")
        return publish(name, pages, nbytes, lease_s, subject)

    monkeypatch.setattr(producer.plane, "publish", fail_for_page_3)

    def body(_: ECConnectorOutput) -> None:
        producer.cache.write(KEY, (3,), torch.ones(2, WIDTH))
        producer.cache.write(OTHER, (4,), torch.ones(2, WIDTH))

    output = producer.step(body, saves=(KEY, OTHER))
    assert set(output.published) == {OTHER}
    assert output.failed_saves == {KEY: FailureReason.PEER_LOST}
    monkeypatch.undo()
    assert set(producer.step(republish=(KEY,)).published) == {KEY}


# --- load --------------------------------------------------------------------------------------------------------------


def test_a_load_that_the_step_needs_is_there_when_the_body_runs(producer: Worker, consumer: Worker, network: FakeNetwork) -> None:
    ticket = producer.publish(KEY, (3, 9), 6)
    seen: list[set[float]] = []
    deliverer = threading.Timer(0.02, network.deliver)
    deliverer.start()
    output = consumer.step(
        lambda output: seen.append(first_number(consumer, (1, 0), 6)),
        loads=(ECLoad(ticket, (1, 0), is_needed=True),),
        timeout_s=10.0,
    )
    assert seen == [{7.0}]
    assert output.finished_loads == {KEY}


def test_a_load_that_the_step_does_not_need_is_reported_by_a_later_one_after_a_wake(
    producer: Worker, consumer: Worker, network: FakeNetwork
) -> None:
    ticket = producer.publish(KEY, (3, 9), 6)
    assert consumer.step(loads=(ECLoad(ticket, (1, 0), is_needed=False),)) == ECConnectorOutput()
    assert KEY not in consumer.cache
    network.deliver()
    assert consumer.num_wakes == 1
    assert consumer.step().finished_loads == {KEY}
    assert consumer.step() == ECConnectorOutput()
    assert first_number(consumer, (1, 0), 6) == {7.0}


def test_a_needed_load_that_has_not_begun_in_time_is_cancelled_and_fails_as_timeout(
    producer: Worker, consumer: Worker, network: FakeNetwork
) -> None:
    ticket = producer.publish(KEY, (3, 9), 6)
    output = consumer.step(loads=(ECLoad(ticket, (1, 0), is_needed=True),), timeout_s=0.01)
    assert output.failed_loads == {KEY: FailureReason.TIMEOUT}
    network.deliver()
    assert consumer.step() == ECConnectorOutput()
    assert first_number(consumer, (1, 0), 6) == {0.0}


def test_a_load_that_is_late_but_under_way_keeps_its_pages_until_it_ends(
    producer: Worker, consumer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = producer.publish(KEY, (3, 9), 6)
    under_way: Future[None] = Future()
    under_way.set_running_or_notify_cancel()

    def read(*_: object) -> "Future[None]":
        return under_way

    monkeypatch.setattr(consumer.plane, "read", read)
    assert consumer.step(loads=(ECLoad(ticket, (1, 0), is_needed=True),), timeout_s=0.01) == ECConnectorOutput()
    under_way.set_result(None)
    assert consumer.step().finished_loads == {KEY}


def _recycle(producer: Worker, network: FakeNetwork) -> None:
    producer.cache.recycle((9,))


def _kill(producer: Worker, network: FakeNetwork) -> None:
    network.kill("E-1")


def _cut(producer: Worker, network: FakeNetwork) -> None:
    for read in network.pending:
        read.nbytes_cut = 100


def _poison(producer: Worker, network: FakeNetwork) -> None:
    network.pending[0].consumer.verify_checksums = False
    producer.cache.rows[9 * 4 + 1, 5] = float("nan")


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (_recycle, FailureReason.STALE),
        (_kill, FailureReason.PEER_LOST),
        (_cut, FailureReason.CORRUPT),
        (_poison, FailureReason.CORRUPT),
    ],
)
def test_a_load_that_goes_wrong_fails_with_its_reason_and_can_be_tried_again(
    producer: Worker,
    consumer: Worker,
    network: FakeNetwork,
    happens: Callable[[Worker, FakeNetwork], None],
    reason: FailureReason,
) -> None:
    ticket = producer.publish(KEY, (3, 9), 6)
    good = producer.publish(OTHER, (5,), 4, number=2.0)
    loads = (ECLoad(ticket, (1, 0), is_needed=False), ECLoad(good, (2,), is_needed=False))
    consumer.step(loads=loads[:1])
    happens(producer, network)
    network.deliver()
    output = consumer.step()
    assert output.failed_loads == {KEY: reason}
    assert KEY not in consumer.cache
    if happens is not _kill:
        consumer.step(loads=(ECLoad(good, (1,), is_needed=False),))
        network.deliver()
        assert consumer.step().finished_loads == {OTHER}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_rows", 3),
        ("num_rows", 9),
        ("num_rows", 5),
        ("num_rows", 0),
        ("num_rows", -1),
        ("row_width", 128),
        ("dtype", "bfloat16"),
        ("model", "1" * 64),
        ("model", ""),
        ("key", OTHER),
    ],
)
def test_a_ticket_that_differs_from_the_own_model_is_refused_before_anything_is_read(
    producer: Worker, consumer: Worker, network: FakeNetwork, field: str, value: Any
) -> None:
    ticket = msgspec.structs.replace(producer.publish(KEY, (3, 9), 6), **{field: value})
    output = consumer.step(loads=(ECLoad(ticket, (1, 0), is_needed=True),), timeout_s=5.0)
    assert output.failed_loads == {ticket.key: FailureReason.MISMATCH}
    assert network.pending == []


@pytest.mark.parametrize(
    ("field", "value"), [("page_nbytes", 512), ("nbytes", 6 * WIDTH * 4 - 4), ("pages", (3,)), ("pages", (3, 9, 10))]
)
def test_pages_that_do_not_fit_the_rows_are_refused_before_anything_is_read(
    producer: Worker, consumer: Worker, network: FakeNetwork, field: str, value: Any
) -> None:
    ticket = producer.publish(KEY, (3, 9), 6)
    ticket = msgspec.structs.replace(ticket, data=msgspec.structs.replace(ticket.data, **{field: value}))
    output = consumer.step(loads=(ECLoad(ticket, (1, 0), is_needed=True),), timeout_s=5.0)
    assert output.failed_loads == {KEY: FailureReason.MISMATCH}
    assert network.pending == []


def test_pages_that_hold_another_item_are_not_read_into(producer: Worker, consumer: Worker, network: FakeNetwork) -> None:
    ticket = producer.publish(KEY, (3, 9), 6)
    consumer.cache.write(OTHER, (1,), torch.ones(4, WIDTH))
    output = consumer.step(loads=(ECLoad(ticket, (1, 0), is_needed=True),), timeout_s=5.0)
    assert output.failed_loads == {KEY: FailureReason.INTERNAL}
    assert network.pending == []


def test_an_item_is_not_read_twice_at_once(producer: Worker, consumer: Worker, network: FakeNetwork) -> None:
    ticket = producer.publish(KEY, (3, 9), 6)
    for _ in range(2):
        consumer.step(loads=(ECLoad(ticket, (1, 0), is_needed=False),))
    assert len(network.pending) == 1


# --- what raises -------------------------------------------------------------------------------------------------------


def count_finishes(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[ECConnectorOutput]:
    finishes: list[ECConnectorOutput] = []
    finish = worker.connector._finish  # pyright: ignore[reportPrivateUsage]

    def counted(output: ECConnectorOutput) -> None:
        finishes.append(output)
        finish(output)

    monkeypatch.setattr(worker.connector, "_finish", counted)
    return finishes


def test_the_bodys_exception_comes_out_the_end_runs_once_and_the_next_step_reports_what_was_found_out(
    producer: Worker, consumer: Worker, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = producer.publish(KEY, (3, 9), 6)
    consumer.step(loads=(ECLoad(ticket, (1, 0), is_needed=False),))
    network.deliver()
    finishes = count_finishes(consumer, monkeypatch)

    def body(_: ECConnectorOutput) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        consumer.step(body)
    assert len(finishes) == 1
    assert consumer.step().finished_loads == {KEY}
    assert len(finishes) == 2
    assert consumer.step() == ECConnectorOutput()


def test_an_error_while_a_read_is_collected_does_not_hide_the_bodys(
    producer: Worker, consumer: Worker, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = producer.publish(KEY, (3, 9), 6)
    consumer.step(loads=(ECLoad(ticket, (1, 0), is_needed=False),))
    network.deliver()

    def broken(*_: object) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(consumer.cache, "is_finite", broken)

    def body(_: ECConnectorOutput) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        consumer.step(body)
    assert consumer.step().failed_loads == {KEY: FailureReason.INTERNAL}


@pytest.mark.parametrize("raises", [True, False])
def test_a_read_that_cannot_start_or_is_no_future_is_a_failed_load_and_the_end_runs_once(
    producer: Worker, consumer: Worker, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    ticket = producer.publish(KEY, (3, 9), 6)
    finishes = count_finishes(consumer, monkeypatch)

    def broken(*_: object) -> Any:
        if raises:
            raise OSError("no file descriptors left")

    monkeypatch.setattr(consumer.plane, "read", broken)
    output = consumer.step(loads=(ECLoad(ticket, (1, 0), is_needed=True),), timeout_s=5.0)
    assert output.failed_loads == {KEY: FailureReason.INTERNAL}
    assert len(finishes) == 1


@pytest.mark.parametrize("phase", ["_load", "_save"])
def test_a_bug_in_a_phase_still_ends_the_step_once_and_the_next_step_works(
    producer: Worker, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    finishes = count_finishes(producer, monkeypatch)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(producer.connector, phase, broken)
        with pytest.raises(ZeroDivisionError):
            producer.step(saves=(KEY,))
    assert len(finishes) == 1
    assert producer.step() == ECConnectorOutput()  # the failed step's saves are not carried over
    assert producer.publish(KEY, (3,), 2).num_rows == 2


def test_closing_cancels_what_has_not_begun(producer: Worker, consumer: Worker, network: FakeNetwork) -> None:
    consumer.step(loads=(ECLoad(producer.publish(KEY, (3, 9), 6), (1, 0), is_needed=False),))
    read = network.pending[0]
    consumer.connector.close()
    assert read.result.cancelled()
