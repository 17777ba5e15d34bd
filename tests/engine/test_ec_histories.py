"""Random histories over producers, consumers and their schedulers, with real connectors and real pages over a network that a test commands.

Each history ends with everything delivered: then nothing may hang, every request has ended once, with its tokens or for a cause that was
injected, nothing is held anywhere, and all serve again. What is checked on the way is in tests/support/connector_rig.py.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, ClassVar, TypeVar

import msgspec
import pytest
from connector_rig import NUM_PAGES_OF_ALL, PICTURES
from ec_cluster import Cluster, Part, Wish
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from triptych.errors import FailureReason
from triptych.output import ECTicket
from triptych.transfer.ticket import Ticket

T = TypeVar("T")

NUM_HISTORIES, NUM_STEPS = 2000, 40
BIG, SMALL = NUM_PAGES_OF_ALL, 3  # pages of an encoder cache: every picture fits, or the largest alone
index = st.integers(0, 7)  # of whatever there is: see `pick`
everything, all_but_reads = ~Part(0), ~Part.READS
parts = st.sampled_from(
    (Part(0), *(3 * [all_but_reads]), everything, Part.STEPS, Part.MESSAGES, Part.MESSAGES | Part.STEPS, Part.READS)
)
requests = st.builds(
    Wish,
    keys=st.lists(st.sampled_from(list(PICTURES)), max_size=3),
    gap=st.integers(0, 3),
    num_tokens=st.integers(1, 4),
    spread=st.integers(0, 1),
    is_eager=st.booleans(),
)


def fact(**strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """A rule, after which `then` says what of all that is under way goes on."""
    make_rule: Callable[..., Any] = rule  # its parameters are overloaded

    def to_rule(happen: Callable[..., None]) -> Any:
        @wraps(happen)
        def happen_and_go_on(self: "History", then: Part, **values: Any) -> None:
            happen(self, **values)
            self.cluster.run_round(then)

        return make_rule(then=parts, **strategies)(happen_and_go_on)

    return to_rule


def pick(things: Sequence[T], index: int) -> T:
    return things[index % len(things)]


class History(RuleBasedStateMachine):
    """Requests, messages in any order, reads in any order, and time."""

    roles: ClassVar[tuple[str, ...]] = ("E", "E", "PD", "PD")
    cache_sizes: ClassVar[tuple[int, ...]] = (SMALL, SMALL + 1, BIG)
    speeds: ClassVar[tuple[int, ...]] = (0,)  # ticks that a read takes
    num_run: ClassVar[int] = 0
    cluster: Cluster

    @initialize(
        num_pages=index,
        speed=index,
        chunk=st.sampled_from((64, 3, 8)),
        verify_checksums=st.booleans(),
        first=st.lists(requests, min_size=2, max_size=4),
    )
    def start(self, num_pages: int, speed: int, chunk: int, verify_checksums: bool, first: list[Wish]) -> None:
        self.cluster = Cluster(self.roles, pick(self.cache_sizes, num_pages), chunk, verify_checksums)
        self.set_speed(pick(self.speeds, speed))
        for number, wish in enumerate(first):
            self.cluster.request(pick(self.cluster.consumers, number // 2), wish)

    def set_speed(self, num_ticks: int) -> None:
        self.cluster.network.num_ticks = num_ticks
        if num_ticks:
            self.cluster.causes.add(("slow",))

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        try:
            if sys.exc_info()[0] is None:  # else a rule has found something
                self.cluster.settle()
                self.check_end()
                self.cluster.check_all_is_well()
                type(self).num_run += 1
        finally:
            self.cluster.close()

    def check_end(self) -> None:
        pass

    @fact(worker=index, wishes=st.lists(requests, min_size=1, max_size=3))
    def request(self, worker: int, wishes: list[Wish]) -> None:
        for number, wish in enumerate(wishes):
            self.cluster.request(pick(self.cluster.consumers, worker + number), wish)

    @fact(worker=index)
    def step(self, worker: int) -> None:
        self.cluster.step(pick(self.cluster.workers, worker))

    @fact()
    def go_on(self) -> None:
        pass

    @precondition(lambda self: self.cluster.bag)
    @fact(message=index)
    def deliver(self, message: int) -> None:
        self.cluster.deliver(pick(self.cluster.bag, message))

    @fact(worker=index)
    def prepare(self, worker: int) -> None:
        chosen = pick(self.cluster.encoders, worker)
        if chosen.preparations:
            chosen.prepare(chosen.preparations[0])

    @precondition(lambda self: self.cluster.clients)
    @fact(client=index)
    def leave(self, client: int) -> None:
        chosen = pick(list(self.cluster.clients.values()), client)
        if not chosen.is_over:
            self.cluster.leave(chosen)

    @fact(seconds=st.sampled_from((0.1, 1.0, 2.5)))
    def wait(self, seconds: float) -> None:
        self.cluster.clock.now += seconds


class SlowNetwork(History):
    """Reads take time, and end in any order; copies stop half way."""

    speeds = (2, 0, 1)

    @fact(speed=index)
    def change_speed(self, speed: int) -> None:
        self.set_speed(pick(self.speeds, speed))

    @precondition(lambda self: self.cluster.network.pending)
    @fact(read=index, is_whole=st.booleans())
    def read(self, read: int, is_whole: bool) -> None:
        chosen = pick(self.cluster.network.pending, read)
        if is_whole:
            self.cluster.network.deliver(chosen)
        elif not chosen.has_begun:
            self.cluster.network.begin(chosen)

    @fact()
    def tick(self) -> None:
        self.cluster.network.tick()


class LossyNetwork(SlowNetwork):
    """Messages and reads are lost, repeated, cut and forged; leases end early; time jumps."""

    @precondition(lambda self: self.cluster.bag)
    @fact(message=index)
    def lose(self, message: int) -> None:
        losable = [each for each in self.cluster.bag if each.kind != "generate"]
        if losable:
            self.cluster.lose(pick(losable, message))

    @precondition(lambda self: self.cluster.bag)
    @fact(message=index)
    def repeat(self, message: int) -> None:
        repeatable = [each for each in self.cluster.bag if each.kind != "generate"]
        if repeatable:
            self.cluster.repeat(pick(repeatable, message))

    @precondition(lambda self: self.cluster.network.pending)
    @fact(read=index)
    def drop_read(self, read: int) -> None:
        chosen = pick(self.cluster.network.pending, read)
        self.cluster.network.drop(chosen)
        self.cluster.causes.update(("lost", chosen.consumer.worker_id, key) for key in PICTURES)

    @fact()
    def give_up(self) -> None:
        self.cluster.network.give_up()

    @precondition(lambda self: self.cluster.network.pending)
    @fact(read=index, nbytes=st.sampled_from((1, 4, 40)))
    def cut_read(self, read: int, nbytes: int) -> None:
        chosen = pick(self.cluster.network.pending, read)
        chosen.nbytes_cut = nbytes
        self.cluster.causes.update(("cut", chosen.consumer.worker_id, key) for key in PICTURES)

    @fact(seconds=st.sampled_from((20.0, 20.0, 150.0, 700.0)))
    def sleep(self, seconds: float) -> None:
        self.cluster.sleep(seconds)

    @fact(worker=index)
    def release_early(self, worker: int) -> None:
        chosen = pick(self.cluster.encoders, worker)
        for encode_id in list(chosen.leases):
            chosen.release(encode_id)

    @fact(worker=index, ticket=st.integers(0, 31))
    def announce_again(self, worker: int, ticket: int) -> None:
        issued = [ticket for each in self.cluster.network.workers.values() for ticket in each.issued]
        if issued:
            pick(self.cluster.consumers, worker).announce(pick(issued, ticket))

    @fact(worker=index, ticket=st.integers(0, 31), forgery=st.integers(0, 63))
    def forge(self, worker: int, ticket: int, forgery: int) -> None:
        issued = [ticket for each in self.cluster.network.workers.values() for ticket in each.issued]
        if issued:
            chosen, original = pick(self.cluster.consumers, worker), pick(issued, ticket)
            forged = pick(FORGERIES if self.cluster.verify_checksums else FORGERIES[:-1], forgery)(original)
            self.cluster.causes.update(("forged", chosen.id, key) for key in (original.key, forged.key))
            chosen.announce(forged)

    @precondition(lambda self: self.cluster.verify_checksums)
    @fact(worker=index, ticket=st.integers(0, 31))
    def misdirect(self, worker: int, ticket: int) -> None:
        """A ticket for the pages behind those of the picture, as they are now."""
        issued = [(each, ticket) for each in self.cluster.workers for ticket in each.issued]
        if issued:
            chosen, (producer, original) = pick(self.cluster.consumers, worker), pick(issued, ticket)
            arena = producer.runner.cache.arena
            pages = tuple((page + 1) % arena.num_pages for page in original.data.pages)
            data = msgspec.structs.replace(original.data, pages=pages, generations=arena.generations_of(pages))
            self.cluster.causes.update((("forged", chosen.id, original.key), ("misdirected", chosen.id, original.key)))
            chosen.announce(msgspec.structs.replace(original, data=data))


class Mortals(SlowNetwork):
    """Workers die and are replaced; towers, devices and pictures fail."""

    @fact(worker=index)
    def kill(self, worker: int) -> None:
        self.cluster.kill(pick(self.cluster.workers, worker))

    @fact(worker=index)
    def break_device(self, worker: int) -> None:
        pick(self.cluster.workers, worker).runner.is_failing = True

    @fact(worker=index, key=st.sampled_from(list(PICTURES)))
    def break_tower(self, worker: int, key: str) -> None:
        pick(self.cluster.encoders, worker).runner.failing_keys.add(key)

    @fact(worker=index, reason=st.sampled_from((FailureReason.BAD_MEDIA, FailureReason.INTERNAL)))
    def fail_preparation(self, worker: int, reason: FailureReason) -> None:
        chosen = pick(self.cluster.encoders, worker)
        if chosen.preparations:
            chosen.prepare(chosen.preparations[0], reason)


def changed(**fields: Callable[[ECTicket], object]) -> Callable[[ECTicket], ECTicket]:
    return lambda ticket: msgspec.structs.replace(ticket, **{name: change(ticket) for name, change in fields.items()})


def changed_data(**fields: Callable[[Ticket], object]) -> Callable[[ECTicket], ECTicket]:
    return lambda ticket: msgspec.structs.replace(
        ticket, data=msgspec.structs.replace(ticket.data, **{name: change(ticket.data) for name, change in fields.items()})
    )


FORGERIES: list[Callable[[ECTicket], ECTicket]] = [
    changed(key=lambda ticket: next(key for key in PICTURES if key != ticket.key and PICTURES[key] in (3, ticket.num_rows))),
    changed(model=lambda _: "another"),
    changed(dtype=lambda _: "float16"),
    changed(num_rows=lambda ticket: ticket.num_rows + 1),
    changed(num_rows=lambda ticket: ticket.num_rows - 1),
    changed(row_width=lambda ticket: ticket.row_width * 2),
    changed_data(subject=lambda _: "another"),
    changed_data(arena=lambda _: "kv"),
    changed_data(producer=lambda _: "E99"),
    changed_data(planes=lambda _: {}),
    changed_data(planes=lambda _: {"fake": "fake-99"}),
    changed_data(pages=lambda data: data.pages[:-1]),
    changed_data(pages=lambda data: (*data.pages[:-1], 1_000_000)),
    changed_data(pages=lambda data: (-1, *data.pages[1:])),
    changed_data(generations=lambda data: tuple(each - 1 for each in data.generations)),
    changed_data(generations=lambda data: data.generations[:-1]),
    changed_data(nbytes=lambda data: data.nbytes + 4),
    changed_data(nbytes=lambda data: data.nbytes - 4),
    changed_data(nbytes=lambda data: -data.nbytes),
    changed_data(page_nbytes=lambda data: data.page_nbytes * 2),
    changed_data(checksum=lambda data: "0" * 16),
]


class QuietHistory(History):
    """Nothing goes wrong, and every cache holds everything: each picture is encoded once by each worker that is asked for it."""

    cache_sizes = (BIG,)

    def check_end(self) -> None:
        assert self.cluster.num_failed == 0
        for worker in self.cluster.workers:
            assert worker.core.scheduler.cache.num_evicted == 0
            assert set(worker.num_encodes.values()) <= {1}


class CrowdedHistory(History):
    """Nothing goes wrong, but caches are small: what does not fit waits, and is served."""

    cache_sizes = (SMALL, SMALL + 1)

    def check_end(self) -> None:
        assert self.cluster.num_failed == 0


class LossyHistory(LossyNetwork):
    pass


class MortalHistory(Mortals):
    pass


class MixedHistory(LossyNetwork, Mortals):
    """All of it, among workers that encode, prefill and take from each other."""

    roles = ("E", "EPD", "EPD", "PD")


MACHINES: dict[type[History], int] = {
    QuietHistory: 400,
    CrowdedHistory: 420,
    LossyHistory: 420,
    MortalHistory: 420,
    MixedHistory: 420,
}


@cache
def run_histories(machine: type[History]) -> int:
    """How many histories came to their end; raises what one of them has found."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=MACHINES[machine],
            stateful_step_count=NUM_STEPS,
            deadline=None,
            derandomize=True,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
    return machine.num_run


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_no_history_hangs_leaks_reads_a_wrong_byte_or_encodes_in_vain(machine: type[History]) -> None:
    assert run_histories(machine) >= MACHINES[machine] * 9 // 10


def test_the_histories_are_as_many_as_promised() -> None:
    assert sum(run_histories(machine) for machine in MACHINES) >= NUM_HISTORIES
