"""Which data plane a configuration asks for."""

from triptych.config import ConnectorConfig
from triptych.transfer.data_plane import DataPlane
from triptych.transfer.file import FileDataPlane
from triptych.transfer.shm import ShmDataPlane


def make_data_plane(connector: ConnectorConfig, worker_id: str) -> DataPlane:
    """The configured data plane, started. Raises `ConfigError` for a directory that cannot be used."""
    if connector.data_plane_path is not None and connector.data_plane == FileDataPlane.name:
        return FileDataPlane(worker_id, connector.data_plane_path, verify_checksums=connector.verify_checksums)
    return ShmDataPlane(worker_id, verify_checksums=connector.verify_checksums)
