"""Who owns which KV blocks."""

import pytest

from triptych.engine.kv_cache_manager import KVCacheManager


def test_a_request_grows_by_whole_blocks_and_only_when_it_needs_one():
    kv = KVCacheManager(4, 4)
    assert kv.allocate("r", 4) == (0,)
    assert kv.allocate("r", 4) == ()
    assert kv.allocate("r", 5) == (1,)
    assert kv.block_ids("r") == (0, 1)
    kv.check_invariants({})


def test_a_request_that_does_not_fit_keeps_what_it_has():
    kv = KVCacheManager(3, 4)
    kv.allocate("a", 4)
    kv.allocate("b", 4)
    assert kv.allocate("a", 16) is None
    assert kv.block_ids("a") == (0,)
    assert kv.num_free_blocks == 1
    assert kv.allocate("unknown", 16) is None
    assert kv.block_ids("unknown") == ()


def test_blocks_given_up_are_used_until_they_are_reclaimed():
    kv = KVCacheManager(2, 4)
    kv.allocate("r", 8)
    blocks = kv.give_up("r")
    kv.free("r")
    assert kv.num_free_blocks == 0
    kv.check_invariants({})
    kv.reclaim(blocks)
    assert kv.num_free_blocks == 2
    kv.check_invariants({})


def test_to_free_a_request_without_blocks_does_nothing():
    kv = KVCacheManager(2, 4)
    kv.free("nobody")
    assert kv.give_up("nobody") == ()
    assert kv.num_free_blocks == 2


HASHES = [b"a", b"b", b"c"]


def computed(num_blocks: int) -> KVCacheManager:
    """Four tokens a block, of which a request that has left computed three blocks full."""
    kv = KVCacheManager(num_blocks, 4)
    kv.start("first", (), 12)
    kv.enter("first", HASHES)
    kv.free("first")
    return kv


def test_who_begins_alike_shares_the_blocks_and_gets_new_ones_for_the_rest():
    kv = computed(6)
    assert kv.start("second", [b"a", b"b", b"x"], 14) == 2
    assert kv.start("third", [b"a"], 5) == 1
    second, third = kv.block_ids("second"), kv.block_ids("third")
    assert second[:1] == third[:1]
    assert len(set(second) | set(third)) == 5
    kv.check_invariants({"second": 8, "third": 4})
    kv.free("second")
    kv.free("third")
    assert kv.num_free_blocks == 6


def test_a_start_that_finds_no_room_changes_nothing_and_blocks_found_are_no_room():
    kv = computed(4)
    kv.start("other", (), 4)
    assert kv.num_free_blocks == 3
    assert kv.start("second", HASHES, 16) is None
    assert kv.block_ids("second") == ()
    assert kv.num_free_blocks == 3
    assert kv.find_prefix(HASHES) == 3
    assert kv.start("second", HASHES, 12) == 3


def test_blocks_are_entered_once_as_they_fill():
    kv = KVCacheManager(4, 4)
    kv.start("r", (), 12)
    kv.enter("r", HASHES[:1])
    assert kv.find_prefix(HASHES) == 1
    kv.enter("r", HASHES)
    kv.enter("r", HASHES)
    assert kv.num_entered("r") == 3
    assert kv.find_prefix(HASHES) == 3


def test_the_invariants_notice_a_block_that_is_written_while_another_reads_it():
    kv = computed(6)
    kv.start("second", HASHES, 12)
    kv.start("third", HASHES, 12)
    kv.check_invariants({"second": 12, "third": 12})
    with pytest.raises(AssertionError, match="written"):
        kv.check_invariants({"second": 12, "third": 8})
