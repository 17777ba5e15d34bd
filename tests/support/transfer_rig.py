"""Both ends of an EC connector, over each `ECTransfer` there is: an encoder cache, a data plane and a transfer per worker."""

from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np
import torch
from torch import Tensor

from triptych.config import CacheConfig, ConnectorConfig, EngineConfig, ModelConfig, Role
from triptych.output import ECTicket, sealed
from triptych.runner.ec_transfer import DataPlaneTransfer, ECTransfer
from triptych.runner.encoder_cache import EncoderCache
from triptych.runner.file_transfer import FileTransfer
from triptych.transfer.arena import Arena
from triptych.transfer.data_plane import DataPlane
from triptych.transfer.fake import FakeDataPlane, FakeNetwork
from triptych.transfer.file import FileDataPlane
from triptych.transfer.shm import ShmDataPlane

KINDS = ("shm", "file plane", "fake", "file")
WIDTH, ROWS_PER_PAGE, NUM_PAGES = 24, 4, 12
UNTOUCHED = 0xAA
TIMEOUT_S = 10.0


def config_of(role: str, directory: Path, dtype: str = "float32") -> EngineConfig:
    model = ModelConfig(
        path=Path("/nowhere"),
        name="m",
        family="f",
        weights_digest="d" * 64,
        dtype=dtype,
        max_model_len=512,
        vocab_size=1000,
        hidden_size=WIDTH,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
    )
    cache = CacheConfig(block_size=4, num_kv_blocks=8, encoder_cache_rows=NUM_PAGES * ROWS_PER_PAGE, rows_per_page=ROWS_PER_PAGE)
    connector = ConnectorConfig(ec_connector="file", ec_path=directory)
    return EngineConfig(model, Role.parse(role), is_alone=False, cache=cache, connector=connector)


@dataclass
class End:
    """One worker's."""

    config: EngineConfig
    cache: EncoderCache
    plane: DataPlane
    transfer: ECTransfer

    def close(self) -> None:
        self.transfer.close()
        self.plane.close()


@dataclass
class Pair:
    kind: str
    directory: Path  # of whatever keeps files
    network: FakeNetwork
    make: Callable[[str], End]
    producer: End
    consumer: End

    def publish(self, key: str, pages: tuple[int, ...], num_rows: int, seed: int = 1) -> tuple[ECTicket, Tensor]:
        """Random rows [num_rows, WIDTH] written to `pages` and published, as the connector does it; the ticket and the rows."""
        end = self.producer
        rows = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to(end.cache.dtype)
        end.cache.write(key, pages, rows)
        return self.publish_again(key), rows

    def publish_again(self, key: str) -> ECTicket:
        end = self.producer
        item, model = end.cache.find(key), end.config.model
        assert item is not None
        data = end.transfer.publish(key, item.pages, item.num_rows, 60.0)
        return sealed(ECTicket(key, item.num_rows, WIDTH, model.dtype, data, model.weights_digest), end.config.cluster_secret)

    def read(self, ticket: ECTicket, pages: tuple[int, ...], reader: End | None = None) -> None:
        future = (reader or self.consumer).transfer.read(ticket, pages)
        self.network.deliver()
        future.result(TIMEOUT_S)

    @contextmanager
    def reads_held(self) -> Generator[None]:
        """Until the end, no read of the consumer goes on."""
        if self.kind == "fake":
            yield
            self.network.deliver()
            return
        owner = self.consumer.transfer if self.kind == "file" else self.consumer.plane
        may_go_on = Event()
        for _ in range(2):  # as many as there are threads
            owner._pool.start(Future(), lambda: may_go_on.wait(TIMEOUT_S))  # type: ignore[attr-defined]
        yield
        may_go_on.set()

    def arrived(self, pages: tuple[int, ...], num_rows: int, reader: End | None = None) -> Tensor:
        by_page = (reader or self.consumer).cache.rows.view(NUM_PAGES, ROWS_PER_PAGE, WIDTH)
        return torch.cat([by_page[page] for page in pages])[:num_rows]

    def is_untouched_but_for(self, pages: tuple[int, ...]) -> bool:
        return bool((np.delete(self.consumer.cache.arena.pages, list(pages), axis=0) == UNTOUCHED).all())


@contextmanager
def pair_of(kind: str, directory: Path, dtype: str = "float32") -> Generator[Pair]:
    network = FakeNetwork()
    with ExitStack() as stack:

        def make_end(worker_id: str, role: str = "EP") -> End:
            config = config_of(role, directory, dtype)
            arena = Arena.create("ec", NUM_PAGES, config.encoder_page_nbytes)
            arena.pages[:] = UNTOUCHED
            cache = EncoderCache(arena, config, torch.device("cpu"))
            plane = FileDataPlane(worker_id, directory) if kind == "file plane" else FakeDataPlane(worker_id, network)
            plane = ShmDataPlane(worker_id) if kind == "shm" else plane
            transfer = (FileTransfer if kind == "file" else DataPlaneTransfer)(config, cache, plane)
            end = End(config, cache, plane, transfer)
            stack.callback(end.close)
            return end

        yield Pair(kind, directory, network, make_end, make_end("e0"), make_end("p0"))
