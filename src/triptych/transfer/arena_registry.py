"""`ArenaRegistry`: a worker's own arenas by name, and the tickets for their pages."""

from collections.abc import Sequence

from triptych.errors import FailureReason, InternalError, TransferError
from triptych.transfer.arena import Arena
from triptych.transfer.read_checks import checksum, content_fills, page_checksums
from triptych.transfer.ticket import Ticket


class ArenaRegistry:
    """Filled while the worker starts, read by all threads afterwards."""

    def __init__(self, worker_id: str, *, with_checksums: bool) -> None:
        self.worker_id = worker_id
        self._with_checksums = with_checksums
        self._arenas: dict[str, Arena] = {}

    def add(self, name: str, arena: Arena) -> None:
        if name in self._arenas:
            raise InternalError(f"arena '{name}' is registered already.")
        self._arenas[name] = arena

    def get(self, name: str) -> Arena:
        """Raises `TransferError` (MISMATCH) for a name that a peer made up."""
        arena = self._arenas.get(name)
        if arena is None:
            raise TransferError(FailureReason.MISMATCH, f"{self.worker_id} has no arena '{name}'.")
        return arena

    def make_ticket(
        self,
        name: str,
        pages: Sequence[int],
        nbytes: int,
        lease_s: float,
        planes: dict[str, str],
        subject: str,
        *,
        is_divisible: bool = False,
    ) -> Ticket:
        """A ticket for `nbytes` bytes in `pages` as they are now. Raises `InternalError` if the content does not fill the pages."""
        arena = self.get(name)
        if not content_fills(nbytes, len(pages), arena.page_nbytes):
            raise InternalError(f"{nbytes} bytes do not fill {len(pages)} pages of {arena.page_nbytes} bytes of arena '{name}'.")
        content = (arena.pages, pages, nbytes, subject)
        return Ticket(
            producer=self.worker_id,
            arena=name,
            pages=tuple(pages),
            generations=arena.generations_of(pages),
            page_nbytes=arena.page_nbytes,
            nbytes=nbytes,
            checksum=checksum(*content) if self._with_checksums and not is_divisible else "",
            lease_s=lease_s,
            planes=planes,
            subject=subject,
            page_checksums=page_checksums(*content) if self._with_checksums and is_divisible else (),
        )
