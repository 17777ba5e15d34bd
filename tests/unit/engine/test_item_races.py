"""Two things happen to one item at once: what the engine makes of it. No row is read that is not the item's, nothing is held for who has left."""

from dataclasses import dataclass

import msgspec
import pytest
from engine_rig import Engine, assert_nothing_is_held, item_of, key_of, make_engine, wanted

from triptych.engine.arithmetic_runner import Fabric
from triptych.engine.events import ECLoaded, ECNeeded, Encoded, EncodeFailed, Failed
from triptych.errors import FailureReason
from triptych.output import ECTicket, ModelRunnerOutput, SchedulerOutput

CAT, DOG = item_of("cat", 5, 6), item_of("dog", 5, 6)
PROMPT = [(37 + 11 * i) % 900 for i in range(20)]


def encoder_in(fabric: Fabric, name: str = "elsewhere") -> Engine:
    return make_engine("E", fabric=fabric, worker_id=name)


def ticket_from(encoder: Engine, item_name: str = "cat", num_rows: int = 6) -> ECTicket:
    encode_id = f"{item_name}-{len(encoder.encoded)}"
    encoder.encode(encode_id, item_of(item_name, 0, num_rows))
    encoder.run()
    ticket = encoder.encoded[encode_id].ticket
    assert ticket is not None
    return ticket


def asked_for(engine: Engine) -> list[tuple[str, FailureReason]]:
    return [(event.id, event.reason) for event in engine.events if isinstance(event, ECNeeded)]


def failure_of(engine: Engine, request_id: str) -> FailureReason | None:
    end = engine.ends[request_id]
    assert isinstance(end, Failed)
    return end.reason


@dataclass
class HalfStep:
    """A step that is scheduled and executed, and not taken in yet."""

    engine: Engine
    output: SchedulerOutput
    result: ModelRunnerOutput

    def update(self) -> None:
        for event in self.engine.core.scheduler.update(self.output, self.result):
            self.engine.note(event)
        self.engine.core.scheduler.check_invariants()


def half_step(engine: Engine, tower_works: bool = True) -> HalfStep:
    for key in engine.preparations:
        engine.core.scheduler.prepared(key, None, 0.0)
    engine.preparations.clear()
    output = engine.core.scheduler.schedule()
    if not tower_works:
        return HalfStep(engine, output, ModelRunnerOutput(failed_encodes={each.key: "out of memory" for each in output.encodes}))
    return HalfStep(engine, output, engine.runner.execute_model(output))


# --- tickets at odd times


def test_a_ticket_whose_lease_has_lapsed_is_good_as_long_as_its_pages_were_not_given_to_others():
    fabric = Fabric()
    encoder, engine = encoder_in(fabric), make_engine("PD", fabric=fabric)
    ticket = ticket_from(encoder)
    encoder.clock.now += 60.0
    encoder.run()
    engine.core.announce(ticket)
    engine.add("r", PROMPT, (CAT,))
    engine.run()
    assert engine.tokens["r"] == wanted(PROMPT, (CAT,))


def test_a_ticket_that_is_told_twice_or_after_residency_is_loaded_once_and_leaves_nothing():
    fabric = Fabric()
    encoder, engine = encoder_in(fabric), make_engine("PD", fabric=fabric)
    ticket = ticket_from(encoder)
    engine.add("r", PROMPT, (CAT,))
    engine.core.announce(ticket)
    engine.core.announce(ticket)
    engine.run()
    engine.core.announce(ticket)
    engine.run()
    assert engine.core.counters.items_loaded == 1
    assert engine.tokens["r"] == wanted(PROMPT, (CAT,))
    assert_nothing_is_held(engine)


def test_the_ticket_of_another_worker_that_came_during_a_load_saves_asking_when_the_first_worker_is_lost():
    fabric = Fabric()
    engine = make_engine("PD", fabric=fabric)
    first, second = (ticket_from(encoder_in(fabric, name)) for name in ("e1", "e2"))
    engine.add("r", PROMPT, (CAT,))
    fabric.is_holding = True
    engine.core.announce(first)
    engine.run()
    engine.core.announce(second)
    del fabric.runners["e1"]
    fabric.is_holding = False
    engine.run()
    assert asked_for(engine) == [("r", FailureReason.MISSING)], "for its first want only"
    assert engine.core.counters.item_loads_failed[FailureReason.PEER_LOST] == 1
    assert engine.tokens["r"] == wanted(PROMPT, (CAT,))


