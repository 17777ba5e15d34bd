"""The oracle of this folder: what plain `transformers` says to fifty mixed requests."""

import pytest
from oracle import Oracle, Wanted


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="session")
def wanted(oracle: Oracle) -> list[Wanted]:
    return oracle.answer_all()
