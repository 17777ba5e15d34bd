"""Marks tests by folder, and keeps every test, and the processes it starts, to one thread and off the network."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported anywhere
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

_FOLDERS = ("unit", "engine", "serve", "chaos")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0]
        if folder in _FOLDERS:
            item.add_marker(folder)
