"""Which data plane a configuration asks for."""

from triptych.config import ConnectorConfig
from triptych.errors import ConfigError, suggest
from triptych.transfer.data_plane import DataPlane
from triptych.transfer.file import FileDataPlane
from triptych.transfer.shm import ShmDataPlane


def make_data_plane(connector: ConnectorConfig, worker_id: str) -> DataPlane:
    """The configured data plane, started. Raises `ConfigError` for an unknown name or a directory that cannot be used."""
    if connector.data_plane == ShmDataPlane.name:
        return ShmDataPlane(worker_id, verify_checksums=connector.verify_checksums)
    if connector.data_plane == FileDataPlane.name and connector.path is not None:
        return FileDataPlane(worker_id, connector.path, verify_checksums=connector.verify_checksums)
    hint = suggest(connector.data_plane, (ShmDataPlane.name, FileDataPlane.name))
    raise ConfigError(f"connector.data_plane is '{connector.data_plane}', which does not exist; {hint}")
