import tomllib
from pathlib import Path

from typer.testing import CliRunner

from triptych.cli import app

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_version_is_the_projects() -> None:
    result = CliRunner().invoke(app, ["--version"])
    version = tomllib.loads(PYPROJECT.read_text())["project"]["version"]
    assert (result.exit_code, result.stdout) == (0, f"triptych {version}\n")
