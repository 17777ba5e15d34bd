"""Equal hashes mean equal content: everything that keys and values depend on changes them, from the block in which it stands."""

import pytest

from triptych.engine.block_hashes import BlockHashes, NoBlockHashes
from triptych.media.item import MediaItem

PAD = 7
CAT, DOG = "ca" * 32, "d0" * 32


def hashes(tokens: list[int], items: tuple[MediaItem, ...] = (), salt: str = "", block_size: int = 4) -> list[bytes]:
    return list(BlockHashes(block_size, items, salt).extend(tokens))


def item(key: str, *runs: tuple[int, int]) -> MediaItem:
    return MediaItem(key, "image", runs, sum(length for _, length in runs))


def num_alike(one: list[bytes], other: list[bytes]) -> int:
    """How many blocks can be shared; after the first difference there must be none."""
    alike = [a == b for a, b in zip(one, other, strict=False)]
    count = alike.index(False) if False in alike else len(alike)
    assert not any(alike[count:])
    return count


def test_only_full_blocks_have_a_hash_and_each_depends_on_all_before_it():
    assert len(hashes(list(range(11)))) == 2
    assert num_alike(hashes([1, 2, 3, 4, 5, 6, 7, 8, 9]), hashes([1, 2, 3, 4, 5, 6, 7, 8])) == 2
    assert num_alike(hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([0, 2, 3, 4, 5, 6, 7, 8])) == 0


def test_hashes_that_grow_with_the_tokens_are_those_of_the_whole():
    tokens = list(range(50, 90))
    cat = item(CAT, (6, 11), (19, 3))
    growing = BlockHashes(4, (cat,), "salt")
    for end in range(len(tokens) + 1):
        growing.extend(tokens[:end])
    assert list(growing.extend(tokens)) == hashes(tokens, (cat,), "salt")


def test_another_picture_changes_the_hashes_from_its_first_row_on():
    tokens = [1, 2, 3, 4, 5, PAD, PAD, PAD, PAD, PAD, 6, 7, 8, 9, 10, 11]
    with_cat, with_dog = hashes(tokens, (item(CAT, (5, 5)),)), hashes(tokens, (item(DOG, (5, 5)),))
    assert num_alike(with_cat, with_dog) == 1
    assert num_alike(with_cat, hashes(tokens)) == 1, "placeholders without a picture are another thing, too"
    assert num_alike(with_cat, hashes(tokens, (item(CAT, (5, 5)),))) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([(CAT, (0, 2)), (DOG, (2, 2))], [(DOG, (0, 2)), (CAT, (2, 2))]),
        ([(CAT, (0, 2)), (DOG, (2, 2))], [(CAT, (0, 3)), (DOG, (3, 1))]),
        ([(CAT, (0, 2)), (CAT, (2, 2))], [(CAT, (0, 4))]),
        ([(CAT, (0, 3))], [(CAT, (1, 3))]),
        ([(CAT, (0, 2), (3, 1))], [(CAT, (0, 1), (2, 2))]),
    ],
)
def test_which_rows_stand_where_in_a_block_is_part_of_it(
    one: list[tuple[str, tuple[int, int]]], other: list[tuple[str, tuple[int, int]]]
):
    tokens = [PAD] * 4
    assert hashes(tokens, tuple(item(*each) for each in one)) != hashes(tokens, tuple(item(*each) for each in other))


def test_tenants_share_nothing():
    assert num_alike(hashes([1, 2, 3, 4], salt="one"), hashes([1, 2, 3, 4], salt="two")) == 0
    assert num_alike(hashes([1, 2, 3, 4], salt="one"), hashes([1, 2, 3, 4])) == 0


def test_with_caching_off_no_block_is_known():
    assert list(NoBlockHashes(4).extend([1, 2, 3, 4])) == []
