"""A package of somebody else's that is "installed": a module and its metadata in a folder on sys.path."""

import sys
import textwrap
from pathlib import Path

import pytest


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, entry_points: dict[str, str]) -> None:
    """Until the test ends. `entry_points` are those of the group `triptych.ec_connectors`."""
    site = directory / f"site-{name}"
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text(textwrap.dedent(source))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[triptych.ec_connectors]", *lines, ""]))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, name, raising=False)
