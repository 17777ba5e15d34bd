"""Pages that are recycled while they are copied. Checksums are off: the generations alone must notice."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from triptych.errors import FailureReason, TransferError
from triptych.transfer import shm
from triptych.transfer.arena import Arena
from triptych.transfer.read_checks import copy_pages
from triptych.transfer.shm import ShmDataPlane


@pytest.fixture
def planes() -> Iterator[tuple[ShmDataPlane, ShmDataPlane]]:
    with (
        closing(ShmDataPlane("e0", verify_checksums=False)) as producer,
        closing(ShmDataPlane("p0", verify_checksums=False)) as consumer,
    ):
        yield producer, consumer


@pytest.mark.parametrize(("recycled", "is_stale"), [(5, True), (6, False)])
def test_a_page_recycled_during_the_copy_makes_the_read_stale_and_other_pages_do_not(
    planes: tuple[ShmDataPlane, ShmDataPlane], monkeypatch: pytest.MonkeyPatch, recycled: int, is_stale: bool
) -> None:
    producer, consumer = planes
    source, destination = Arena.create("source", 8, 64), Arena.create("destination", 8, 64)
    producer.register("kv", source)
    ticket = producer.publish("kv", [4, 5], 128, 60.0)
    assert ticket.checksum == ""

    def copy_slowly(*arguments: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> None:
        copy_pages(*arguments)  # type: ignore[arg-type]
        source.recycle([recycled])

    monkeypatch.setattr(shm, "copy_pages", copy_slowly)
    read = consumer.read(ticket, destination, [0, 1])
    if not is_stale:
        assert read.result(10.0) is None
        return
    with pytest.raises(TransferError) as caught:
        read.result(10.0)
    assert caught.value.reason is FailureReason.STALE
