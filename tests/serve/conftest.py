"""Clusters of real processes, one per layout and test session, and the official client."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from triptych.launch.background import BackgroundServer

SMALL = ("--kv-cache-mib", "32", "--max-num-batched-tokens", "64", "--port", "0")


@pytest.fixture(scope="session")
def e1p1d1() -> Iterator[str]:
    with BackgroundServer("demo", "--layout", "E1P1D1", *SMALL) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="session")
def epd1() -> Iterator[str]:
    with BackgroundServer("demo", "--layout", "EPD1", *SMALL) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="session")
def pd1() -> Iterator[str]:
    with BackgroundServer("demo", "--layout", "PD1", *SMALL) as server:
        yield server.wait_until_ready()


@pytest.fixture
def client(e1p1d1: str) -> OpenAI:
    return OpenAI(base_url=f"{e1p1d1}/v1", api_key="none", max_retries=0, timeout=60.0)
