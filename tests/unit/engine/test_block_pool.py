"""Blocks: all or none, none twice, shared by their content, and kept until their memory is needed."""

import pytest

from triptych.engine.block_pool import BlockPool


def allocate(pool: BlockPool, count: int) -> tuple[int, ...]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def test_blocks_come_all_or_not_at_all():
    pool = BlockPool(3)
    assert pool.allocate(2) == (0, 1)
    assert pool.allocate(2) is None
    assert pool.num_unused == 1
    assert pool.allocate(0) == ()


def test_the_block_that_was_free_longest_is_used_next():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.free((1,))
    assert pool.allocate(2) == (2, 1)


def test_a_block_cannot_be_freed_twice():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(AssertionError):
        pool.free(blocks)
    pool.check_invariants()


def test_an_encoder_only_worker_has_no_block_to_give():
    pool = BlockPool(0)
    assert pool.num_unused == 0
    assert pool.allocate(1) is None


def test_a_block_that_is_found_has_one_more_user_and_is_free_when_the_last_has_left():
    pool = BlockPool(2)
    (block,) = allocate(pool, 1)
    pool.enter(block, b"a")
    pool.share(pool.find([b"a"]))
    pool.free([block])
    assert pool.num_unused == 1
    pool.free([block])
    assert pool.num_unused == 2
    pool.check_invariants()


def test_what_a_block_holds_is_found_until_its_memory_is_needed():
    pool = BlockPool(2)
    (block,) = allocate(pool, 1)
    pool.enter(block, b"a")
    pool.free([block])
    assert pool.find([b"a"]) == [block]
    assert pool.allocate(1) == (1 - block,), "a block without content goes first"
    assert pool.find([b"a"]) == [block]
    assert pool.allocate(1) == (block,)
    assert pool.find([b"a"]) == []
    pool.check_invariants()


def test_a_prefix_is_found_up_to_the_first_block_that_is_missing():
    pool = BlockPool(3)
    for block, content in zip(allocate(pool, 2), (b"a", b"c"), strict=True):
        pool.enter(block, content)
    assert pool.find([b"a", b"b", b"c"]) == [0]
    assert pool.find([b"b"]) == []


def test_of_two_prefixes_the_one_given_up_first_goes_first_and_of_each_the_end():
    pool = BlockPool(4)
    first, second = allocate(pool, 2), allocate(pool, 2)
    for block, content in zip((*first, *second), (b"1a", b"1b", b"2a", b"2b"), strict=True):
        pool.enter(block, content)
    pool.free(first)
    pool.free(second)
    gone = [block for _ in range(4) for block in allocate(pool, 1)]
    assert gone == [first[1], first[0], second[1], second[0]]


def test_of_two_blocks_with_one_content_the_second_is_free_at_once():
    pool = BlockPool(2)
    first, second = allocate(pool, 2)
    pool.enter(first, b"a")
    pool.enter(second, b"a")
    assert pool.find([b"a"]) == [first]
    pool.free([second])
    assert pool.allocate(1) == (second,)
    assert pool.find([b"a"]) == [first]


def test_a_published_block_is_recycled_when_it_is_allocated_and_not_when_it_is_freed():
    pool = BlockPool(2)
    blocks = allocate(pool, 2)
    pool.enter(blocks[0], b"a")
    pool.mark_published(blocks)
    pool.free(blocks)
    assert pool.take_recycled() == ()
    pool.share(pool.find([b"a"]))
    assert pool.take_recycled() == (), "its content is what it was"
    pool.free([blocks[0]])
    again = allocate(pool, 2)
    assert sorted(pool.take_recycled()) == sorted(blocks)
    pool.free(again)
    pool.allocate(2)
    assert pool.take_recycled() == (), "nobody was told of what it held since"
