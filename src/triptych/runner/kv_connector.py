"""The KV connector's worker half: obeys `KVConnectorMetadata` around one engine step.

    bind metadata → start loads → (body: forward) → save → collect, clear

Loads run beside any number of steps, several of one request at once: it waits for its blocks outside the batch, and the step that finds a part
of them arrived says so.
Which blocks was decided by the scheduler half, `engine/kv_connector.py`.
"""

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from triptych.config import EngineConfig
from triptych.errors import ConfigError, FailureReason
from triptych.output import EMPTY_KV_METADATA, KVConnectorOutput, KVLoad, KVPart, KVSave, KVTicket, SchedulerOutput, sealed
from triptych.runner.kv_cache import KVCache
from triptych.runner.pending_reads import PendingReads, reason_of
from triptych.transfer.data_plane import DataPlane

logger = logging.getLogger(__name__)

KV_ARENA = "kv"

_NO_STEP: AbstractContextManager[None] = nullcontext()


class KVConnector:
    """The no-op: KV blocks never leave this worker, and a step allocates nothing."""

    def step(self, scheduler_output: SchedulerOutput) -> AbstractContextManager[KVConnectorOutput | None]:
        """A context manager around the step's body; yields what the step will report, or None."""
        return _NO_STEP

    def withhold(self, request_ids: Iterable[str]) -> None:
        """To be called in the body: this step did not compute these requests, so their blocks are not to be published."""

    def close(self) -> None:
        pass


class ActiveKVConnector(KVConnector):
    """Loads published blocks into this worker's KV cache, and publishes its own."""

    def __init__(self, config: EngineConfig, kv_cache: KVCache, data_plane: DataPlane, on_progress: Callable[[], None]) -> None:
        """`on_progress` is called from a copy thread when a read ends, so that the engine thread runs a step and collects it."""
        self._config = config
        self._kv_cache = kv_cache
        self._data_plane = data_plane
        self._reads: PendingReads[KVPart, KVLoad] = PendingReads(on_progress)
        self._metadata = EMPTY_KV_METADATA
        self._withheld: set[str] = set()
        # What was found out in a step whose body then failed: reported by the next one.
        self._unreported = KVConnectorOutput()

    @contextmanager
    def step(self, scheduler_output: SchedulerOutput) -> Generator[KVConnectorOutput, None, None]:
        output, self._unreported = self._unreported, KVConnectorOutput()
        try:
            self._metadata = scheduler_output.kv_connector_metadata
            self._load(output)
            yield output
            self._save(output)
        except BaseException:
            self._unreported = output
            raise
        finally:
            self._finish(output)

    def withhold(self, request_ids: Iterable[str]) -> None:
        self._withheld.update(request_ids)

    def close(self) -> None:
        self._reads.close()

    def _load(self, output: KVConnectorOutput) -> None:
        if not self._config.is_kv_consumer:
            return
        for load in self._metadata.loads:
            mismatch = self._mismatch_of(load)
            if mismatch:
                logger.warning("KV of request %s is refused: %s", load.request_id, mismatch)
                output.failed_loads[load.part] = FailureReason.MISMATCH
                continue
            read = partial(self._data_plane.read, load.ticket.data, self._kv_cache.arena, load.block_ids, load.num_skipped)
            self._reads.start(load.part, load, read)

    def _save(self, output: KVConnectorOutput) -> None:
        if not self._config.is_kv_producer:
            return
        for save in self._metadata.saves:
            if save.request_id in self._withheld:
                continue
            try:
                output.published[save.request_id] = self._ticket_of(save)
            except Exception as error:  # the edge to a data plane: blocks that cannot be published are that request's failure
                output.failed_saves[save.request_id] = reason_of(error, f"publish of the KV of {save.request_id}")

    def _ticket_of(self, save: KVSave) -> KVTicket:
        config = self._config
        self._kv_cache.stage_out(save.block_ids)
        data = self._data_plane.publish(
            KV_ARENA,
            save.block_ids,
            len(save.block_ids) * config.kv_block_nbytes,
            self._metadata.lease_s,
            subject=save.request_id,
            is_divisible=True,
        )
        ticket = KVTicket(
            request_id=save.request_id,
            num_tokens=save.num_tokens,
            block_size=config.cache.block_size,
            block_nbytes=config.kv_block_nbytes,
            dtype=config.model.dtype,
            data=data,
            first_block=save.first_block,
        )
        return sealed(ticket, config.cluster_secret)

    def _finish(self, output: KVConnectorOutput) -> None:
        """Once per step, whatever happened. Nothing in it raises, so that the body's own exception is what is seen."""
        self._reads.collect(self._admit, output.finished_loads, output.failed_loads)
        self._metadata = EMPTY_KV_METADATA
        self._withheld.clear()

    def _admit(self, load: KVLoad) -> None:
        self._kv_cache.stage_in(load.block_ids)
        # The producer's last block may hold anything past the request's end.
        first_token = (load.ticket.first_block + load.num_skipped) * self._kv_cache.block_size
        self._kv_cache.clear_after(load.block_ids, load.ticket.num_tokens - first_token)

    def _mismatch_of(self, load: KVLoad) -> str:
        """What of the ticket does not fit this worker's model and the blocks given; empty if all does."""
        ticket, config = load.ticket, self._config
        num_blocks = -(-ticket.num_tokens // config.cache.block_size) - ticket.first_block
        checks = (
            ("subject", ticket.data.subject, ticket.request_id),
            ("block_size", ticket.block_size, config.cache.block_size),
            ("block_nbytes", ticket.block_nbytes, config.kv_block_nbytes),
            ("dtype", ticket.dtype, config.model.dtype),
            ("number of blocks", len(ticket.data.pages), num_blocks),
            ("page_nbytes", ticket.data.page_nbytes, config.kv_block_nbytes),
            ("nbytes", ticket.data.nbytes, num_blocks * config.kv_block_nbytes),
        )
        if ticket.first_block < 0 or num_blocks <= load.num_skipped or len(load.block_ids) != num_blocks - load.num_skipped:
            place = f"blocks {ticket.first_block} and following, less {load.num_skipped},"
            return f"{place} up to token {ticket.num_tokens} do not fit {len(load.block_ids)} blocks"
        return "; ".join(f"{name} is {given} and should be {wanted}" for name, given, wanted in checks if given != wanted)


def get_kv_connector(
    config: EngineConfig, kv_cache: KVCache, data_plane: DataPlane | None, on_progress: Callable[[], None]
) -> KVConnector:
    """The active one where the role sends or takes, with its arena registered; else the no-op. Raises `ConfigError` without a data plane."""
    if not (config.is_kv_producer or config.is_kv_consumer):
        return KVConnector()
    if data_plane is None:
        raise ConfigError(f"a worker of role {config.role} among others needs a data plane.")
    data_plane.register(KV_ARENA, kv_cache.arena)
    return ActiveKVConnector(config, kv_cache, data_plane, on_progress)
