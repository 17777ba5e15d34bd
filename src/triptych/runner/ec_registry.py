"""Which EC connectors there are: our own, and those that installed packages offer as entry points of the group `triptych.ec_connectors`.

An entry point is a callable `(EngineConfig, EncoderCache, DataPlane) -> ECTransfer` (see ec_transfer.py). Names can be looked up without
importing torch, so that the command line refuses a mistyped one at once.
"""

from importlib.metadata import EntryPoint, entry_points

from triptych.errors import ConfigError, suggest

GROUP = "triptych.ec_connectors"

# They stand in pyproject.toml's group as well, where tools look. Here, so that a source tree which is newer than its
# installed metadata starts, and so that no package can take their place.
OWN_CONNECTORS = (
    EntryPoint("data-plane", "triptych.runner.ec_transfer:DataPlaneTransfer", GROUP),
    EntryPoint("file", "triptych.runner.file_transfer:FileTransfer", GROUP),
)


def find_ec_connector(name: str) -> EntryPoint:
    """Not loaded yet. Raises `ConfigError` for a name that nobody offers, or more than one package."""
    own = {each.name: each for each in OWN_CONNECTORS}
    if name in own:
        return own[name]
    offered = entry_points(group=GROUP)
    found = [each for each in offered if each.name == name]
    if len(found) > 1:
        packages = " and ".join(sorted(package_of(each) for each in found))
        raise ConfigError(f"ec_connector '{name}' is offered by {packages}; uninstall all but one of them.")
    if not found:
        known = sorted({*own, *(each.name for each in offered)})
        raise ConfigError(f"ec_connector is '{name}', which does not exist; {suggest(name, known)}")
    return found[0]


def package_of(connector: EntryPoint) -> str:
    return connector.dist.name if connector.dist is not None else "triptych"
