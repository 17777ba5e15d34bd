"""One job per item, whoever asks for it and whoever leaves."""

from engine_rig import key_of

from triptych.engine.encode_queue import EncodeQueue, EncodeSpec
from triptych.engine.encoder_cache_manager import LAST, EncoderCacheManager, Rank

CAT, DOG, COW = key_of("cat"), key_of("dog"), key_of("cow")


def spec_of(encode_id: str, key: str = CAT, num_rows: int = 8, will_stay: bool = False) -> EncodeSpec:
    return EncodeSpec(encode_id, key, "image", num_rows, (1, 2, 2), will_stay)


def make_queue(num_pages: int = 8, max_rows: int = 16) -> tuple[EncodeQueue, EncoderCacheManager]:
    cache = EncoderCacheManager(num_pages, 4)
    return EncodeQueue(cache, max_rows, 10.0), cache


def everybody_last(_: str) -> Rank:
    return LAST


def ready(queue: EncodeQueue, *specs: EncodeSpec) -> None:
    for spec in specs:
        queue.submit(spec, 0.0)
        queue.prepared(spec.key, spec.key, 0.1)


def test_only_the_first_call_for_an_item_has_it_prepared():
    queue, _ = make_queue()
    assert queue.submit(spec_of("a"), 0.0)
    assert not queue.submit(spec_of("b"), 0.0)
    assert len(queue) == 1


def test_what_is_not_prepared_is_not_started():
    queue, _ = make_queue()
    queue.submit(spec_of("a"), 0.0)
    assert queue.schedule(1.0, everybody_last) == []
    queue.prepared(CAT, "inputs", 0.1)
    (started,) = queue.schedule(1.0, everybody_last)
    assert (started.key, started.inputs, started.num_rows) == (CAT, "inputs", 8)
    queue.check_invariants()


def test_the_row_budget_ends_a_step_and_an_item_over_it_goes_alone():
    queue, _ = make_queue(num_pages=20, max_rows=16)
    ready(queue, spec_of("big", CAT, 40), spec_of("a", DOG, 8), spec_of("b", COW, 8))
    assert [each.key for each in queue.schedule(1.0, everybody_last)] == [CAT]
    queue.take(CAT)
    assert [each.key for each in queue.schedule(1.0, everybody_last)] == [DOG, COW]


def test_who_waits_here_comes_before_who_does_not():
    queue, _ = make_queue(max_rows=8)
    ready(queue, spec_of("a", CAT), spec_of("b", DOG))
    ranks = {CAT: LAST, DOG: (0, 7)}
    assert [each.key for each in queue.schedule(1.0, lambda key: ranks[key])] == [DOG]


def test_a_smaller_item_does_not_take_the_room_from_one_that_waits_for_it():
    queue, cache = make_queue(num_pages=4)
    cache.allocate("held", 8, LAST)
    ready(queue, spec_of("big", CAT, 12), spec_of("small", DOG, 4))
    assert queue.schedule(1.0, everybody_last) == []


def test_the_last_caller_takes_the_job_away_and_its_inputs_are_ignored():
    queue, _ = make_queue()
    queue.submit(spec_of("a"), 0.0)
    queue.submit(spec_of("b"), 0.0)
    queue.leave("a")
    assert len(queue) == 1
    queue.leave("b")
    queue.leave("b")
    assert len(queue) == 0
    queue.prepared(CAT, "inputs", 0.1)
    assert queue.schedule(1.0, everybody_last) == []


def test_inputs_that_come_twice_are_taken_once():
    queue, _ = make_queue()
    queue.submit(spec_of("a"), 0.0)
    queue.prepared(CAT, "first", 0.1)
    queue.prepared(CAT, "second", 0.1)
    assert [each.inputs for each in queue.schedule(1.0, everybody_last)] == ["first"]


def test_a_ticket_is_needed_if_one_of_the_callers_needs_it():
    queue, _ = make_queue()
    queue.submit(spec_of("stays", will_stay=True), 0.0)
    job = queue.get(CAT)
    assert job is not None
    assert not job.needs_ticket
    queue.submit(spec_of("goes"), 0.0)
    assert job.needs_ticket


def test_an_item_that_a_load_is_bringing_is_not_encoded_unless_the_load_fails():
    queue, cache = make_queue()
    ready(queue, spec_of("a"))
    cache.allocate(CAT, 8, LAST)  # as a load does
    assert queue.schedule(1.0, everybody_last) == []
    cache.discard(CAT)
    assert [each.key for each in queue.schedule(1.0, everybody_last)] == [CAT]
