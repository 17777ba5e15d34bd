"""The EC connector's worker half: obeys `ECConnectorMetadata` around one engine step.

    bind metadata → start loads → wait for those that this step needs → (body: encode, forward) → save → collect, clear

Which loads, which saves and which pages was decided by the scheduler half, `engine/ec_connector.py`. A load that this step does not
need, or that did not end in time, is collected in a later step.
"""

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from triptych.config import EngineConfig
from triptych.errors import ConfigError, FailureReason, InternalError
from triptych.output import EMPTY_EC_METADATA, ECConnectorOutput, ECLoad, ECTicket, SchedulerOutput, sealed
from triptych.runner.ec_registry import find_ec_connector, package_of
from triptych.runner.ec_transfer import ECTransfer
from triptych.runner.encoder_cache import EncoderCache
from triptych.runner.pending_reads import PendingReads, reason_of
from triptych.transfer.data_plane import DataPlane

logger = logging.getLogger(__name__)

_NO_STEP: AbstractContextManager[None] = nullcontext()


class ECConnector:
    """The no-op: nothing is ever sent or taken, and a step allocates nothing."""

    def step(self, scheduler_output: SchedulerOutput) -> AbstractContextManager[ECConnectorOutput | None]:
        """A context manager around the step's body; yields what the step will report, or None."""
        return _NO_STEP

    def close(self) -> None:
        pass


class ActiveECConnector(ECConnector):
    """Loads published items into this worker's encoder cache, and publishes its own."""

    def __init__(
        self, config: EngineConfig, encoder_cache: EncoderCache, transfer: ECTransfer, on_progress: Callable[[], None]
    ) -> None:
        """`on_progress` is called from a copy thread when a read ends, so that the engine thread runs a step and collects it."""
        self._config = config
        self._encoder_cache = encoder_cache
        self._transfer = transfer
        self._reads: PendingReads[str, ECLoad] = PendingReads(on_progress)
        self._metadata = EMPTY_EC_METADATA
        # What was found out in a step whose body then failed: reported by the next one.
        self._unreported = ECConnectorOutput()

    @contextmanager
    def step(self, scheduler_output: SchedulerOutput) -> Generator[ECConnectorOutput, None, None]:
        output, self._unreported = self._unreported, ECConnectorOutput()
        try:
            self._metadata = scheduler_output.ec_connector_metadata
            self._load(output)
            yield output
            self._save(output)
        except BaseException:
            self._unreported = output
            raise
        finally:
            self._finish(output)

    def close(self) -> None:
        self._transfer.close()
        self._reads.close()

    def _load(self, output: ECConnectorOutput) -> None:
        if not self._config.is_ec_consumer:
            return
        needed: list[str] = []
        for load in self._metadata.loads:
            key = load.ticket.key
            mismatch = self._mismatch_of(load)
            if mismatch:
                logger.warning("item %s is refused: %s", key, mismatch)
                output.failed_loads[key] = FailureReason.MISMATCH
                continue
            try:
                self._encoder_cache.check_vacant(key, load.pages, load.ticket.num_rows)
            except InternalError as error:
                output.failed_loads[key] = reason_of(error, f"load of {key}")
                continue
            self._reads.start(key, load, partial(self._transfer.read, load.ticket, load.pages))
            if load.is_needed:
                needed.append(key)
        self._reads.wait(needed, self._metadata.timeout_s)
        self._reads.collect(self._admit, output.finished_loads, output.failed_loads)

    def _save(self, output: ECConnectorOutput) -> None:
        """Publish what this step added, less what failed to be encoded, and what is wanted again."""
        if not self._config.is_ec_producer:
            return
        self._publish((key for key in self._metadata.saves if key in self._encoder_cache), output)
        self._publish(self._metadata.republish, output)

    def _publish(self, keys: Iterable[str], output: ECConnectorOutput) -> None:
        for key in keys:
            try:
                output.published[key] = self._ticket_of(key)
            except Exception as error:  # the edge to a connector: one item that cannot be published is that item's failure
                output.failed_saves[key] = reason_of(error, f"publish of {key}")

    def _ticket_of(self, key: str) -> ECTicket:
        item = self._encoder_cache.find(key)
        if item is None:
            raise InternalError(f"item {key} is to be published, and is not resident.")
        model = self._config.model
        data = self._transfer.publish(key, item.pages, item.num_rows, self._metadata.lease_s)
        ticket = ECTicket(key, item.num_rows, model.row_width, model.dtype, data, model.weights_digest)
        return sealed(ticket, self._config.cluster_secret)

    def _finish(self, output: ECConnectorOutput) -> None:
        """Once per step, whatever happened. Nothing in it raises, so that the body's own exception is what is seen."""
        self._reads.collect(self._admit, output.finished_loads, output.failed_loads)
        self._metadata = EMPTY_EC_METADATA

    def _admit(self, load: ECLoad) -> FailureReason | None:
        num_rows = load.ticket.num_rows
        if not self._encoder_cache.is_finite(load.pages, num_rows):
            return FailureReason.CORRUPT
        self._encoder_cache.admit(load.ticket.key, load.pages, num_rows)
        return None

    def _mismatch_of(self, load: ECLoad) -> str:
        """What of the ticket does not fit this worker's model and the pages given; empty if all does."""
        ticket, model = load.ticket, self._config.model
        checks = (
            ("subject", ticket.data.subject, ticket.key),
            ("model", ticket.model, model.weights_digest),
            ("row_width", ticket.row_width, model.row_width),
            ("dtype", ticket.dtype, model.dtype),
            ("number of destination pages", len(load.pages), self._encoder_cache.num_pages_of(ticket.num_rows)),
            ("nbytes", ticket.data.nbytes, ticket.num_rows * model.row_nbytes),
        )
        if ticket.num_rows <= 0:
            return f"num_rows is {ticket.num_rows}"
        return "; ".join(f"{name} is {given} and should be {wanted}" for name, given, wanted in checks if given != wanted)


def get_ec_connector(
    config: EngineConfig, encoder_cache: EncoderCache, data_plane: DataPlane | None, on_progress: Callable[[], None]
) -> ECConnector:
    """The active one where the role sends or takes; else the no-op. Raises `ConfigError` without a data plane, or for a connector that does
    not exist or cannot be used."""
    if not (config.is_ec_producer or config.is_ec_consumer):
        return ECConnector()
    if data_plane is None:
        raise ConfigError(f"a worker of role {config.role} among others needs a data plane.")
    return ActiveECConnector(config, encoder_cache, _make_transfer(config, encoder_cache, data_plane), on_progress)


def _make_transfer(config: EngineConfig, encoder_cache: EncoderCache, data_plane: DataPlane) -> ECTransfer:
    connector = find_ec_connector(config.connector.ec_connector)
    where = f"ec_connector '{connector.name}' ({connector.value} of package {package_of(connector)})"
    try:
        transfer = connector.load()(config, encoder_cache, data_plane)
    except ConfigError:
        raise
    except Exception as error:  # the edge to a package that we do not know
        raise ConfigError(f"{where} cannot be used: {type(error).__name__}: {error}.") from error
    if not isinstance(transfer, ECTransfer):
        raise ConfigError(f"{where} gave {type(transfer).__name__} '{transfer}', which is not an ECTransfer.")
    return transfer
