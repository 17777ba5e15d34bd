"""The one thread that owns the engine: commands in order, waits that end, and one word when it breaks."""

import threading

from engine_rig import make_engine, wanted

from triptych.engine.core import EngineCore
from triptych.engine.events import EngineEvent, Finished, NewTokens
from triptych.worker.engine_thread import EngineThread


class Listener:
    """What the thread says, and who may wait for it."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.deaths: list[BaseException] = []
        self.has_finished = threading.Event()
        self.has_died = threading.Event()

    def on_events(self, events: list[EngineEvent]) -> None:
        self.events += events
        if any(isinstance(event, Finished) for event in events):
            self.has_finished.set()

    def on_death(self, error: BaseException) -> None:
        self.deaths.append(error)
        self.has_died.set()


def make_thread() -> tuple[EngineThread, Listener]:
    listener = Listener()
    thread = EngineThread(make_engine(is_alone=True).core, listener.on_events, listener.on_death)
    return thread, listener


def add_request(core: EngineCore) -> None:
    engine = make_engine(is_alone=True)
    engine.core = core
    engine.add("r", list(range(9)))


def test_a_request_is_stepped_to_its_end_without_being_woken():
    thread, listener = make_thread()
    thread.submit(add_request)
    thread.start()
    assert listener.has_finished.wait(10)
    thread.close()
    tokens = [token.token_id for event in listener.events if isinstance(event, NewTokens) for token in event.tokens]
    assert tokens == wanted(list(range(9)))
    assert not listener.deaths


def test_commands_run_in_their_order_and_in_the_engine_thread():
    thread, _ = make_thread()
    ran: list[tuple[int, str]] = []
    has_ended = threading.Event()
    for number in range(20):
        thread.submit(lambda _, number=number: ran.append((number, threading.current_thread().name)))
    thread.submit(lambda _: has_ended.set())
    thread.start()
    assert has_ended.wait(10)
    thread.close()
    assert ran == [(number, "engine") for number in range(20)]


def test_a_command_that_breaks_the_engine_is_its_death_and_is_told_once():
    thread, listener = make_thread()
    thread.start()

    def broken(_: EngineCore) -> None:
        raise ZeroDivisionError("a bug")

    thread.submit(broken)
    assert listener.has_died.wait(10)
    thread.close()
    thread.submit(broken)
    assert [type(error) for error in listener.deaths] == [ZeroDivisionError]
    assert not thread.is_alive


def test_closing_ends_a_thread_that_waits_and_may_be_repeated():
    thread, listener = make_thread()
    thread.start()
    assert thread.is_alive
    thread.close()
    thread.close()
    assert not thread.is_alive
    assert not listener.deaths


def test_a_thread_that_was_never_started_can_be_closed():
    thread, _ = make_thread()
    thread.close()
    assert not thread.is_alive


def test_the_engine_may_close_its_own_thread():
    thread, listener = make_thread()
    thread.submit(lambda _: thread.close())
    thread.start()
    thread._thread.join(10)  # pyright: ignore[reportPrivateUsage]
    assert not thread.is_alive
    assert not listener.deaths


class Impatient:
    """An engine whose next deadline is always a moment ahead."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.was_asked_again = threading.Event()

    def step(self) -> tuple[list[EngineEvent], bool]:
        return [], False

    def seconds_to_deadline(self) -> float:
        self.num_asked += 1
        if self.num_asked > 1:
            self.was_asked_again.set()
        return 0.001


def test_a_deadline_ends_the_wait_for_commands():
    listener, core = Listener(), Impatient()
    thread = EngineThread(core, listener.on_events, listener.on_death)  # type: ignore[arg-type]
    thread.start()
    assert core.was_asked_again.wait(10), "it steps again though nobody sent anything"
    thread.close()
