"""Bytes are kept while somebody waits for them, and no longer; each way to fail is told with its reason."""

import threading
from collections.abc import Callable

import msgspec
import pytest
from worker_rig import encode_request

from triptych.errors import FailureReason, InternalError, MediaError
from triptych.media.processor import MediaProcessor
from triptych.worker.media_preparation import MediaPreparation, PreparationFailed, Prepared

KEY = encode_request().key


class Outcomes:
    def __init__(self) -> None:
        self.told: list[tuple[str, Prepared | PreparationFailed]] = []
        self.has_come = threading.Event()

    def __call__(self, key: str, outcome: Prepared | PreparationFailed) -> None:
        self.told.append((key, outcome))
        self.has_come.set()


def echo(data: bytes, modality: str, grid: tuple[int, ...], num_rows: int) -> object:
    return (data, modality, grid, num_rows)


def make(preprocess: Callable[..., object] = echo, max_pending: int = 8) -> tuple[MediaPreparation, Outcomes]:
    outcomes = Outcomes()
    return MediaPreparation(MediaProcessor(1, max_pending), preprocess, outcomes), outcomes


def test_the_bytes_that_were_held_are_prepared():
    media, outcomes = make()
    request = encode_request()
    media.hold(request, b"bytes")
    media.start(KEY)
    assert outcomes.has_come.wait(10)
    media.close()
    ((key, outcome),) = outcomes.told
    assert key == KEY
    assert isinstance(outcome, Prepared)
    assert outcome.inputs == (b"bytes", "image", request.grid, request.num_rows)
    assert outcome.seconds >= 0


@pytest.mark.parametrize(
    ("error", "reason"),
    (
        (MediaError("not a picture"), FailureReason.BAD_MEDIA),
        (InternalError("no tower"), FailureReason.INTERNAL),
        (ZeroDivisionError("a bug"), FailureReason.INTERNAL),
    ),
)
def test_a_failure_is_told_with_its_reason(error: Exception, reason: FailureReason):
    def broken(*_: object) -> object:
        raise error

    media, outcomes = make(broken)
    media.hold(encode_request(), b"")
    media.start(KEY)
    assert outcomes.has_come.wait(10)
    media.close()
    ((_, outcome),) = outcomes.told
    assert isinstance(outcome, PreparationFailed)
    assert outcome.reason == reason
    assert str(error) in outcome.message


def test_bytes_stay_until_the_last_who_waits_has_left():
    media, outcomes = make()
    for name in "ab":
        media.hold(encode_request(name), b"bytes")
    media.let_go(encode_request("a"))
    media.start(KEY)
    assert outcomes.has_come.wait(10)
    media.let_go(encode_request("b"))
    media.let_go(encode_request("b"))
    assert media._held == {}  # pyright: ignore[reportPrivateUsage]
    media.close()


def test_what_nobody_waits_for_any_more_is_not_prepared_and_fails_nobody_who_comes_next():
    media, outcomes = make()
    media.hold(encode_request("a"), b"bytes")
    media.let_go(encode_request("a"))
    media.start(KEY)
    media.hold(encode_request("b"), b"bytes")
    media.start(KEY)
    assert outcomes.has_come.wait(10)
    media.close()
    assert [type(outcome) for _, outcome in outcomes.told] == [Prepared]


def test_a_full_pool_is_a_failure_that_may_be_tried_again():
    gate = threading.Event()
    media, outcomes = make(lambda *_: gate.wait(10), max_pending=1)
    media.hold(encode_request("a", seed=0), b"")
    media.hold(encode_request("b", seed=1), b"")
    media.start(encode_request(seed=0).key)
    media.start(encode_request(seed=1).key)
    gate.set()
    media.close()
    ((key, outcome), _) = outcomes.told
    assert key == encode_request(seed=1).key
    assert isinstance(outcome, PreparationFailed)
    assert outcome.reason.is_retryable


def test_closing_tells_those_whose_turn_never_came():
    gate, is_running = threading.Event(), threading.Event()

    def slow(*_: object) -> object:
        is_running.set()
        return gate.wait(10)

    media, outcomes = make(slow)
    for seed in (0, 1):
        media.hold(encode_request(f"e{seed}", seed=seed), b"")
        media.start(encode_request(seed=seed).key)
    assert is_running.wait(10)
    closing = threading.Thread(target=media.close)
    closing.start()
    assert outcomes.has_come.wait(10)
    gate.set()
    closing.join(10)
    told = dict(outcomes.told)
    assert isinstance(told[encode_request(seed=0).key], Prepared)
    assert isinstance(told[encode_request(seed=1).key], PreparationFailed)


def test_a_file_whose_callers_left_while_it_waited_for_a_thread_is_not_prepared():
    may_go_on, is_busy, is_at_last = (threading.Event() for _ in range(3))
    prepared: list[bytes] = []

    def preprocess(data: bytes, *_: object) -> object:
        prepared.append(data)
        (is_at_last if data == b"third" else is_busy).set()
        assert may_go_on.wait(10)
        return data

    media, outcomes = make(preprocess)
    busy = encode_request("busy")
    leaves, last = (msgspec.structs.replace(busy, encode_id=letter, key=letter * 64) for letter in "ef")
    for request, data in ((busy, b"first"), (leaves, b"second"), (last, b"third")):
        media.hold(request, data)
    media.start(busy.key)
    assert is_busy.wait(10)
    media.start(leaves.key)
    media.start(last.key)
    media.let_go(leaves)
    may_go_on.set()
    assert is_at_last.wait(10)
    media.close()
    assert prepared == [b"first", b"third"]
    assert [key for key, _ in outcomes.told] == [busy.key, last.key]
