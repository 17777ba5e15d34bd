"""The shm data plane between real processes, which are stopped and killed. None of it may leave anything on the host."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic

import msgspec
import pytest

from triptych.errors import FailureReason, TransferError
from triptych.transfer.arena import Arena
from triptych.transfer.shm import ShmDataPlane
from triptych.transfer.ticket import Ticket

PAGE_NBYTES = 4096
NUM_PAGES = 64
CONTENT_NBYTES = NUM_PAGES * PAGE_NBYTES - 5
SETTLE_S = 10.0

PRODUCER = """
import os, sys, msgspec, numpy as np
from triptych.transfer.arena import Arena
from triptych.transfer.shm import ShmDataPlane
uid, num_pages, page_nbytes, nbytes = map(int, sys.argv[1:])
os.setresuid(uid, uid, uid)
arena = Arena.create("producer", num_pages, page_nbytes)
arena.pages[:] = np.arange(arena.pages.size, dtype=np.uint32).reshape(arena.pages.shape) % 251
plane = ShmDataPlane("e0")
plane.register("ec", arena)
print(msgspec.json.encode(plane.publish("ec", range(num_pages), nbytes, 60.0)).decode(), flush=True)
sys.stdin.read()
"""

CONSUMER = """
import sys, msgspec
from triptych.transfer.arena import Arena
from triptych.transfer.shm import ShmDataPlane
from triptych.transfer.ticket import Ticket
ticket = msgspec.json.decode(sys.argv[1], type=Ticket)
plane = ShmDataPlane("p0")
arena = Arena.create("consumer", len(ticket.pages), ticket.page_nbytes)
plane.read(ticket, arena, range(len(ticket.pages))).result(10)
print("read", flush=True)
sys.stdin.read()
"""


def start(script: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class RemoteProducer:
    def __init__(self, uid: int) -> None:
        self.process = start(PRODUCER, str(uid), str(NUM_PAGES), str(PAGE_NBYTES), str(CONTENT_NBYTES))
        self.ticket = msgspec.json.decode(first_line(self.process), type=Ticket)

    def stop(self) -> None:
        """Returns when all its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_producer() -> Iterator[Callable[..., RemoteProducer]]:
    started: list[RemoteProducer] = []

    def start_one(uid: int = -1) -> RemoteProducer:
        started.append(RemoteProducer(uid))
        return started[-1]

    yield start_one
    for producer in started:
        producer.kill()


@pytest.fixture
def consumer() -> Iterator[ShmDataPlane]:
    with closing(ShmDataPlane("p0", connect_timeout_s=0.4)) as plane:
        yield plane


@pytest.fixture
def arena() -> Arena:
    return Arena.create("consumer", NUM_PAGES, PAGE_NBYTES)


def read(consumer: ShmDataPlane, ticket: Ticket, arena: Arena) -> None:
    consumer.read(ticket, arena, range(NUM_PAGES)).result(SETTLE_S)


def failure_of(consumer: ShmDataPlane, ticket: Ticket, arena: Arena) -> tuple[FailureReason, float]:
    """Why the read failed, and after how many seconds."""
    started = monotonic()
    with pytest.raises(TransferError) as caught:
        read(consumer, ticket, arena)
    return caught.value.reason, monotonic() - started


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = monotonic() + SETTLE_S
    while not is_true():
        assert monotonic() < deadline, "it did not come true"


def test_bytes_cross_between_processes_unchanged(
    start_producer: Callable[..., RemoteProducer], consumer: ShmDataPlane, arena: Arena
) -> None:
    read(consumer, start_producer().ticket, arena)
    expected = bytes(index % 251 for index in range(CONTENT_NBYTES))
    assert arena.pages.tobytes()[:CONTENT_NBYTES] == expected
    assert arena.pages.tobytes()[CONTENT_NBYTES:] == bytes(5)


def test_a_killed_producer_is_noticed_and_its_memory_let_go(
    start_producer: Callable[..., RemoteProducer], consumer: ShmDataPlane, arena: Arena
) -> None:
    producer = start_producer()
    read(consumer, producer.ticket, arena)
    assert "memfd:triptych-producer" in Path("/proc/self/maps").read_text()
    producer.kill()
    died = monotonic()
    wait_until(lambda: "memfd:triptych-producer" not in Path("/proc/self/maps").read_text())
    assert monotonic() - died < 1.0
    reason, took_s = failure_of(consumer, producer.ticket, arena)
    assert reason is FailureReason.PEER_LOST
    assert took_s < 0.4  # not after a timeout


def test_a_producer_killed_before_first_contact_is_a_lost_peer(
    start_producer: Callable[..., RemoteProducer], consumer: ShmDataPlane, arena: Arena
) -> None:
    producer = start_producer()
    producer.kill()
    assert failure_of(consumer, producer.ticket, arena)[0] is FailureReason.PEER_LOST


