"""The rules of the house that a machine can check. Each failure names the place and the number."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "triptych"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
MAX_ATTRIBUTES, MAX_FUNCTION_LINES, MAX_FILE_LINES = 20, 80, 500
VAGUE_NAMES = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def place(path: Path, node: ast.stmt) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    return ((path, node) for path in SOURCES for node in nodes(path) if isinstance(node, ast.ClassDef))


def attributes(cls: ast.ClassDef) -> set[str]:
    """Names assigned on `self`, or declared in a dataclass's or struct's body."""
    declared = {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    stores = (n for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return declared | {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}


def is_check(node: ast.AST) -> bool:
    """An `assert`, or a call or context manager that fails by itself: `pytest.raises`, `torch.testing.assert_close` ..."""
    if isinstance(node, ast.Assert):
        return True
    name = node.func if isinstance(node, ast.Call) else None
    text = name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""
    return text in ("raises", "warns") or text.startswith("assert_")


def test_no_class_owns_too_much() -> None:
    counts = {f"{place(path, cls)} {cls.name}": len(attributes(cls)) for path, cls in classes()}
    assert {where: count for where, count in counts.items() if count > MAX_ATTRIBUTES} == {}


def test_no_function_is_too_long() -> None:
    functions = ((path, node) for path in SOURCES for node in nodes(path) if isinstance(node, Function))
    lengths = {f"{place(path, f)} {f.name}": (f.end_lineno or f.lineno) - f.lineno + 1 for path, f in functions}
    assert {where: length for where, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {where: length for where, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_two_classes_share_a_name() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path, cls in classes():
        homes[cls.name].append(place(path, cls))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_no_file_has_a_vague_name() -> None:
    assert [str(path.relative_to(ROOT)) for path in SOURCES if path.name in VAGUE_NAMES] == []


def test_every_room_and_file_says_its_purpose() -> None:
    assert [str(path.relative_to(ROOT)) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_an_import_inside_a_function_has_its_reason_beside_it() -> None:
    bare: list[str] = []
    for path in SOURCES:
        lines = path.read_text().splitlines()
        for function in (node for node in nodes(path) if isinstance(node, Function)):
            block_end = 0  # imports in a row share the comment above the first
            for node in (n for n in ast.walk(function) if isinstance(n, ast.Import | ast.ImportFrom)):
                has_reason = "#" in lines[node.lineno - 1] or lines[node.lineno - 2].lstrip().startswith("#")
                if not has_reason and node.lineno != block_end + 1:
                    bare.append(place(path, node))
                block_end = node.end_lineno or node.lineno
    assert bare == []


def test_nothing_is_imported_for_type_checkers_only() -> None:
    assert [str(path.relative_to(ROOT)) for path in SOURCES if "TYPE_CHECKING" in path.read_text()] == []


# What can run, or be made to run, code that comes with the data; by the dotted name under which it is imported or called.
RUNS_ITS_INPUT = re.compile(
    r"(_?pickle|cPickle|cloudpickle|dill|marshal|shelve|joblib|jsonpickle|multiprocessing|yaml)(\..*)?"
    r"|eval|exec|compile|__import__|torch\.(load|jit\.load|hub(\..*)?)|(np|numpy)\.load"
)
RUNS_FOREIGN_CODE = ("allow_pickle", "trust_remote_code", "shell")  # keyword arguments


def called_name(node: ast.expr) -> str:
    """`a.b.c` of an attribute or name; a method of something else has a leading dot."""
    if isinstance(node, ast.Attribute):
        return f"{called_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            names = [called_name(node.func)]
            keywords = [(each.arg, each.value) for each in node.keywords if each.arg in RUNS_FOREIGN_CODE]
            yield from (f"{name} in line {node.lineno}" for name, value in keywords if ast.unparse(value) != "False")
        else:
            continue
        yield from (f"{name} in line {node.lineno}" for name in names if RUNS_ITS_INPUT.fullmatch(name))


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "import os, marshal", "from pickle import loads", "import multiprocessing.connection", "torch.load(f)",
        "from torch import load", "torch.load(f, weights_only=True)", "yaml.load(f)", "import shelve as s", "np.load(f)", "eval(text)",
        "from_pretrained(p, trust_remote_code=True)", "np.load(f, allow_pickle=True)", "subprocess.run(c, shell=True)",
    ],
)  # fmt: skip
def test_what_runs_its_input_is_noticed(code: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(code)
    assert list(dangers(tmp_path / "module.py")) != []


def test_nothing_here_runs_what_it_reads() -> None:
    """No pickle and nothing like it: neither a peer's message nor a file can bring code along."""
    assert {str(path.relative_to(ROOT)): found for path in SOURCES if (found := list(dangers(path)))} == {}


def readme_tree() -> dict[str, str]:
    """Path below src/triptych -> comment, from the README's tree (two spaces a level)."""
    found = re.search(r"```\nsrc/triptych/\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found, "README.md has no tree that starts with src/triptych/"
    tree: dict[str, str] = {}
    folders: list[str] = []
    for line in found.group(1).splitlines():
        name, _, comment = line.strip().partition("  ")
        level = (len(line) - len(line.lstrip())) // 2 - 1
        folders = [*folders[:level], name] if name.endswith("/") else folders
        tree["".join(folders[:level]) + name] = comment.strip()
    return tree


def test_the_readmes_tree_is_the_one_on_disk() -> None:
    files = {str(path.relative_to(PACKAGE)) for path in SOURCES if path.name != "__init__.py"}
    folders = {f"{path.parent.relative_to(PACKAGE)}/" for path in SOURCES if path.parent != PACKAGE}
    named = set(readme_tree())
    assert (sorted(named - files - folders), sorted((files | folders) - named)) == ([], []), "(only in README, only on disk)"


def test_every_line_of_the_readmes_tree_has_a_comment() -> None:
    assert [name for name, comment in readme_tree().items() if not comment] == []


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_test_module_has_tests_that_can_fail(path: Path) -> None:
    module = ast.parse(path.read_text())
    assert any(isinstance(node, Function) and node.name.startswith("test_") for node in ast.walk(module))
    assert any(is_check(node) for node in ast.walk(module))