@pytest.mark.parametrize("tower_works", (True, False))
def test_a_ticket_that_comes_while_our_own_tower_is_at_the_item_is_used_if_the_tower_fails_and_let_go_if_not(tower_works: bool):
    fabric = Fabric()
    encoder, engine = encoder_in(fabric), make_engine("EPD", fabric=fabric)
    ticket = ticket_from(encoder)
    engine.encode("e", CAT, will_stay=True)
    engine.step()
    step = half_step(engine, tower_works)
    engine.add("r", PROMPT, (CAT,))
    engine.core.announce(ticket)
    step.update()
    engine.run()
    assert asked_for(engine) == [("r", FailureReason.MISSING)], "for its first want only"
    assert [event.id for event in engine.events if isinstance(event, ECLoaded)] == ["r"], "its ticket is not needed any more"
    assert engine.core.counters.items_loaded == (not tower_works)
    assert engine.tokens["r"] == wanted(PROMPT, (CAT,))
    assert_nothing_is_held(engine)


# --- between the two halves of a step


@pytest.mark.parametrize("steps_before", range(8))
@pytest.mark.parametrize("source", ("tower", "peer"))
def test_who_leaves_while_its_step_runs_leaves_nothing_and_does_not_disturb_a_neighbour(source: str, steps_before: int):
    fabric = Fabric()
    encoder, engine = encoder_in(fabric), make_engine("EPD", fabric=fabric, chunk=4)
    for name in ("leaves", "stays"):
        engine.add(name, PROMPT, (CAT,))
        if source == "tower":
            engine.encode(f"e-{name}", CAT)
    if source == "peer":
        engine.core.announce(ticket_from(encoder))
    for _ in range(steps_before):
        half_step(engine).update()
    step = half_step(engine)
    for name in ("leaves", "e-leaves"):
        engine.core.scheduler.abort(name)
    engine.core.scheduler.check_invariants()
    step.update()
    engine.run()
    assert "leaves" not in engine.ends
    assert engine.tokens["stays"] == wanted(PROMPT, (CAT,))
    engine.core.scheduler.release("e-stays")
    engine.run()
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("steps_before", range(5))
def test_a_request_that_comes_under_the_id_of_one_that_left_during_the_step_is_not_taken_for_it(steps_before: int):
    engine = make_engine(is_alone=True, chunk=4)
    other = [each + 1 for each in PROMPT]
    engine.add("r", PROMPT)
    for _ in range(steps_before):
        half_step(engine).update()
    step = half_step(engine)
    engine.core.scheduler.abort("r")
    engine.tokens.clear()
    engine.add("r", other)
    step.update()
    engine.run()
    assert engine.tokens["r"] == wanted(other)
    assert_nothing_is_held(engine)


def test_pages_that_a_load_writes_are_given_to_nobody_before_it_has_ended_though_nobody_waits_for_it_any_more():
    fabric = Fabric()
    encoder, engine = encoder_in(fabric), make_engine("PD", fabric=fabric, encoder_rows=8)
    cat, dog = ticket_from(encoder), ticket_from(encoder, "dog")
    engine.add("leaves", PROMPT, (CAT,))
    fabric.is_holding = True
    engine.core.announce(cat)
    engine.run()
    engine.core.scheduler.abort("leaves")
    engine.add("urgent", PROMPT, (DOG,))
    engine.core.announce(dog)
    engine.run()
    assert engine.core.counters.items_loaded == 0
    assert engine.core.scheduler.cache.num_free_pages == 0
    fabric.is_holding = False
    engine.run()
    assert engine.tokens["urgent"] == wanted(PROMPT, (DOG,))
    assert_nothing_is_held(engine)


# --- who leaves, and news that has been overtaken


def test_a_release_that_overtakes_the_step_that_publishes_ends_the_encode_before_it_starts():
    engine = make_engine("E")
    engine.encode("e", CAT)
    engine.step()
    engine.core.scheduler.release("e")
    engine.run()
    assert engine.runner.encoded_keys == []
    assert [event.id for event in engine.events if isinstance(event, EncodeFailed)] == ["e"]
    assert_nothing_is_held(engine)


