"""`FileTransfer`: the `file` EC connector. Items go through a directory that all workers share, the counterpart of vLLM's example connector.

An item outlives its lease, and the worker that encoded it: its name is its content's key, so that it is right as long as it is there.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from triptych.config import EngineConfig
from triptych.errors import ConfigError, FailureReason, TransferError
from triptych.output import ECTicket
from triptych.runner.ec_transfer import EC_ARENA, ECTransfer
from triptych.runner.encoder_cache import EncoderCache
from triptych.runner.item_files import ItemFiles, ItemShape
from triptych.transfer.data_plane import DataPlane
from triptych.transfer.read_checks import check_destination, copy_pages
from triptych.transfer.read_pool import ReadPool
from triptych.transfer.ticket import Ticket

NAME = "ec-file"  # among a ticket's planes; there is no address: everybody knows the directory
_MIB = 1024**2
_NUM_THREADS = 2


class FileTransfer(ECTransfer):
    def __init__(self, config: EngineConfig, encoder_cache: EncoderCache, data_plane: DataPlane) -> None:
        connector = config.connector
        assert connector.ec_path is not None, "a configuration without it is refused"
        cache_nbytes = encoder_cache.arena.num_pages * encoder_cache.arena.page_nbytes
        if cache_nbytes > connector.ec_path_nbytes:
            raise ConfigError(
                f"--ec-path-mib is {connector.ec_path_nbytes // _MIB}, but an item may be as large as the encoder cache, "
                f"{cache_nbytes / _MIB:.1f} MiB; raise it, or lower --encoder-cache-rows."
            )
        self._model = config.model
        self._arena = encoder_cache.arena
        self._worker_id = data_plane.worker_id
        self._files = ItemFiles(connector.ec_path, connector.ec_path_nbytes)
        self._pool = ReadPool(_NUM_THREADS, "ec-file-read")

    def publish(self, key: str, pages: Sequence[int], num_rows: int, lease_s: float) -> Ticket:
        """Returns when the file is complete."""
        shape = self._shape_of(num_rows)
        checksum = self._files.put(key, shape, self._arena.pages[list(pages)].reshape(-1)[: shape.nbytes])
        return Ticket(
            producer=self._worker_id,
            arena=EC_ARENA,
            pages=(),
            generations=(),
            page_nbytes=0,
            nbytes=shape.nbytes,
            checksum=checksum,
            lease_s=lease_s,
            planes={NAME: ""},
            subject=key,
        )

    def read(self, ticket: ECTicket, pages: Sequence[int]) -> "Future[None]":
        result: Future[None] = Future()
        self._pool.start(result, partial(self._load, ticket, tuple(pages)))
        return result

    def close(self) -> None:
        self._pool.close()

    def _load(self, ticket: ECTicket, pages: tuple[int, ...]) -> None:
        if NAME not in ticket.data.planes:
            raise TransferError(FailureReason.MISMATCH, "the ticket is another EC connector's than file.")
        shape = self._shape_of(ticket.num_rows)
        check_destination(self._arena, pages, shape.nbytes)
        # [len(pages), page_nbytes]: the rows, and nothing of interest after them
        rows = np.empty((len(pages), self._arena.page_nbytes), np.uint8)
        self._files.read(ticket.key, shape, ticket.data.checksum, rows.reshape(-1)[: shape.nbytes])
        copy_pages(rows, range(len(pages)), self._arena.pages, pages, shape.nbytes)

    def _shape_of(self, num_rows: int) -> ItemShape:
        model = self._model
        return ItemShape(num_rows, model.row_width, model.dtype, model.weights_digest, num_rows * model.row_nbytes)
