"""`Ticket`: everything a consumer needs to read published pages, and to notice that it must not."""

from typing import Annotated, Self

import msgspec
from msgspec import Meta


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pages of one producer's arena, as they were when they were published.

    The content is `nbytes` bytes: the pages in the order given, each full but the last. `generations[i]` is the
    generation of `pages[i]`; a page whose generation has moved on was recycled and must not be delivered.
    `lease_s` is a duration: the producer keeps the pages at least that long after it made the ticket.
    """

    producer: str  # the worker's id
    arena: str  # which of its arenas
    pages: tuple[int, ...]
    generations: tuple[int, ...]
    page_nbytes: int
    nbytes: int
    checksum: str  # first 16 hex digits of blake3 over the content, then the subject; empty when the producer does not compute it
    lease_s: float
    planes: dict[str, str]  # data plane name -> the producer's address on it
    subject: str = ""  # what the content is: under another name the same bytes have another checksum
    # Of each page, likewise; in place of `checksum` where readers may leave out the first pages.
    page_checksums: tuple[Annotated[str, Meta(max_length=64)], ...] = ()

    def without_first(self, num_pages: int) -> Self:
        """The ticket as it is for a reader that leaves out the first `num_pages` pages, which are full."""
        return msgspec.structs.replace(
            self,
            pages=self.pages[num_pages:],
            generations=self.generations[num_pages:],
            nbytes=self.nbytes - num_pages * self.page_nbytes,
            page_checksums=self.page_checksums[num_pages:],
        )
