"""`ECTransfer`: how an item's rows get from the producer's pages to the consumer's, which is all that EC connectors differ in.

States, deadlines, pins and leases are the scheduler half's and the same for all. Another package adds one through an entry point: see
ec_registry.py, and docs/encoder-cache.md for an example.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

from triptych.config import EngineConfig
from triptych.output import ECTicket
from triptych.runner.encoder_cache import EncoderCache
from triptych.transfer.data_plane import DataPlane
from triptych.transfer.ticket import Ticket

EC_ARENA = "ec"


class ECTransfer(ABC):
    """Made once, at start: a constructor that raises `ConfigError` ends the worker with that sentence. Called by the engine thread."""

    @abstractmethod
    def publish(self, key: str, pages: Sequence[int], num_rows: int, lease_s: float) -> Ticket:
        """Make the item readable for peers, for `lease_s` seconds at least. Raises `TransferError`, which fails this item only.

        Its rows, [num_rows, row_width], are what `pages` of the encoder cache's arena hold. The ticket's `subject` is `key`, its `nbytes` are
        the rows'; the other fields are this connector's own business.
        """

    @abstractmethod
    def read(self, ticket: ECTicket, pages: Sequence[int]) -> "Future[None]":
        """Start to copy a peer's item into `pages` of the own arena, as `DataPlane.read` does: its promises hold here.

        Of the ticket, `key` and `data` are a peer's word; that rows, dtype and model fit has been checked.
        """

    @abstractmethod
    def close(self) -> None:
        """Idempotent, in bounded time: reads under way end with an error."""


class DataPlaneTransfer(ECTransfer):
    """One copy out of the producer's arena, by the data plane that carries KV blocks, too."""

    def __init__(self, config: EngineConfig, encoder_cache: EncoderCache, data_plane: DataPlane) -> None:
        self._arena = encoder_cache.arena
        self._row_nbytes = config.model.row_nbytes
        self._data_plane = data_plane
        data_plane.register(EC_ARENA, encoder_cache.arena)

    def publish(self, key: str, pages: Sequence[int], num_rows: int, lease_s: float) -> Ticket:
        return self._data_plane.publish(EC_ARENA, pages, num_rows * self._row_nbytes, lease_s, subject=key)

    def read(self, ticket: ECTicket, pages: Sequence[int]) -> "Future[None]":
        return self._data_plane.read(ticket.data, self._arena, pages)

    def close(self) -> None:
        """Nothing of its own: who made the data plane closes it."""
