"""What every data plane does around a copy, so that a wrong read is an error and never a delivery.

A read is: does the ticket fit the destination? (before any contact with the producer) → does it fit the source, with every generation
as published? → copy → generations again → length and checksum of what arrived.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from triptych.errors import FailureReason, TransferError
from triptych.transfer.arena import Arena, memory_fence
from triptych.transfer.ticket import Ticket

_NUM_CHECKSUM_DIGITS = 16


def content_fills(nbytes: int, num_pages: int, page_nbytes: int) -> bool:
    """Whether `nbytes` bytes need all of `num_pages` pages and no more."""
    if num_pages == 0:
        return nbytes == 0
    return (num_pages - 1) * page_nbytes < nbytes <= num_pages * page_nbytes


def checksum(memory: NDArray[np.uint8], pages: Sequence[int], nbytes: int, subject: str = "") -> str:
    """First 16 hex digits of blake3 over the content, `nbytes` bytes of `pages` of `memory` [num_pages, page_nbytes] in order, then `subject`.

    Where the content ends and the subject begins is known: both ends compare `nbytes`.
    """
    num_full, tail_nbytes = _split(nbytes, memory.shape[1])
    digest = blake3()
    for first, _, length in _runs(pages[:num_full], pages[:num_full]):
        digest.update(memory[first : first + length].reshape(-1).data)
    if tail_nbytes:
        digest.update(memory[pages[num_full], :tail_nbytes].data)
    digest.update(subject.encode())
    return digest.hexdigest()[:_NUM_CHECKSUM_DIGITS]


def page_checksums(memory: NDArray[np.uint8], pages: Sequence[int], nbytes: int, subject: str) -> tuple[str, ...]:
    """The `checksum` of each page's part of the content."""
    page_nbytes = memory.shape[1]
    sizes = (min(page_nbytes, nbytes - start) for start in range(0, nbytes, page_nbytes))
    return tuple(checksum(memory, (page,), size, subject) for page, size in zip(pages, sizes, strict=True))


def copy_pages(
    source: NDArray[np.uint8],
    source_pages: Sequence[int],
    destination: NDArray[np.uint8],
    destination_pages: Sequence[int],
    nbytes: int,
) -> None:
    """Copy `nbytes` bytes from pages to pages, both [num_pages, page_nbytes]; the rest of the last page stays as it was.

    Pages that follow each other on both sides are copied at once, without the interpreter's lock.
    """
    num_full, tail_nbytes = _split(nbytes, destination.shape[1])
    for first, into, length in _runs(source_pages[:num_full], destination_pages[:num_full]):
        destination[into : into + length] = source[first : first + length]
    if tail_nbytes:
        destination[destination_pages[num_full], :tail_nbytes] = source[source_pages[num_full], :tail_nbytes]


def part_to_read(ticket: Ticket, num_skipped: int) -> Ticket:
    """Raises MISMATCH for a ticket whose checksum is over all its pages, of which some are to be skipped."""
    if num_skipped and ticket.checksum:
        raise _mismatch("the ticket has one checksum for all its pages, and cannot be read in part.")
    return ticket.without_first(num_skipped) if num_skipped else ticket


def check_ticket(ticket: Ticket, plane: str, arena: Arena, pages: Sequence[int]) -> str:
    """The producer's address on `plane`, if the ticket is sound and fits `pages` of the consumer's `arena`; else MISMATCH."""
    address = ticket.planes.get(plane)
    if address is None:
        raise _mismatch(f"the ticket names no '{plane}' address, only {', '.join(sorted(ticket.planes)) or 'none at all'}.")
    _check_page_nbytes("the ticket's", ticket.page_nbytes, arena)
    if not len(ticket.pages) == len(ticket.generations) == len(pages):
        raise _mismatch(
            f"the ticket has {len(ticket.pages)} pages and {len(ticket.generations)} generations for {len(pages)} pages here."
        )
    if len(ticket.page_checksums) not in (0, len(pages)):
        raise _mismatch(f"the ticket has {len(ticket.page_checksums)} checksums for {len(pages)} pages.")
    _check_named_once("source", ticket.pages)
    check_destination(arena, pages, ticket.nbytes)
    return address


