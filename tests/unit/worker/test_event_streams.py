"""Events find the coroutine that waits for them, whichever loop it runs in, and whatever has closed meanwhile."""

import asyncio
import threading

import pytest

from triptych.engine.events import Failed, Finished, NewTokens, StageTimings
from triptych.errors import RequestError
from triptych.output import TokenLogprob
from triptych.worker.event_streams import EventStreams


def finished(id: str) -> Finished:
    return Finished(id, "length", StageTimings())


async def test_events_come_in_order_from_another_thread():
    streams = EventStreams()
    queue = streams.open("r")
    events = [NewTokens("r", (TokenLogprob(number, 0.0),)) for number in range(50)]
    thread = threading.Thread(target=lambda: [streams.dispatch([event]) for event in events])
    thread.start()
    assert [await queue.get() for _ in range(50)] == events
    thread.join()


async def test_an_event_goes_to_its_own_stream_only():
    streams = EventStreams()
    a, b = streams.open("a"), streams.open("b")
    streams.dispatch([finished("b"), finished("nobody")])
    assert (await b.get()).id == "b"
    assert a.empty()


async def test_an_id_can_be_used_again_when_its_stream_is_closed_and_not_before():
    streams = EventStreams()
    streams.open("r")
    with pytest.raises(RequestError, match="'r' is in use"):
        streams.open("r")
    streams.close("r")
    streams.close("r")
    assert len(streams) == 0
    assert streams.open("r").empty()


async def test_the_sentence_about_a_long_id_is_short():
    streams = EventStreams()
    streams.open("x" * 10_000)
    with pytest.raises(RequestError) as refusal:
        streams.open("x" * 10_000)
    assert len(str(refusal.value)) < 200


async def test_a_dead_engine_ends_every_stream_and_those_of_the_future():
    streams = EventStreams()
    before = streams.open("before")
    streams.fail_all("ZeroDivisionError: a bug")
    after = streams.open("after")
    for queue in (before, after):
        event = await queue.get()
        assert isinstance(event, Failed)
        assert (event.type, event.status) == ("worker_unavailable", 503)
        assert "a bug" in event.message


def test_a_loop_that_was_closed_under_its_stream_harms_nobody_else():
    streams = EventStreams()
    gone = asyncio.new_event_loop()

    async def leave() -> None:
        streams.open("gone")

    gone.run_until_complete(leave())
    gone.close()

    async def stay() -> str:
        queue = streams.open("here")
        streams.dispatch([finished("gone"), finished("here")])
        return (await queue.get()).id

    assert asyncio.run(stay()) == "here"
