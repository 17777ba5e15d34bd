import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.transfer.read_checks import checksum, content_fills, copy_pages

NUM_PAGES = 9


def random_pages(page_nbytes: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.random.default_rng(page_nbytes).integers(0, 256, (NUM_PAGES, page_nbytes), np.uint8)


@settings(max_examples=200, deadline=None)
@given(
    source_pages=st.permutations(range(NUM_PAGES)),
    destination_pages=st.permutations(range(NUM_PAGES)),
    page_nbytes=st.integers(1, 5),
    data=st.data(),
)
def test_copy_and_checksum_agree_with_joining_the_pages_one_by_one(
    source_pages: list[int], destination_pages: list[int], page_nbytes: int, data: st.DataObject
) -> None:
    nbytes = data.draw(st.integers(1, NUM_PAGES * page_nbytes))
    num_pages = -(-nbytes // page_nbytes)
    source_pages, destination_pages = source_pages[:num_pages], destination_pages[:num_pages]
    source, destination = random_pages(page_nbytes), np.zeros((NUM_PAGES, page_nbytes), np.uint8)
    content = b"".join(source[page].tobytes() for page in source_pages)[:nbytes]
    copy_pages(source, source_pages, destination, destination_pages, nbytes)
    arrived = b"".join(destination[page].tobytes() for page in destination_pages)
    assert arrived == content + bytes(len(arrived) - nbytes)
    assert checksum(destination, destination_pages, nbytes) == blake3(content).hexdigest()[:16]


@pytest.mark.parametrize(
    ("nbytes", "num_pages", "fits"),
    [
        *[(1, 1, True), (10, 1, True), (11, 1, False), (0, 1, False)],
        *[(10, 2, False), (11, 2, True), (20, 2, True), (21, 2, False)],
        *[(0, 0, True), (1, 0, False), (-1, 0, False), (-1, 1, False)],
    ],
)
def test_content_fills_its_pages_if_it_needs_all_of_them_and_no_more(nbytes: int, num_pages: int, fits: bool) -> None:
    assert content_fills(nbytes, num_pages, 10) is fits


def test_the_checksum_of_nothing_is_blake3_of_nothing() -> None:
    expected = "af1349b9f5f9a1a6"  # from the BLAKE3 paper's test vectors, input length 0
    assert checksum(np.zeros((0, 0), np.uint8), [], 0) == expected