def check_destination(arena: Arena, pages: Sequence[int], nbytes: int) -> None:
    """`nbytes` bytes fill just `pages`, which are pages of `arena`, each named once; else MISMATCH."""
    if not content_fills(nbytes, len(pages), arena.page_nbytes):
        raise _mismatch(f"{nbytes} bytes do not fill {len(pages)} pages of {arena.page_nbytes} bytes.")
    _check_page_numbers("destination", pages, arena)
    _check_named_once("destination", pages)


def check_before(ticket: Ticket, source: Arena) -> None:
    """The ticket fits the producer's arena (else MISMATCH) and its pages have not been recycled (else STALE)."""
    _check_page_nbytes("the ticket's", ticket.page_nbytes, source)
    _check_page_numbers("source", ticket.pages, source)
    _check_generations(ticket, source)
    memory_fence()


def check_after(
    ticket: Ticket, source: Arena, arena: Arena, pages: Sequence[int], *, nbytes_arrived: int, verify_checksum: bool
) -> None:
    """The pages were not recycled during the copy (else STALE) and all of the content arrived (else CORRUPT)."""
    memory_fence()
    _check_generations(ticket, source)
    check_content(ticket, arena, pages, nbytes_arrived=nbytes_arrived, verify_checksum=verify_checksum)


def check_content(ticket: Ticket, arena: Arena, pages: Sequence[int], *, nbytes_arrived: int, verify_checksum: bool) -> None:
    """Length and, where the ticket has them, checksums of what lies in `pages` now are the ticket's; else CORRUPT."""
    if nbytes_arrived != ticket.nbytes:
        raise TransferError(FailureReason.CORRUPT, f"{nbytes_arrived} of {ticket.nbytes} bytes arrived.")
    if verify_checksum and not _has_right_checksums(ticket, arena, pages):
        raise TransferError(FailureReason.CORRUPT, f"the {ticket.nbytes} bytes that arrived have another checksum.")


def _has_right_checksums(ticket: Ticket, arena: Arena, pages: Sequence[int]) -> bool:
    content = (arena.pages, pages, ticket.nbytes, ticket.subject)
    if ticket.page_checksums and page_checksums(*content) != ticket.page_checksums:
        return False
    return not ticket.checksum or checksum(*content) == ticket.checksum


def _check_generations(ticket: Ticket, source: Arena) -> None:
    if source.generations_of(ticket.pages) != ticket.generations:
        raise TransferError(FailureReason.STALE, f"{ticket.producer} has recycled pages of its arena '{ticket.arena}'.")


def _check_page_nbytes(whose: str, page_nbytes: int, arena: Arena) -> None:
    if page_nbytes != arena.page_nbytes:
        raise _mismatch(f"{whose} pages have {page_nbytes} bytes, the arena's {arena.page_nbytes}.")


def _check_page_numbers(which: str, pages: Sequence[int], arena: Arena) -> None:
    if pages and not 0 <= min(pages) <= max(pages) < arena.num_pages:
        raise _mismatch(f"{which} pages {min(pages)} to {max(pages)} are not all among the arena's {arena.num_pages}.")


def _check_named_once(which: str, pages: Sequence[int]) -> None:
    if len(set(pages)) != len(pages):
        raise _mismatch(f"a {which} page is named twice.")


def _mismatch(message: str) -> TransferError:
    return TransferError(FailureReason.MISMATCH, message)


def _split(nbytes: int, page_nbytes: int) -> tuple[int, int]:
    """How many full pages, and how many bytes of one more."""
    return divmod(nbytes, page_nbytes) if nbytes else (0, 0)


def _runs(source_pages: Sequence[int], destination_pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first source page, first destination page, number of pages) of each stretch that ascends by one on both sides."""
    start = 0
    for index in range(1, len(source_pages) + 1):
        if (
            index == len(source_pages)
            or source_pages[index] != source_pages[index - 1] + 1
            or destination_pages[index] != destination_pages[index - 1] + 1
        ):
            yield source_pages[start], destination_pages[start], index - start
            start = index