def test_the_news_that_nobody_has_an_item_ends_only_those_who_are_still_without_it():
    fabric = Fabric()
    encoder, engine = encoder_in(fabric), make_engine("PD", fabric=fabric)
    news = ("nobody has it", FailureReason.PEER_LOST)
    engine.add("has it", PROMPT, (CAT,))
    engine.core.announce(ticket_from(encoder))
    engine.step()
    engine.step()
    fabric.is_holding = True
    engine.add("gets it", PROMPT, (DOG,))
    engine.core.announce(ticket_from(encoder, "dog"))
    engine.add("lacks it", PROMPT, (item_of("cow", 5, 6),))
    engine.core.item_failed("has it", CAT.key, *news)
    engine.core.item_failed("gets it", DOG.key, *news)
    engine.core.item_failed("lacks it", DOG.key, *news)
    engine.step()
    fabric.is_holding = False
    engine.run()
    assert set(engine.ends) == {"has it", "gets it"}
    engine.core.item_failed("lacks it", key_of("cow"), *news)
    engine.run()
    assert failure_of(engine, "lacks it") == FailureReason.PEER_LOST
    assert engine.tokens["has it"] == wanted(PROMPT, (CAT,))
    assert engine.tokens["gets it"] == wanted(PROMPT, (DOG,))


# --- one key, two sizes


@pytest.mark.parametrize("where", ("resident", "loading", "announced", "both wait", "in our tower"))
def test_a_request_that_expects_other_rows_than_its_item_has_is_refused_and_its_neighbour_is_served(where: str):
    fabric = Fabric()
    encoder, engine = encoder_in(fabric), make_engine("EPD", fabric=fabric)
    ticket = ticket_from(encoder)
    longer = item_of("cat", 5, 8)
    if where in ("both wait", "in our tower"):
        engine.add("wrong", PROMPT, (longer,))
    engine.add("right", PROMPT, (CAT,))
    if where == "in our tower":
        engine.encode("e", CAT, will_stay=True)
    else:
        fabric.is_holding = where == "loading"
        engine.core.announce(ticket)
    if where in ("resident", "loading"):
        engine.step()
    if where not in ("both wait", "in our tower"):
        engine.add("wrong", PROMPT, (longer,))
    engine.step()
    fabric.is_holding = False
    engine.run()
    assert failure_of(engine, "wrong") == FailureReason.MISMATCH
    assert "wrong" not in engine.tokens
    assert engine.tokens["right"] == wanted(PROMPT, (CAT,))
    assert engine.core.counters.requests_failed[FailureReason.MISMATCH] == 1
    assert_nothing_is_held(engine)


def test_a_request_whose_item_was_evicted_and_came_back_with_other_rows_reads_none_of_them():
    engine = make_engine(is_alone=True, encoder_rows=8, chunk=8)
    item, other = item_of("cat", 10, 6), item_of("cat", 0, 8)
    engine.encode("e", item)
    engine.run()
    engine.add("r", PROMPT, (item,))
    engine.step()
    cache = engine.core.scheduler.cache
    cache.discard(item.key)  # as if its pin had yielded
    cache.allocate(other.key, other.num_rows, (0, 0))
    cache.mark_resident(other.key)
    engine.run()
    assert failure_of(engine, "r") == FailureReason.MISMATCH
    assert_nothing_is_held(engine)


def test_a_ticket_that_fits_nobody_is_forgotten_with_those_who_waited():
    fabric = Fabric()
    encoder, engine = encoder_in(fabric), make_engine("PD", fabric=fabric)
    ticket = ticket_from(encoder)
    engine.add("first", PROMPT, (CAT,))
    engine.core.announce(msgspec.structs.replace(ticket, num_rows=7))
    engine.run()
    assert failure_of(engine, "first") == FailureReason.MISMATCH
    engine.add("second", PROMPT, (CAT,))
    engine.core.announce(ticket)
    engine.run()
    assert engine.tokens["second"] == wanted(PROMPT, (CAT,))


# --- every wait ends


def test_an_encode_that_finds_no_room_ends_at_its_deadline_for_which_the_loop_wakes():
    engine = make_engine("E", encoder_rows=8, lease_s=100.0)
    engine.encode("kept", CAT)
    engine.run()
    engine.encode("waits", DOG)
    engine.run()
    seconds = engine.core.seconds_to_deadline()
    assert seconds is not None
    assert 9.9 < seconds <= 10.0
    engine.clock.now += seconds
    engine.run()
    (failed,) = [event for event in engine.events if isinstance(event, EncodeFailed)]
    assert (failed.id, failed.reason) == ("waits", FailureReason.TIMEOUT)
    engine.encode("next", CAT)
    engine.run()
    assert isinstance(engine.encoded["next"], Encoded), "what is resident is answered all the same"
