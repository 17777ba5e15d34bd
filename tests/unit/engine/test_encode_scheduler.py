"""Calls to encode: each has one answer, in bounded time, and a lease only while its caller wants it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from engine_rig import TurnedClock, key_of
from every_sequence import follow_every_sequence

from triptych.engine.encode_queue import EncodeSpec
from triptych.engine.encode_scheduler import EncodeScheduler
from triptych.engine.encoder_cache_manager import LAST, LEASE, EncoderCacheManager, EntryState, Rank
from triptych.engine.events import Encoded, EncodeEvent, EncodeFailed, PreparationNeeded
from triptych.engine.producer_item import ProducerItems
from triptych.errors import FailureReason
from triptych.output import ECConnectorMetadata, ECConnectorOutput, ECTicket, ModelRunnerOutput, SchedulerOutput
from triptych.transfer.ticket import Ticket

CAT, DOG = key_of("cat"), key_of("dog")
TIMEOUT_S, LEASE_S = 10.0, 5.0


def spec_of(encode_id: str, key: str, num_rows: int = 4, will_stay: bool = False) -> EncodeSpec:
    return EncodeSpec(encode_id, key, "image", num_rows, (1, 2, 2), will_stay)


def ticket_for(key: str) -> ECTicket:
    return ECTicket(key, 4, 1, "float32", Ticket("e", "ec", (0,), (0,), 16, 16, "", LEASE_S, {}))


@dataclass
class Encoder:
    """An encode scheduler over a cache of `num_pages` items, and what a runner would answer."""

    num_pages: int = 2
    clock: TurnedClock = field(default_factory=TurnedClock)
    cache: EncoderCacheManager = field(init=False)
    kept: ProducerItems = field(init=False)
    scheduler: EncodeScheduler = field(init=False)
    planned: SchedulerOutput | None = None
    answers: list[EncodeEvent] = field(default_factory=list[EncodeEvent])
    preparations: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.cache = EncoderCacheManager(self.num_pages, 4)
        self.kept = ProducerItems(self.cache, LEASE_S, self.clock)
        self.scheduler = EncodeScheduler(self.cache, self.kept, True, 64, TIMEOUT_S)

    def note(self, events: list[EncodeEvent | PreparationNeeded] | list[EncodeEvent]) -> None:
        for event in events:
            if isinstance(event, PreparationNeeded):
                self.preparations.append(event.key)
            else:
                self.answers.append(event)

    def add(self, spec: EncodeSpec) -> None:
        self.note(self.scheduler.add(spec, self.clock.now))

    def plan(self) -> SchedulerOutput:
        self.note(self.scheduler.expire(self.clock.now))
        planned = self.scheduler.schedule(self.clock.now, everybody_last)
        metadata = ECConnectorMetadata(saves=planned.saves, republish=planned.republish)
        self.planned = SchedulerOutput(encodes=planned.inputs, ec_connector_metadata=metadata)
        return self.planned

    def end(self, tower_works: bool = True, publishes: bool = True) -> None:
        assert self.planned is not None
        output, self.planned = self.planned, None
        failed = {} if tower_works else {each.key: "out of memory" for each in output.encodes}
        metadata = output.ec_connector_metadata
        tickets = {key: ticket_for(key) for key in (*metadata.saves, *metadata.republish) if publishes and key not in failed}
        result = ModelRunnerOutput(failed_encodes=failed, ec_connector_output=ECConnectorOutput(published=tickets))
        events, _ = self.scheduler.update(output, result)
        self.note(events)

    def step(self) -> None:
        self.plan()
        self.end()

    def check(self) -> None:
        self.cache.check_invariants()
        self.kept.check_invariants()
        self.scheduler.check_invariants()


def everybody_last(_: str) -> Rank:
    return LAST


def answer_to(encoder: Encoder, encode_id: str) -> EncodeEvent:
    (answer,) = [each for each in encoder.answers if each.id == encode_id]
    return answer


# --- every wait ends


@pytest.mark.parametrize("is_prepared", (False, True))
def test_an_encode_that_gets_no_preparation_or_no_room_ends_at_its_deadline_and_says_what_it_waited_for(is_prepared: bool):
    encoder = Encoder(num_pages=1)
    encoder.cache.allocate(DOG, 4, LAST)
    encoder.cache.mark_resident(DOG)
    encoder.cache.pin(DOG, "somebody", LEASE)
    encoder.add(spec_of("e", CAT))
    if is_prepared:
        encoder.scheduler.prepared(CAT, "inputs", 0.1)
    encoder.step()
    assert encoder.scheduler.next_deadline() == encoder.clock.now + TIMEOUT_S
    encoder.clock.now += 9.9
    encoder.step()
    assert encoder.answers == []
    encoder.clock.now += 0.1
    encoder.step()
    answer = answer_to(encoder, "e")
    assert isinstance(answer, EncodeFailed)
    assert answer.reason == FailureReason.TIMEOUT
    assert ("room in the encoder cache" if is_prepared else "its preparation") in answer.message
    assert encoder.scheduler.num_queued == 0
    assert encoder.scheduler.next_deadline() is None


def test_who_joins_a_preparation_that_hangs_ends_with_it_and_the_next_call_has_the_item_prepared_anew():
    encoder = Encoder()
    encoder.add(spec_of("first", CAT))
    encoder.clock.now += 9.0
    encoder.add(spec_of("joins", CAT))
    encoder.clock.now += 1.0
    encoder.step()
    assert {answer.id for answer in encoder.answers} == {"first", "joins"}
    encoder.add(spec_of("next", CAT))
    assert encoder.preparations == [CAT, CAT]


def test_an_encode_that_is_in_the_tower_when_its_time_is_up_is_answered_by_its_step():
    encoder = Encoder()
    encoder.add(spec_of("e", CAT))
    encoder.scheduler.prepared(CAT, "inputs", 0.1)
    encoder.plan()
    assert encoder.scheduler.next_deadline() is None
    encoder.clock.now += 60.0
    encoder.note(encoder.scheduler.expire(encoder.clock.now))
    encoder.end()
    assert isinstance(answer_to(encoder, "e"), Encoded)


@pytest.mark.parametrize("publishes", (True, False))
def test_a_call_for_a_resident_item_is_answered_by_the_next_step_whatever_that_gives(publishes: bool):
    encoder = Encoder()
    encoder.add(spec_of("stays", CAT, will_stay=True))
    encoder.scheduler.prepared(CAT, "inputs", 0.1)
    encoder.step()
    encoder.add(spec_of("e", CAT))
    encoder.plan()
    encoder.end(publishes=publishes)
    assert isinstance(answer_to(encoder, "e"), Encoded if publishes else EncodeFailed)
    assert encoder.kept.num_leases == publishes


# --- callers who leave, and news that comes late


@pytest.mark.parametrize("leaves_at", ("preparing", "ready", "encoding", "asked"))
@pytest.mark.parametrize("how", ("abort", "release"))
def test_who_leaves_before_the_ticket_is_made_holds_no_lease_later(how: str, leaves_at: str):
    encoder = Encoder()
    if leaves_at == "asked":
        encoder.add(spec_of("earlier", CAT))
        encoder.scheduler.prepared(CAT, "inputs", 0.1)
        encoder.step()
        encoder.kept.leave("earlier")
    encoder.add(spec_of("e", CAT))
    if leaves_at in ("ready", "encoding"):
        encoder.scheduler.prepared(CAT, "inputs", 0.1)
    if leaves_at == "encoding":
        encoder.plan()
    if how == "abort":
        encoder.scheduler.abort("e")
        assert [answer.id for answer in encoder.answers if answer.id == "e"] == []
    else:
        encoder.note(encoder.scheduler.release("e"))
        assert isinstance(answer_to(encoder, "e"), EncodeFailed), "who still listens hears of it"
    if encoder.planned is not None:
        encoder.end()
    encoder.scheduler.prepared(CAT, "inputs", 0.1)
    encoder.step()
    assert len([answer for answer in encoder.answers if answer.id == "e"]) == (how == "release")
    assert encoder.kept.num_leases == 0
    assert encoder.cache.num_pinned == 0
    assert encoder.scheduler.num_queued == 0
    assert encoder.cache.is_resident(CAT) == (leaves_at in ("encoding", "asked")), "what nobody waits for is not started"


def test_a_release_of_a_ticket_that_was_given_ends_the_lease_and_says_nothing():
    encoder = Encoder()
    encoder.add(spec_of("e", CAT))
    encoder.scheduler.prepared(CAT, "inputs", 0.1)
    encoder.step()
    assert encoder.scheduler.release("e") == encoder.scheduler.release("e") == []
    assert encoder.cache.state(CAT) == EntryState.EVICTABLE


@pytest.mark.parametrize("first_stays", (True, False))
def test_who_joins_while_the_tower_runs_gets_a_ticket_too(first_stays: bool):
    encoder = Encoder()
    encoder.add(spec_of("first", CAT, will_stay=first_stays))
    encoder.scheduler.prepared(CAT, "inputs", 0.1)
    encoder.plan()
    encoder.add(spec_of("joins", CAT))
    encoder.end()
    encoder.step()
    answer = answer_to(encoder, "joins")
    assert isinstance(answer, Encoded)
    assert answer.ticket is not None
    assert encoder.preparations == [CAT]


def test_who_asks_for_a_resident_item_during_a_step_is_answered_by_the_one_after():
    encoder = Encoder()
    encoder.add(spec_of("first", CAT))
    encoder.scheduler.prepared(CAT, "inputs", 0.1)
    encoder.step()
    encoder.plan()
    encoder.add(spec_of("second", CAT))
    encoder.end()
    assert [answer.id for answer in encoder.answers] == ["first"]
    encoder.step()
    assert isinstance(answer_to(encoder, "second"), Encoded)


def test_a_preparation_that_fails_after_another_of_the_same_item_went_well_is_not_listened_to():
    encoder = Encoder()
    encoder.add(spec_of("e", CAT))
    encoder.scheduler.prepared(CAT, "inputs", 0.1)
    assert encoder.scheduler.preparation_failed(CAT, "not a picture", FailureReason.BAD_MEDIA) == []
    encoder.step()
    assert isinstance(answer_to(encoder, "e"), Encoded)


def test_why_an_item_could_not_be_published_is_what_its_callers_hear():
    encoder = Encoder()
    encoder.add(spec_of("e", CAT))
    encoder.scheduler.prepared(CAT, "inputs", 0.1)
    output = encoder.plan()
    result = ModelRunnerOutput(ec_connector_output=ECConnectorOutput(failed_saves={CAT: FailureReason.CORRUPT}))
    encoder.note(encoder.scheduler.update(output, result)[0])
    answer = answer_to(encoder, "e")
    assert isinstance(answer, EncodeFailed)
    assert answer.reason == FailureReason.CORRUPT


@pytest.mark.parametrize("where", ("queued", "resident", "brought by a peer"))
def test_a_call_for_another_number_of_rows_than_the_item_has_is_a_mismatch(where: str):
    encoder = Encoder()
    if where != "queued":
        encoder.cache.allocate(CAT, 4, LAST)
    if where == "resident":
        encoder.cache.mark_resident(CAT)
    if where != "resident":
        encoder.add(spec_of("first", CAT, num_rows=4))
    if where == "brought by a peer":
        encoder.scheduler.abort("first")
    encoder.add(spec_of("e", CAT, num_rows=3))
    if where == "brought by a peer":
        encoder.cache.mark_resident(CAT)
        encoder.note(encoder.scheduler.came_from_peer(CAT))
    answer = answer_to(encoder, "e")
    assert isinstance(answer, EncodeFailed)
    assert answer.reason == FailureReason.MISMATCH


# --- every sequence of events


@dataclass
class Calls(Encoder):
    """A cache of one page, and what the callers know: `open`: encode id -> when its call came; `leases`: encode id -> when it lapses."""

    num_pages: int = 1
    open: dict[str, float] = field(default_factory=dict[str, float])
    leases: dict[str, float] = field(default_factory=dict[str, float])
    late: set[str] = field(default_factory=set[str])  # to be answered at the end of the step
    is_loading: bool = False

    def call(self, spec: EncodeSpec) -> None:
        if spec.encode_id not in self.open | self.leases:
            self.open[spec.encode_id] = self.clock.now
            self.add(spec)

    def note(self, events: list[EncodeEvent | PreparationNeeded] | list[EncodeEvent]) -> None:
        for event in events:
            if isinstance(event, PreparationNeeded):
                continue
            assert event.id in self.open, f"{event.id} is answered, and did not ask"
            del self.open[event.id]
            if isinstance(event, Encoded) and event.ticket is not None:
                self.leases[event.id] = self.clock.now + LEASE_S

    def leave(self, encode_id: str) -> None:
        self.scheduler.abort(encode_id)
        self.late.discard(encode_id)
        self.open.pop(encode_id, None)
        self.leases.pop(encode_id, None)

    def release(self, encode_id: str) -> None:
        self.note(self.scheduler.release(encode_id))
        self.late.discard(encode_id)
        self.leases.pop(encode_id, None)
        assert encode_id not in self.open, "a call whose ticket is released is over"

    def begin(self) -> None:
        if self.planned is None:
            self.leases = {name: at for name, at in self.leases.items() if at > self.clock.now}
            self.plan()
            self.late = {name for name, at in self.open.items() if at + TIMEOUT_S <= self.clock.now}

    def finish(self, tower_works: bool, publishes: bool) -> None:
        if self.planned is not None:
            self.end(tower_works, publishes)
            assert not self.late & self.open.keys(), "a call waits for longer than it may"

    def load(self) -> None:
        if not self.is_loading and not self.cache.is_known("X"):
            self.is_loading = self.cache.allocate("X", 4, LAST) is not None

    def loaded(self, is_well: bool) -> None:
        if self.is_loading:
            self.is_loading = False
            if is_well:
                self.cache.mark_resident("X")
                self.note(self.scheduler.came_from_peer("X"))
            else:
                self.cache.discard("X")

    def check(self) -> None:
        super().check()
        assert self.kept.num_leases == len(self.leases)
        deadline = self.scheduler.next_deadline()
        assert deadline is None or deadline <= max(self.open.values(), default=0.0) + TIMEOUT_S
        if self.planned is None:
            assert not self.open or self.kept.asked() or deadline is not None, "a call waits for nothing"


def _pass_time(calls: Calls) -> None:
    calls.clock.now += 6.0


def test_every_sequence_of_calls_and_steps_answers_each_call_once_and_keeps_no_lease_for_who_has_left():
    events: dict[str, Callable[[Calls], None]] = {
        "a calls X": lambda m: m.call(spec_of("a", "X")),
        "b calls X, which stays": lambda m: m.call(spec_of("b", "X", will_stay=True)),
        "c calls Y": lambda m: m.call(spec_of("c", "Y")),
        "X is prepared": lambda m: m.scheduler.prepared("X", "inputs", 0.1),
        "X cannot be prepared": lambda m: m.note(m.scheduler.preparation_failed("X", "broken", FailureReason.BAD_MEDIA)),
        "Y is prepared": lambda m: m.scheduler.prepared("Y", "inputs", 0.1),
        "a step begins": Calls.begin,
        "it ends": lambda m: m.finish(True, True),
        "it ends, and nothing is published": lambda m: m.finish(True, False),
        "it breaks": lambda m: m.finish(False, False),
        "a load of X starts": Calls.load,
        "it is well": lambda m: m.loaded(True),
        "it fails": lambda m: m.loaded(False),
        "a leaves": lambda m: m.leave("a"),
        "a releases": lambda m: m.release("a"),
        "c releases": lambda m: m.release("c"),
        "time": _pass_time,
    }
    assert follow_every_sequence(Calls(), events, depth=6) > 10_000
