"""KV that goes from a prefill to a decode worker chunk by chunk: what is published when, what is read when, who gives way."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from engine_rig import Engine, TurnedClock, assert_nothing_is_held, item_of, make_engine, tickets_of, wanted

from triptych.engine.arithmetic_runner import Fabric
from triptych.engine.events import Failed, Finished, HandedOver, KVAwaited, KVPublished
from triptych.engine.kv_cache_manager import KVCacheManager
from triptych.engine.request import RequestSpec
from triptych.errors import FailureReason
from triptych.output import KVTicket
from triptych.sampling_params import SamplingParams

SALT = "s"


def text(n: int, seed: int = 1) -> list[int]:
    return [(seed * 37 + 11 * i) % 900 for i in range(n)]


def pair(chunk: int = 6, num_kv_blocks: int = 64, max_num_seqs: int = 8, *, lease_s: float = 30.0) -> tuple[Engine, Engine]:
    """A prefill and a decode worker, blocks of 4 tokens, one clock."""
    fabric, clock = Fabric(), TurnedClock()
    p = make_engine("P", fabric=fabric, clock=clock, chunk=chunk, lease_s=lease_s, max_num_seqs=3)
    d = make_engine("D", fabric=fabric, clock=clock, num_kv_blocks=num_kv_blocks, max_num_seqs=max_num_seqs)
    return p, d


def early(d: Engine, ticket: KVTicket, name: str = "r", length: int = 20, n: int = 4, seed: int = 1) -> None:
    sampling = SamplingParams(max_tokens=n, temperature=0.0)
    prompt = tuple(text(length, seed))
    d.core.add_request(RequestSpec(name, prompt, length, sampling, kv_tickets=(ticket,), has_more_kv=True, cache_salt=SALT))


def ordinary(d: Engine, p: Engine, name: str, length: int, n: int, seed: int = 1) -> None:
    sampling = SamplingParams(max_tokens=n, temperature=0.0)
    ids = (*text(length, seed), *p.tokens[name])
    d.core.add_request(RequestSpec(name, ids, length, sampling, kv_tickets=tickets_of(p, name)))


def hand_over(d: Engine, p: Engine, name: str = "r") -> None:
    d.core.deliver_kv(name, tickets_of(p, name), tuple(p.tokens[name]), True)


def published(engine: Engine, name: str = "r") -> list[KVTicket]:
    return [event.ticket for event in engine.events if isinstance(event, KVPublished) and event.id == name]


def covers(ticket: KVTicket) -> tuple[int, int, int]:
    return ticket.first_block, len(ticket.data.pages), ticket.num_tokens


def free_blocks(engine: Engine) -> int:
    return engine.core.scheduler.kv.num_free_blocks


# --- given: chunks of 6 tokens, blocks of 4, a prompt of 20


def test_each_chunk_publishes_the_blocks_that_it_fills_and_the_last_all_that_are_left():
    p, _ = pair()
    p.add("r", text(20), hands_over=True)
    after_each_step: list[list[tuple[int, int, int]]] = []
    for _ in range(3):
        p.step()
        after_each_step.append([covers(ticket) for ticket in published(p)])
    parts = [(0, 1, 4), (1, 2, 12), (3, 1, 16)]  # after 6, 12 and 18 tokens
    assert after_each_step == [parts[:1], parts[:2], parts]
    p.step()
    assert [covers(ticket) for ticket in tickets_of(p, "r")] == [*parts, (4, 1, 20)]
    assert list(tickets_of(p, "r"))[:3] == published(p)


def test_a_chunk_that_fills_no_block_publishes_nothing():
    p, _ = pair(chunk=3)
    p.add("r", text(7), hands_over=True)
    p.run()
    assert [covers(ticket) for ticket in published(p)] == [(0, 1, 4)]
    assert [covers(ticket) for ticket in tickets_of(p, "r")] == [(0, 1, 4), (1, 1, 7)]


@pytest.mark.parametrize(("hands_over", "n"), [(False, 4), (True, 1)])
def test_a_request_that_does_not_hand_over_publishes_nothing(hands_over: bool, n: int):
    engine = make_engine("EPD", chunk=6)
    engine.add("r", text(20), n=n, hands_over=hands_over)
    engine.run()
    assert isinstance(engine.ends["r"], Finished)
    assert published(engine) == []


def test_what_a_preempted_prompt_had_published_is_stale_before_it_is_written_again():
    fabric = Fabric()
    p = make_engine("EP", fabric=fabric, chunk=6, num_kv_blocks=8)
    victim, cat = "b", item_of("cat", 12, 6)
    p.add("b", text(24, 2), (cat,), hands_over=True)
    p.run()  # up to the picture, which nobody has brought
    p.add("a", text(24), hands_over=True, priority=-1)
    while not p.core.scheduler.num_preempted:
        p.step()
    memory, taken = p.runner.memories["kv"], {page for ticket in tickets_of(p, "a") for page in ticket.data.pages}
    pages = [each for ticket in published(p, "b") for each in zip(ticket.data.pages, ticket.data.generations, strict=True)]
    assert {page for page, _ in pages} & taken
    assert all(memory.generations.get(page, 0) > generation for page, generation in pages if page in taken)
    p.run()
    p.core.scheduler.release("a")
    p.encode("e", cat, will_stay=True)
    p.run()
    p.core.scheduler.release("b")
    assert p.tokens["a"] == wanted(text(24), n=1)
    assert p.tokens["b"] == wanted(text(24, 2), (cat,), n=1)
    again = [covers(ticket) for ticket in tickets_of(p, victim)]
    assert again[0][0] == 0
    assert all(before[2] == after[0] * 4 for before, after in pairwise(again)), "no gap, no overlap"
    assert again[-1][2] == 24
    p.run()
    assert_nothing_is_held(p)


def test_an_aborted_prompt_leaves_no_block_and_no_lease_and_its_tickets_are_stale():
    p, _ = pair()
    p.add("r", text(20), hands_over=True)
    p.step()
    p.step()
    p.core.scheduler.abort("r")
    p.run()
    assert_nothing_is_held(p)
    tickets = published(p)
    p.add("next", text(254, 5), n=1, hands_over=True)  # needs all 64 blocks
    p.run()
    for ticket in tickets[:1]:
        assert p.runner.memories["kv"].generations[ticket.data.pages[0]] > ticket.data.generations[0]


# --- taken


def test_an_early_request_has_all_but_the_last_part_before_the_hand_over_and_others_decode_meanwhile():
    p, d = pair()
    p.add("other", text(5, 3), n=20, hands_over=True)
    p.run()
    ordinary(d, p, "other", 5, 20, seed=3)
    d.step()
    d.step()
    p.add("r", text(20), hands_over=True)
    trace: list[tuple[int, int]] = []  # after each step of the two: blocks read of "r", tokens of "other"
    for step in range(4):
        p.step()
        tickets = published(p)
        if step == 0:
            early(d, tickets[0])
        elif step < 3:
            d.core.deliver_kv("r", (tickets[step],), (), False)
        d.step()
        trace.append((d.runner.num_blocks_read - 2, len(d.tokens.get("other", []))))
    assert isinstance(p.ends["r"], HandedOver)
    assert [blocks for blocks, _ in trace] == [1, 3, 4, 4], "all full blocks but the last"
    assert [tokens for _, tokens in trace] == [2, 3, 4, 5], "nobody waits for a copy"
    assert [event for event in d.events if getattr(event, "id", "") == "r"] == [KVAwaited("r")]
    hand_over(d, p)
    d.run()
    assert d.runner.num_blocks_read == 2 + 5
    assert p.tokens["r"] + d.tokens["r"] == wanted(text(20))
    assert p.tokens["other"] + d.tokens["other"] == wanted(text(5, 3), n=20)
    for name in ("r", "other"):
        p.core.scheduler.release(name)
    p.run()
    assert_nothing_is_held(p)
    assert_nothing_is_held(d)


def test_blocks_for_the_whole_prompt_and_one_token_are_reserved_before_the_first_read():
    p, d = pair()
    p.add("r", text(20), hands_over=True)
    p.step()
    early(d, published(p)[0])
    d.step()
    assert free_blocks(d) == 64 - 6


def test_the_hand_over_may_come_before_the_copies_end_and_parts_may_end_in_any_order():
    p, d = pair()
    p.add("r", text(20), hands_over=True)
    p.run()
    parts = [("r", ticket.first_block) for ticket in tickets_of(p, "r")]
    d.runner.held.update(parts)
    early(d, published(p)[0])
    d.step()
    hand_over(d, p)
    d.run()
    for part in reversed(parts):
        assert "r" not in d.tokens
        d.runner.held.discard(part)
        d.run()
    assert p.tokens["r"] + d.tokens["r"] == wanted(text(20))


def test_deliveries_that_come_twice_late_or_for_nobody_change_nothing():
    p, d = pair()
    p.add("r", text(20), hands_over=True)
    p.run()
    first, second, third, _ = tickets_of(p, "r")
    d.core.deliver_kv("r", (second,), (), False)
    early(d, first)
    for tickets in ((third,), (first,), (second,), (second, first)):  # the third leaves a gap: it comes again with the last
        d.core.deliver_kv("r", tickets, (), False)
        d.step()
    for _ in range(2):
        hand_over(d, p)
    d.run()
    hand_over(d, p)
    assert d.runner.num_blocks_read == 5
    assert p.tokens["r"] + d.tokens["r"] == wanted(text(20))


def test_tickets_of_another_request_or_that_leave_a_gap_at_the_end_fail_the_request():
    p, d = pair()
    for name, seed in (("r", 1), ("other", 2)):
        p.add(name, text(20, seed), hands_over=True)
    p.run()
    first, *_, last = tickets_of(p, "r")
    for tickets, is_last in (((tickets_of(p, "other")[1],), False), ((last,), True), ((), True)):
        d.ends.clear()
        early(d, first)
        d.core.deliver_kv("r", tickets, (300,), is_last)
        d.run()
        end = d.ends["r"]
        assert isinstance(end, Failed)
        assert end.status == 400
        assert_nothing_is_held(d)


def test_a_first_token_that_leaves_nothing_to_generate_is_refused():
    p, d = pair()
    p.add("r", text(20), n=4, hands_over=True)
    p.run()
    early(d, tickets_of(p, "r")[0], n=1)
    hand_over(d, p)
    d.run()
    end = d.ends["r"]
    assert isinstance(end, Failed)
    assert end.status == 400


@pytest.mark.parametrize("num_held", [0, 2, 3, 5])
@pytest.mark.parametrize("is_early", [False, True])
def test_blocks_that_are_here_by_their_hash_are_neither_read_nor_waited_for(
    num_held: int, is_early: bool, monkeypatch: pytest.MonkeyPatch
):
    p, d = pair()
    p.add("r", text(22), hands_over=True)
    p.run()
    tickets = tickets_of(p, "r")
    assert [covers(ticket) for ticket in tickets] == [(0, 1, 4), (1, 2, 12), (3, 1, 16), (4, 2, 22)]
    entered: list[int] = []

    def start(self: KVCacheManager, request_id: str, hashes: Sequence[bytes], num_tokens: int) -> int | None:
        assert len(hashes) == 5, "the full blocks of the prompt"
        block_ids = self.allocate(request_id, num_tokens)
        assert block_ids is not None
        for index, page in enumerate([page for ticket in tickets for page in ticket.data.pages][:num_held]):
            d.runner.memories["kv"].fill([block_ids[index]], [p.runner.memories["kv"].pages[page]])
        return num_held

    monkeypatch.setattr(KVCacheManager, "start", start)
    monkeypatch.setattr(KVCacheManager, "enter", lambda self, request_id, hashes: entered.append(len(hashes)))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    if is_early:
        early(d, tickets[0], length=22)
        d.step()
        hand_over(d, p)
    else:
        ordinary(d, p, "r", 22, 4)
    d.run()
    assert d.runner.num_blocks_read == 6 - num_held
    assert entered[0] == 5
    assert p.tokens["r"] + d.tokens["r"] == wanted(text(22))


# --- deadlines and endings


def test_an_early_request_waits_as_long_as_tickets_come_and_no_longer_than_the_timeout_after_the_last():
    p, d = pair()
    p.add("r", text(20), hands_over=True)
    p.run()
    first, second, *_ = tickets_of(p, "r")
    early(d, first)
    d.run()
    d.clock.now += 9.0  # of 10
    d.core.deliver_kv("r", (second,), (), False)
    d.run()
    d.clock.now += 9.0
    d.run()
    assert "r" not in d.ends
    d.clock.now += 1.0
    d.run()
    end = d.ends["r"]
    assert isinstance(end, Failed)
    assert end.reason == FailureReason.TIMEOUT
    assert_nothing_is_held(d)


def test_the_transfer_that_is_reported_began_with_the_hand_over():
    p, d = pair()
    p.add("r", text(20), n=2, hands_over=True)
    p.run()
    early(d, tickets_of(p, "r")[0], n=2)
    d.run()
    d.clock.now += 7.0
    hand_over(d, p)
    d.run()
    end = d.ends["r"]
    assert isinstance(end, Finished)
    assert end.timings.kv_transfer_s < 0.1


@pytest.mark.parametrize("steps", range(7))
def test_an_abort_at_any_time_frees_all_but_what_a_copy_writes_at_once(steps: int):
    p, d = pair()
    p.add("r", text(20), hands_over=True)
    p.run()
    tickets = tickets_of(p, "r")
    d.runner.held.add(("r", 1))
    early(d, tickets[0])
    for step in range(steps):
        if step == 2:
            d.core.deliver_kv("r", tickets[1:3], (), False)
        if step == 4:
            hand_over(d, p)
        d.step()
    d.core.scheduler.abort("r")
    assert free_blocks(d) == (64 if steps < 3 else 62), "two blocks are written by the copy that is held up"
    d.step()
    d.runner.held.clear()
    d.run()
    assert_nothing_is_held(d)


@pytest.mark.parametrize("reason", [FailureReason.STALE, FailureReason.PEER_LOST])
def test_a_part_that_cannot_be_read_fails_the_request(reason: FailureReason):
    p, d = pair()
    p.add("r", text(20), hands_over=True)
    p.run()
    d.runner.held.add(("r", 0))
    early(d, tickets_of(p, "r")[0])
    d.run()
    d.runner._fabric.failures["r"] = reason  # pyright: ignore[reportPrivateUsage]
    d.core.deliver_kv("r", tickets_of(p, "r")[1:2], (), False)
    d.run()
    end = d.ends["r"]
    assert isinstance(end, Failed)
    assert end.reason == reason
    d.runner.held.clear()
    d.run()
    assert_nothing_is_held(d)


# --- who gives way


@pytest.mark.parametrize("comes_first", [False, True])
def test_an_early_request_gives_way_to_one_that_runs_and_needs_blocks(comes_first: bool):
    p, d = pair(num_kv_blocks=9)
    p.add("runs", text(8, 2), n=12, hands_over=True)
    p.run()
    p.add("r", text(20), hands_over=True)
    p.run()
    if comes_first:
        early(d, tickets_of(p, "r")[0])
    ordinary(d, p, "runs", 8, 12, seed=2)
    d.step()
    if not comes_first:
        early(d, tickets_of(p, "r")[0])
    d.run()
    end = d.ends["r"]
    assert isinstance(end, Failed)
    assert end.reason == FailureReason.EVICTED
    assert p.tokens["runs"] + d.tokens["runs"] == wanted(text(8, 2), n=12)
    assert_nothing_is_held(d)


@pytest.mark.parametrize(("num_kv_blocks", "max_num_seqs"), [(8, 8), (64, 1)])
def test_an_early_request_gives_way_to_one_whose_prompt_is_computed(num_kv_blocks: int, max_num_seqs: int):
    """Or their prefill worker could wait for the blocks that it keeps for the second while the first waits for it."""
    p, d = pair(num_kv_blocks=num_kv_blocks, max_num_seqs=max_num_seqs)
    p.add("r", text(20), hands_over=True)
    p.run()
    early(d, tickets_of(p, "r")[0])
    d.run()
    p.add("computed", text(12, 2), hands_over=True)
    p.run()
    ordinary(d, p, "computed", 12, 4, seed=2)
    d.run()
    assert isinstance(d.ends["r"], Failed)
    assert p.tokens["computed"] + d.tokens["computed"] == wanted(text(12, 2))


def test_an_early_request_that_finds_no_blocks_lets_others_pass():
    p, d = pair(num_kv_blocks=9)
    p.add("runs", text(12, 2), n=8, hands_over=True)
    p.add("r", text(20), hands_over=True)
    p.add("small", text(4, 3), hands_over=True)
    p.run()
    ordinary(d, p, "runs", 12, 8, seed=2)
    d.step()
    early(d, tickets_of(p, "r")[0])
    d.step()
    ordinary(d, p, "small", 4, 4, seed=3)
    d.step()
    assert d.core.scheduler.num_waiting == 1
    d.run()
    assert p.tokens["small"] + d.tokens["small"] == wanted(text(4, 3))
    hand_over(d, p)
    d.run()
    assert p.tokens["r"] + d.tokens["r"] == wanted(text(20))


def test_a_ticket_that_says_more_than_the_prompt_is_refused():
    p, d = pair()
    p.add("r", text(20), hands_over=True)
    p.run()
    first, second, *_ = tickets_of(p, "r")
    early(d, first)
    d.core.deliver_kv("r", (msgspec.structs.replace(second, num_tokens=4000),), (), False)
    d.run()
    end = d.ends["r"]
    assert isinstance(end, Failed)
    assert end.status == 400
    assert_nothing_is_held(d)
