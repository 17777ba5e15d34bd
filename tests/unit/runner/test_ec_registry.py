"""Who offers which EC connector, and that a wrong name is one sentence at start."""

import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from outside_package import install
from transfer_rig import config_of, pair_of

from triptych.config import ConnectorConfig, EngineConfig
from triptych.errors import ConfigError
from triptych.runner.ec_connector import get_ec_connector
from triptych.runner.ec_registry import GROUP, OWN_CONNECTORS, find_ec_connector
from triptych.runner.ec_transfer import DataPlaneTransfer
from triptych.runner.file_transfer import FileTransfer

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_our_own_stand_in_pyproject_as_they_are_here() -> None:
    stated = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"][GROUP]
    assert stated == {each.name: each.value for each in OWN_CONNECTORS}


@pytest.mark.parametrize(("name", "transfer"), (("data-plane", DataPlaneTransfer), ("file", FileTransfer)))
def test_our_own_are_found_by_name(name: str, transfer: type) -> None:
    assert find_ec_connector(name).load() is transfer


def test_names_are_looked_up_without_torch() -> None:
    code = "import sys; from triptych.launch.settings import sections_from; sections_from({}); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_package_adds_one_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "pigeons", "def make(): ...", {"pigeon": "pigeons:make"})
    assert find_ec_connector("pigeon").load().__module__ == "pigeons"
    with pytest.raises(ConfigError, match="ec_connector is 'pigeons', which does not exist; did you mean 'pigeon'"):
        find_ec_connector("pigeons")
    with pytest.raises(ConfigError, match="known are data-plane, file, pigeon"):
        find_ec_connector("")


def test_two_packages_that_offer_one_name_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pigeons", "doves"):
        install(tmp_path, monkeypatch, package, "", {"pigeon": f"{package}:make"})
    with pytest.raises(ConfigError, match="'pigeon' is offered by doves and pigeons; uninstall all but one"):
        find_ec_connector("pigeon")


def test_no_package_takes_the_place_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "pigeons", "def make(): ...", {"file": "pigeons:make"})
    assert find_ec_connector("file").load() is FileTransfer


SOURCES: dict[str, tuple[str, str]] = {
    "is not there": ("pigeons.nest:make", r"ModuleNotFoundError: No module named 'pigeons.nest'"),
    "has no such name": ("pigeons:mak", r"AttributeError: module 'pigeons' has no attribute 'mak'"),
    "cannot be called": ("pigeons:NUMBER", r"TypeError: 'int' object is not callable"),
    "takes something else": (
        "pigeons:takes_nothing",
        r"TypeError: takes_nothing\(\) takes 0 positional arguments but 3 were given",
    ),
    "raises": ("pigeons:raises", r"ValueError: no loft"),
    "gives something else": ("pigeons:gives_something_else", r"gave str 'coo', which is not an ECTransfer"),
}
SOURCE = """
    NUMBER = 5
    def takes_nothing(): ...
    def raises(*_): raise ValueError("no loft")
    def gives_something_else(*_): return "coo"
    def refuses(*_):
        from triptych.errors import ConfigError
        raise ConfigError("set PIGEON_LOFT to the loft's address.")
"""


def config_with(name: str) -> EngineConfig:
    return replace(config_of("P", Path("/nowhere")), connector=ConnectorConfig(ec_connector=name))


def start(tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sentence with which a worker that asks for the connector `value` ends."""
    install(tmp_path, monkeypatch, "pigeons", SOURCE, {"pigeon": value})
    with pair_of("fake", tmp_path) as pair, pytest.raises(ConfigError) as caught:
        get_ec_connector(config_with("pigeon"), pair.consumer.cache, pair.make("p1").plane, lambda: None)
    return str(caught.value)


@pytest.mark.parametrize("fault", SOURCES)
def test_a_connector_that_is_broken_is_a_sentence_with_its_name_and_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    value, problem = SOURCES[fault]
    sentence = start(tmp_path, value, monkeypatch)
    assert sentence.startswith(f"ec_connector 'pigeon' ({value} of package pigeons) ")
    assert re.search(problem, sentence)
    assert "\n" not in sentence


def test_what_a_connector_says_of_its_own_settings_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(tmp_path, "pigeons:refuses", monkeypatch) == "set PIGEON_LOFT to the loft's address."


def test_a_directory_smaller_than_the_encoder_cache_is_refused_with_the_settings_to_change(tmp_path: Path) -> None:
    config = config_of("E", tmp_path)
    small = replace(config, connector=replace(config.connector, ec_path_nbytes=1024))
    with pair_of("fake", tmp_path) as pair, pytest.raises(ConfigError, match=r"--ec-path-mib is 0.*lower --encoder-cache-rows"):
        get_ec_connector(small, pair.consumer.cache, pair.consumer.plane, lambda: None)
