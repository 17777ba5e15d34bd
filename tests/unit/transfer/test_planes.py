from contextlib import closing
from pathlib import Path

import pytest

from triptych.config import ConnectorConfig
from triptych.transfer.arena import Arena
from triptych.transfer.planes import make_data_plane


@pytest.mark.parametrize("name", ["shm", "file"])
@pytest.mark.parametrize("verify_checksums", [True, False])
def test_a_configuration_gets_the_plane_it_names_with_checksums_as_it_says(
    tmp_path: Path, name: str, verify_checksums: bool
) -> None:
    connector = ConnectorConfig(data_plane=name, data_plane_path=tmp_path, verify_checksums=verify_checksums)
    with closing(make_data_plane(connector, "e0")) as plane:
        plane.register("ec", Arena.create("ec", 1, 8))
        ticket = plane.publish("ec", [0], 8, 1.0)
    assert ticket.planes.keys() == {name}
    assert ticket.producer == "e0"
    assert bool(ticket.checksum) is verify_checksums
