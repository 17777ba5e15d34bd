"""docs/failure-kinds.md names, for each kind of failure, the tests that close it: they exist, and no kind is without one."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "triptych").rglob("*.py"))
PAGE = (ROOT / "docs" / "failure-kinds.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(("| seen |", "|---"))]


def test_the_page_has_all_sections_and_a_row_for_each_kind() -> None:
    sections = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert [section.partition(",")[0] for section in sections] == [
        "An item announced",
        "A wrong answer",
        "A scheduler that stops",
        "The orchestrator",
        "Safety",
    ]
    assert len(ROWS) >= 40
    assert all(len(row.split("|")) == 6 for row in ROWS), "four cells each"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[2].strip()[:40])
def test_every_kind_is_closed_by_a_test_that_exists(row: str) -> None:
    cited = re.findall(r"`([\w/]+\.py)::(\w+)`", row.split("|")[4])
    assert cited
    assert row.split("|")[4].count("`") == 2 * len(cited), "something in the last cell is no path::name"
    assert [f"{path}::{name}" for path, name in cited if name not in names_of_tests_in(path)] == []


def names_of_tests_in(path: str) -> set[str]:
    file = ROOT / "tests" / path
    if not file.is_file():
        return set()
    functions = (
        node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {function.name for function in functions if function.name.startswith("test_")}


def test_nothing_of_ours_can_unpickle_or_run_a_models_own_code() -> None:
    """Neither directly nor by a library's loader that does."""
    imported: set[str] = set()
    called: set[str] = set()
    for node in (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call):
            called.add(ast.unparse(node.func))
            called.update(keyword.arg for keyword in node.keywords if keyword.arg in ("trust_remote_code", "allow_pickle"))
    assert {"msgspec", "torch"} <= imported, "else nothing was looked at"
    assert imported & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "multiprocessing"} == set()
    assert called & {"torch.load", "torch.save", "np.load", "eval", "exec", "trust_remote_code", "allow_pickle"} == set()
