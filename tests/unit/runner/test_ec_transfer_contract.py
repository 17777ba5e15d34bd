"""What every `ECTransfer` owes the connector, run over each of them. For an outside package's: add it to transfer_rig.py's kinds."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transfer_rig import KINDS, NUM_PAGES, TIMEOUT_S, UNTOUCHED, WIDTH, Pair, pair_of

from triptych.errors import FailureReason, TransferError
from triptych.output import ECTicket

KEY, OTHER = "a" * 64, "b" * 64


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with pair_of(request.param, tmp_path) as made:
        yield made


def reason_of(action: Callable[[], None]) -> FailureReason:
    with pytest.raises(TransferError) as caught:
        action()
    return caught.value.reason


def changed(ticket: ECTicket, **fields: Any) -> ECTicket:
    """With other fields; those of the transfer's own ticket by their names, too."""
    own = {name: fields.pop(name) for name in list(fields) if name not in ECTicket.__struct_fields__}
    return msgspec.structs.replace(ticket, data=msgspec.structs.replace(ticket.data, **own), **fields)


# --- what arrives


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("source", "pages", "num_rows"),
    [((0, 1, 2), (4, 5, 6), 12), ((5, 3, 9), (0, 11, 4), 9), ((2,), (7,), 1), ((8, 1), (1, 8), 5)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_just_the_rows_arrive_and_no_other_byte_changes(
    tmp_path: Path, kind: str, dtype: str, source: tuple[int, ...], pages: tuple[int, ...], num_rows: int
) -> None:
    with pair_of(kind, tmp_path, dtype) as pair:
        ticket, rows = pair.publish(KEY, source, num_rows)
        pair.read(ticket, pages)
        assert torch.equal(pair.arrived(pages, num_rows), rows)
        assert pair.is_untouched_but_for(pages)
        tail_nbytes = num_rows % 4 * WIDTH * rows.element_size()
        assert not tail_nbytes or (pair.consumer.cache.arena.pages[pages[-1], tail_nbytes:] == UNTOUCHED).all()


def test_the_ticket_says_what_it_is_for_and_how_many_bytes(pair: Pair) -> None:
    ticket, _ = pair.publish(KEY, (3, 9), 6)
    assert (ticket.data.subject, ticket.data.nbytes, ticket.data.lease_s) == (KEY, 6 * WIDTH * 4, 60.0)
    assert ticket.data.producer == "e0"


def test_a_ticket_still_works_after_a_trip_as_json(pair: Pair) -> None:
    ticket, rows = pair.publish(KEY, (3, 9), 6)
    pair.read(msgspec.json.decode(msgspec.json.encode(ticket), type=ECTicket), (0, 1))
    assert torch.equal(pair.arrived((0, 1), 6), rows)


def test_many_reads_at_once_by_several_readers_do_not_mix(pair: Pair) -> None:
    published = [pair.publish(f"{page:064x}", (page,), 4, seed=page) for page in range(NUM_PAGES)]
    readers = [pair.consumer, pair.make("p1")]
    futures: list[Future[None]] = []
    for reader in readers:
        futures += [reader.transfer.read(ticket, (11 - i,)) for i, (ticket, _) in enumerate(published)]
    pair.network.deliver()
    for future in futures:
        future.result(TIMEOUT_S)
    for reader in readers:
        assert all(torch.equal(pair.arrived((11 - i,), 4, reader), rows) for i, (_, rows) in enumerate(published))


def test_a_read_that_is_late_has_not_failed_and_delivers_all_the_same(pair: Pair) -> None:
    ticket, rows = pair.publish(KEY, (3, 9), 6)
    with pair.reads_held():
        future = pair.consumer.transfer.read(ticket, (0, 1))
        assert not future.done()
        assert pair.is_untouched_but_for(())
    future.result(TIMEOUT_S)
    assert torch.equal(pair.arrived((0, 1), 6), rows)


def test_an_item_published_again_is_delivered_by_the_old_ticket_and_by_the_new(pair: Pair) -> None:
    old, rows = pair.publish(KEY, (3, 9), 6)
    new = pair.publish_again(KEY)
    for ticket, pages in ((old, (0, 1)), (new, (2, 3))):
        pair.read(ticket, pages)
        assert torch.equal(pair.arrived(pages, 6), rows)


# --- what must not arrive


def test_rows_whose_pages_were_given_to_another_item_are_never_delivered_as_the_first(pair: Pair) -> None:
    ticket, rows = pair.publish(KEY, (3, 9), 6)
    pair.producer.cache.recycle((3, 9))
    new, others = pair.publish(OTHER, (3, 9), 6, seed=2)
    if pair.kind == "file":  # it was kept under its own name
        pair.read(ticket, (0, 1))
        assert torch.equal(pair.arrived((0, 1), 6), rows)
    else:
        expected = FailureReason.MISSING if pair.kind == "file plane" else FailureReason.STALE
        assert reason_of(lambda: pair.read(ticket, (0, 1))) is expected
        assert pair.is_untouched_but_for(())
    pair.read(new, (2, 5))
    assert torch.equal(pair.arrived((2, 5), 6), others)


def test_what_is_gone_is_an_error_and_can_be_had_once_it_is_there_again(pair: Pair) -> None:
    ticket, rows = pair.publish(KEY, (3, 9), 6)
    pair.producer.cache.recycle((3, 9))
    for file in pair.directory.rglob("*.safetensors"):
        file.unlink()
    expected = FailureReason.MISSING if pair.kind.startswith("file") else FailureReason.STALE
    assert reason_of(lambda: pair.read(ticket, (0, 1))) is expected
    assert pair.is_untouched_but_for(())
    again, rows = pair.publish(KEY, (4, 2), 6)
    pair.read(again, (0, 1))
    assert torch.equal(pair.arrived((0, 1), 6), rows)


def _cut(pair: Pair, ticket: ECTicket, pages: tuple[int, ...]) -> "Future[None]":
    """Start a read of which the last byte does not arrive as it was published."""
    for file in pair.directory.rglob("*.safetensors"):
        os.truncate(file, file.stat().st_size - 1)
    if pair.kind == "shm":  # its memory is sealed against cutting
        pair.producer.cache.arena.pages[9, 2 * WIDTH * 4 - 1] ^= 1
    future = pair.consumer.transfer.read(ticket, pages)
    for read in pair.network.pending:
        read.nbytes_cut = 1
    pair.network.deliver()
    return future


def test_rows_that_do_not_arrive_whole_are_corrupt_and_are_delivered_after_they_are_published_again(pair: Pair) -> None:
    ticket, rows = pair.publish(KEY, (3, 9), 6)
    assert reason_of(lambda: _cut(pair, ticket, (0, 1)).result(TIMEOUT_S)) is FailureReason.CORRUPT
    assert pair.is_untouched_but_for((0, 1))
    pair.producer.cache.recycle((3, 9))
    again, rows = pair.publish(KEY, (3, 9), 6)
    pair.read(again, (0, 1))
    assert torch.equal(pair.arrived((0, 1), 6), rows)


def test_a_ticket_does_not_deliver_one_item_under_the_key_of_another(pair: Pair) -> None:
    ticket, _ = pair.publish(KEY, (3, 9), 6)
    pair.publish(OTHER, (5, 7), 6, seed=2)
    forged = changed(ticket, key=OTHER, subject=OTHER)
    expected = FailureReason.STALE if pair.kind == "file" else FailureReason.CORRUPT
    if pair.kind == "file plane":
        expected = FailureReason.MISSING
    assert reason_of(lambda: pair.read(forged, (0, 1))) is expected
    assert pair.is_untouched_but_for((0, 1))


WRONG: dict[str, dict[str, Any]] = {
    "on no plane": {"planes": {}},
    "on a plane that nobody has": {"planes": {"smoke signals": "hill"}},
    "for a key that leaves the directory": {"key": "../" * 20 + "a" * 4, "subject": "../" * 20 + "a" * 4},
    "for an endless key": {"key": "a" * 100_000, "subject": "a" * 100_000},
    "for an empty key": {"key": "", "subject": ""},
    "with another checksum": {"checksum": "0" * 16},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_ticket_that_is_wrong_is_a_transfer_error_and_the_next_read_is_served(pair: Pair, what: str) -> None:
    ticket, rows = pair.publish(KEY, (3, 9), 6)
    wrong = changed(ticket, **WRONG[what])
    assert reason_of(lambda: pair.read(wrong, (0, 1))) in set(FailureReason) - {FailureReason.INTERNAL}
    assert pair.is_untouched_but_for((0, 1))
    pair.read(ticket, (2, 5))
    assert torch.equal(pair.arrived((2, 5), 6), rows)


@pytest.mark.parametrize("pages", [(0,), (0, 1, 2), (0, NUM_PAGES), (-1, 0), (3, 3), ()])
def test_pages_that_do_not_fit_the_rows_are_a_mismatch_and_no_byte_changes(pair: Pair, pages: tuple[int, ...]) -> None:
    ticket, _ = pair.publish(KEY, (3, 9), 6)
    assert reason_of(lambda: pair.read(ticket, pages)) is FailureReason.MISMATCH
    assert pair.is_untouched_but_for(())


# --- ends


def test_after_the_producers_end_an_item_is_lost_with_it_or_is_there_still(pair: Pair) -> None:
    ticket, rows = pair.publish(KEY, (3, 9), 6)
    pair.producer.close()
    if pair.kind == "file":
        pair.read(ticket, (0, 1))
        assert torch.equal(pair.arrived((0, 1), 6), rows)
        return

    def read_until_lost() -> None:  # a read that overtakes the news of the death may still succeed
        while True:
            pair.read(ticket, (0, 1))

    assert reason_of(read_until_lost) is FailureReason.PEER_LOST
    assert pair.is_untouched_but_for((0, 1))


def test_a_reader_that_is_closed_reads_nothing_more_and_costs_the_others_nothing(pair: Pair) -> None:
    ticket, rows = pair.publish(KEY, (3, 9), 6)
    pair.consumer.close()
    pair.consumer.close()
    assert reason_of(lambda: pair.read(ticket, (0, 1))) is FailureReason.INTERNAL
    assert pair.is_untouched_but_for(())
    other = pair.make("p1")
    pair.read(ticket, (0, 1), other)
    assert torch.equal(pair.arrived((0, 1), 6, other), rows)
