"""Which data plane a configuration asks for."""

from difflib import get_close_matches

from triptych.config import ConnectorConfig
from triptych.errors import ConfigError
from triptych.transfer.data_plane import DataPlane
from triptych.transfer.file import FileDataPlane
from triptych.transfer.shm import ShmDataPlane

_NAMES = (ShmDataPlane.name, FileDataPlane.name)


def make_data_plane(connector: ConnectorConfig, worker_id: str) -> DataPlane:
    """The configured data plane, started. Raises `ConfigError` for an unknown name or a directory that cannot be used."""
    if connector.data_plane == ShmDataPlane.name:
        return ShmDataPlane(worker_id, verify_checksums=connector.verify_checksums)
    if connector.data_plane == FileDataPlane.name and connector.path is not None:
        return FileDataPlane(worker_id, connector.path, verify_checksums=connector.verify_checksums)
    near = get_close_matches(connector.data_plane, _NAMES, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known are {' and '.join(_NAMES)}."
    raise ConfigError(f"connector.data_plane is '{connector.data_plane}', which does not exist; {hint}")
