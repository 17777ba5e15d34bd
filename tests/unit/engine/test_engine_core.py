"""The step loop's body: refusals are events, a failed step ends its own work, and a quiet engine says that nothing moved."""

from dataclasses import replace

from engine_rig import TurnedClock, assert_nothing_is_held, item_of, key_of, make_engine, wanted

from triptych.engine.arithmetic_runner import ArithmeticRunner, Fabric
from triptych.engine.core import EngineCore
from triptych.engine.events import ECNeeded, EncodeFailed, Failed, PreparationNeeded
from triptych.engine.request import RequestSpec
from triptych.errors import FailureReason
from triptych.output import ModelRunnerOutput, SchedulerOutput
from triptych.sampling_params import SamplingParams

PROMPT = list(range(20))


class BreakingRunner:
    """Fails the next step after it was told to, as a device that runs out of memory does."""

    def __init__(self, inner: ArithmeticRunner) -> None:
        self._inner = inner
        self.is_broken = False

    def execute_model(self, scheduler_output: SchedulerOutput, /) -> ModelRunnerOutput:
        if self.is_broken:
            raise RuntimeError("out of memory")
        return self._inner.execute_model(scheduler_output)


def test_an_engine_without_work_says_that_nothing_moved_and_has_no_deadline():
    engine = make_engine(is_alone=True)
    assert engine.core.step() == ([], False)
    assert engine.core.seconds_to_deadline() is None


def test_after_a_step_that_failed_another_is_due_since_it_reports_what_the_connectors_found_out():
    engine = make_engine("PD", fabric=Fabric())
    runner = BreakingRunner(engine.runner)
    core = EngineCore(engine.core._config, runner, engine.clock)  # pyright: ignore[reportPrivateUsage]
    runner.is_broken = True
    assert core.step() == ([], True)
    runner.is_broken = False
    assert core.step() == ([], False)


def test_a_refused_request_has_one_event_and_leaves_nothing():
    engine = make_engine(is_alone=True)
    engine.core.add_request(RequestSpec("r", (1, 2), 5, SamplingParams(max_tokens=4)))
    events, has_moved = engine.core.step()
    assert has_moved
    (failed,) = events
    assert isinstance(failed, Failed)
    assert (failed.id, failed.status, failed.type) == ("r", 400, "invalid_request_error")
    assert engine.core.step() == ([], False)
    assert (engine.core.scheduler.num_waiting, engine.core.scheduler.num_running) == (0, 0)


def test_a_full_queue_refuses_with_429_and_takes_again_when_there_is_room():
    engine = make_engine(is_alone=True)
    small = replace(engine.core._config.scheduler, max_num_waiting=2)  # pyright: ignore[reportPrivateUsage]
    config = replace(engine.core._config, scheduler=small)  # pyright: ignore[reportPrivateUsage]
    core = EngineCore(config, engine.runner, TurnedClock())
    item = item_of("cat", 0, 4)
    for name in "abc":
        core.add_request(RequestSpec(name, tuple(PROMPT), 20, SamplingParams(max_tokens=4), (item,)))
    events, _ = core.step()
    assert [(event.id, event.status) for event in events if isinstance(event, Failed)] == [("c", 429)]
    core.scheduler.abort("a")
    core.add_request(RequestSpec("d", tuple(PROMPT), 20, SamplingParams(max_tokens=4), (item,)))
    events, _ = core.step()
    assert not [event for event in events if isinstance(event, Failed)]


def test_an_encode_that_can_never_fit_is_bad_media_and_one_too_many_may_go_elsewhere():
    engine = make_engine("E", encoder_rows=16)
    engine.encode("big", item_of("big", 0, 17))
    events, _ = engine.core.step()
    assert [(event.id, event.reason) for event in events if isinstance(event, EncodeFailed)] == [("big", FailureReason.BAD_MEDIA)]
    small = replace(engine.core._config.scheduler, max_num_waiting=1)  # pyright: ignore[reportPrivateUsage]
    core = EngineCore(
        replace(engine.core._config, scheduler=small),  # pyright: ignore[reportPrivateUsage]
        engine.runner,
        TurnedClock(),
    )
    engine.core = core
    engine.encode("a", item_of("a", 0, 4))
    engine.encode("b", item_of("b", 0, 4))
    events, _ = core.step()
    assert [event.key for event in events if isinstance(event, PreparationNeeded)] == [item_of("a", 0, 4).key]
    (failed,) = [event for event in events if isinstance(event, EncodeFailed)]
    assert failed.id == "b"
    assert failed.reason == FailureReason.OVERLOADED


def test_a_step_that_raises_ends_its_encodes_too_and_frees_their_pages():
    engine = make_engine(is_alone=True)
    runner = BreakingRunner(engine.runner)
    engine.core = EngineCore(engine.core._config, runner, engine.clock)  # pyright: ignore[reportPrivateUsage]
    item = item_of("cat", 5, 6)
    engine.encode("e", item)
    engine.step()
    engine.core.scheduler.prepared(item.key, None, 0.0)
    runner.is_broken = True
    engine.step()
    runner.is_broken = False
    assert [event.reason for event in engine.events if isinstance(event, EncodeFailed)] == [FailureReason.INTERNAL]
    cache = engine.core.scheduler.cache
    assert cache.num_free_pages == cache.num_pages
    engine.preparations.clear()
    engine.add("r", PROMPT, (item,))
    engine.encode("again", item)
    engine.run()
    assert engine.tokens["r"] == wanted(PROMPT, (item,))
    assert_nothing_is_held(engine)


def test_the_time_to_the_next_deadline_is_that_of_the_first_wait_and_never_negative():
    engine = make_engine("PD", fabric=Fabric())
    engine.add("r", PROMPT, (item_of("cat", 5, 6),))
    assert engine.core.seconds_to_deadline() == 10.0
    engine.clock.now += 4.0
    engine.add("s", PROMPT, (item_of("dog", 5, 6),))
    assert engine.core.seconds_to_deadline() == 6.0
    engine.clock.now += 60.0
    assert engine.core.seconds_to_deadline() == 0.0
    engine.run()
    assert engine.core.seconds_to_deadline() is None


def test_bad_media_is_the_clients_mistake_and_any_other_missing_item_is_not():
    engine = make_engine("PD")
    for name in ("bad", "lost"):
        engine.add(name, PROMPT, (item_of("cat", 5, 6),))
    engine.core.item_failed("bad", key_of("cat"), "not a picture", FailureReason.BAD_MEDIA)
    engine.core.item_failed("lost", key_of("cat"), "nobody has it", FailureReason.PEER_LOST)
    engine.core.item_failed("unknown", key_of("cat"), "nobody knows it", FailureReason.PEER_LOST)
    engine.run()
    ends = {name: end for name, end in engine.ends.items() if isinstance(end, Failed)}
    assert {name: (end.status, end.type) for name, end in ends.items()} == {
        "bad": (400, "invalid_request_error"),
        "lost": (503, "ec_unavailable"),
    }
    assert_nothing_is_held(engine)


def test_an_item_is_asked_for_once_per_request_however_many_steps_it_takes():
    engine = make_engine("PD")
    engine.add("a", PROMPT, (item_of("cat", 5, 6),))
    engine.add("b", PROMPT, (item_of("cat", 9, 6),))
    for _ in range(5):
        engine.step()
    assert sorted(event.id for event in engine.events if isinstance(event, ECNeeded)) == ["a", "b"]