def test_a_stopped_producer_is_a_timeout_within_the_bound_and_can_be_read_when_it_goes_on(
    start_producer: Callable[..., RemoteProducer], consumer: ShmDataPlane, arena: Arena
) -> None:
    producer = start_producer()
    producer.stop()
    reason, took_s = failure_of(consumer, producer.ticket, arena)
    assert reason is FailureReason.TIMEOUT
    assert 0.4 <= took_s < 3.0
    producer.go_on()
    read(consumer, producer.ticket, arena)


def test_a_stopped_producer_holds_up_nobody_elses_reads(
    start_producer: Callable[..., RemoteProducer], consumer: ShmDataPlane, arena: Arena
) -> None:
    stopped, running = start_producer(), start_producer()
    stopped.stop()
    waiting = [consumer.read(stopped.ticket, arena, range(NUM_PAGES)) for _ in range(8)]  # more than there are threads
    read(consumer, running.ticket, Arena.create("other", NUM_PAGES, PAGE_NBYTES))
    assert not any(future.done() for future in waiting)
    assert {type(future.exception(SETTLE_S)) for future in waiting} == {TransferError}


def test_a_producer_stopped_after_first_contact_is_still_read(
    start_producer: Callable[..., RemoteProducer], consumer: ShmDataPlane, arena: Arena
) -> None:
    producer = start_producer()
    read(consumer, producer.ticket, arena)
    producer.stop()
    arena.pages[:] = 0
    read(consumer, producer.ticket, arena)
    assert arena.pages[0, 250] == 250


def test_a_full_backlog_is_a_timeout_too(
    start_producer: Callable[..., RemoteProducer], consumer: ShmDataPlane, arena: Arena
) -> None:
    producer = start_producer()
    producer.stop()
    futures = [
        consumer.read(msgspec.structs.replace(producer.ticket, arena=f"arena {number}"), arena, range(NUM_PAGES))
        for number in range(200)  # the backlog is 128
    ]
    reasons = {error.reason for error in (future.exception(SETTLE_S) for future in futures) if isinstance(error, TransferError)}
    assert reasons == {FailureReason.TIMEOUT}


def test_a_killed_consumer_leaves_the_producer_with_the_descriptors_it_had() -> None:
    arena = Arena.create("producer", 4, PAGE_NBYTES)
    with closing(ShmDataPlane("e0")) as plane:
        plane.register("ec", arena)
        ticket = plane.publish("ec", range(4), 4 * PAGE_NBYTES, 60.0)
        gc.collect()  # other tests' garbage may hold descriptors
        consumer = start(CONSUMER, msgspec.json.encode(ticket).decode())
        before = len(os.listdir("/proc/self/fd"))
        assert first_line(consumer) == "read"
        assert len(os.listdir("/proc/self/fd")) == before + 1
        consumer.kill()
        wait_until(lambda: len(os.listdir("/proc/self/fd")) == before)
        consumer.communicate()


def test_nothing_is_left_on_the_host_after_a_kill(
    start_producer: Callable[..., RemoteProducer], consumer: ShmDataPlane, arena: Arena
) -> None:
    before = set(os.listdir("/dev/shm"))
    producer = start_producer()
    read(consumer, producer.ticket, arena)
    assert set(os.listdir("/dev/shm")) <= before
    assert producer.ticket.planes["shm"] in Path("/proc/net/unix").read_text()
    producer.kill()
    wait_until(lambda: producer.ticket.planes["shm"] not in Path("/proc/net/unix").read_text())
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_a_producer_of_another_user_is_refused(
    start_producer: Callable[..., RemoteProducer], consumer: ShmDataPlane, arena: Arena
) -> None:
    assert failure_of(consumer, start_producer(uid=65534).ticket, arena)[0] is FailureReason.MISMATCH
    assert not arena.pages.any()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_a_consumer_of_another_user_is_hung_up_on() -> None:
    asker = """
import os, socket, sys
os.setresuid(65534, 65534, 65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(10)
connection.connect("\\0" + sys.argv[1])
try:
    connection.send(bytes.fromhex("82a776657273696f6e01a56172656e61a26563"))  # {"version": 1, "arena": "ec"}
    print(len(connection.recv(100)))
except (BrokenPipeError, ConnectionResetError):
    print(0)
"""
    with closing(ShmDataPlane("e0")) as plane:
        plane.register("ec", Arena.create("producer", 4, PAGE_NBYTES))
        process = start(asker, plane.address)
        assert first_line(process) == "0"
        process.communicate()
        process = start(asker.replace("65534", str(os.geteuid())), plane.address)
        assert int(first_line(process)) > 0  # the same request from our own user is answered
        process.communicate()
