"""Six scenarios worked by hand, step by step. A line of a table is a step:

    windows (request first+number) | new blocks | what is brought, and pages given up | events

Blocks hold 4 tokens, pages of the encoder cache 4 rows. Blocks are handed out from 0 on; a block that was given up goes to the end of the free
ones, or, if its content can be found by its hash, behind those, of one request the last first. Pages that a picture gives up are
taken the other way round by the next: the cat has 0 1, then the dog 1 0.
"""

from collections.abc import Callable
from functools import partial

from engine_rig import Engine, assert_nothing_is_held, item_of, make_engine, tickets_of, wanted

from triptych.engine.arithmetic_runner import ArithmeticRunner, Fabric
from triptych.engine.events import (
    ECLoaded,
    ECNeeded,
    Encoded,
    EngineEvent,
    Failed,
    Finished,
    HandedOver,
    NewTokens,
    PrefixHit,
)
from triptych.engine.request import RequestSpec
from triptych.media.item import MediaItem
from triptych.output import ECTicket, ModelRunnerOutput, SchedulerOutput
from triptych.sampling_params import SamplingParams


class Trace:
    """Writes down what an engine does in each of its steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._orders: list[SchedulerOutput] = []
        engine.runner.execute_model = self._execute_model

    def _execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._orders.append(output)
        return ArithmeticRunner.execute_model(self._engine.runner, output)

    def expect(self, table: str, before: dict[int, Callable[[], object]] | None = None) -> None:
        """The next steps are those of the table. `before`: what happens before which of its steps, from 1 on."""
        lines = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
        for number, line in enumerate(lines, start=1):
            (before or {}).get(number, lambda: None)()
            for key in self._engine.preparations:
                self._engine.core.scheduler.prepared(key, None, 0.0)
            self._engine.preparations.clear()
            num_events = len(self._engine.events)
            self._engine.step()
            assert self._cells(self._engine.events[num_events:]) == line, f"step {number}"

    def _cells(self, events: list[EngineEvent]) -> list[str]:
        output = self._orders[-1]
        begun = {each.request_id: (each.num_computed_tokens, each.block_ids) for each in output.new_requests}
        begun |= {each.request_id: (each.num_computed_tokens, each.new_block_ids) for each in output.cached_requests}
        windows = [f"{name} {begun[name][0]}+{number}" for name, number in output.num_scheduled_tokens.items()]
        blocks = [f"{name} {numbers(begun[name][1])}" for name in output.num_scheduled_tokens if begun[name][1]]
        brought = [f"encode {name_of(each.key)}" for each in output.encodes]
        for load in output.ec_connector_metadata.loads:
            brought.append(f"load {name_of(load.ticket.key)}{' now' if load.is_needed else ''}")
        brought += [f"pull {load.request_id} to {numbers(load.block_ids)}" for load in output.kv_connector_metadata.loads]
        if output.freed_pages:
            brought.append(f"free pages {numbers(output.freed_pages)}")
        told = [text for event in events if (text := words(event))]
        return [", ".join(cell) for cell in (windows, blocks, brought, told)]


def numbers(values: tuple[int, ...]) -> str:
    return " ".join(map(str, values))


def name_of(key: str) -> str:
    return bytes.fromhex(key).rstrip(b"\0").decode()


def words(event: EngineEvent) -> str:
    match event:
        case ECNeeded():
            return f"{event.id} needs {name_of(event.key)}: {event.reason}"
        case ECLoaded():
            return f"{event.id} has {name_of(event.key)}"
        case PrefixHit():
            return f"{event.id} hits {event.num_tokens}"
        case Encoded():
            return f"{event.id} encoded"
        case NewTokens():
            return f"{event.id} token"
        case Finished() | HandedOver() | Failed():
            return f"{event.id} {type(event).__name__}"
        case _:
            return ""  # what its own worker prepares


def text(n: int, seed: int = 1) -> list[int]:
    return [(seed * 37 + 11 * place) % 900 for place in range(n)]


def ticket_from(fabric: Fabric, item: MediaItem) -> ECTicket:
    encoder = make_engine("E", fabric=fabric)
    encoder.encode("e", item)
    encoder.run()
    ticket = encoder.encoded["e"].ticket
    assert ticket is not None
    return ticket


def test_a_picture_cut_by_a_chunk():
    """Steps of 6 tokens; the cat is at 4 .. 11 of 14 tokens, asked for and prepared in step 1. Its first 6 rows are computed with its encode, the
    others in the next step."""
    engine = make_engine(is_alone=True, chunk=6)
    cat = item_of("cat", 4, 8)
    engine.add("r", text(14), (cat,), n=2)
    engine.encode("e", cat)
    Trace(engine).expect("""
        r 0+4  | r 0   |            | r needs cat: missing
        r 4+6  | r 1 2 | encode cat | e encoded
        r 10+4 | r 3   |            | r token
        r 14+1 |       |            | r token, r Finished
    """)
    assert engine.tokens["r"] == wanted(text(14), (cat,), 2)
    assert_nothing_is_held(engine)


def test_a_prefix_hit_inside_a_picture():
    """The cat is at 4 .. 9 of 14 tokens; a's blocks 0, 1, 2 are full at its end. b begins like a up to token 9, so its hit ends at 8, in the cat,
    which the dog has put out of the cache: its last 2 rows are computed from a new encode. c has the dog in the cat's place: it shares block 0."""
    engine = make_engine(is_alone=True, encoder_rows=8)
    cat, dog = item_of("cat", 4, 6), item_of("dog", 4, 6)
    engine.encode("e1", cat)
    engine.add("a", text(14), (cat,), n=1)
    engine.run()
    engine.encode("e2", dog)
    engine.run()
    other_end = [*text(10), *text(4, seed=5)]
    engine.add("b", other_end, (cat,), n=1)
    engine.encode("e3", cat)
    Trace(engine).expect(
        """
                |             |                             | b needs cat: missing
        b 8+6   | b 0 1 4 5   | encode cat, free pages 1 0  | b hits 8, e3 encoded, b token, b Finished
                |             |                             | c needs dog: missing
        c 4+10  | c 0 6 7 8   | encode dog, free pages 0 1  | c hits 4, e4 encoded, c token, c Finished
        """,
        {3: lambda: (engine.add("c", text(14), (dog,), n=1), engine.encode("e4", dog))},
    )
    assert engine.tokens["b"] == wanted(other_end, (cat,), 1)
    assert engine.tokens["c"] == wanted(text(14), (dog,), 1)
    assert_nothing_is_held(engine)


def test_a_full_encoder_cache_with_a_picture_in_flight():
    """Room for one picture. The cat's load fills it, and is slow: the dog, whose ticket is here as well, waits, and nothing is given up for it. Nor
    while a, which is before b, has the cat to compute. Then the dog's load takes the pages; its producer is known by now, so it is read at once."""
    fabric = Fabric()
    engine = make_engine("PD", fabric=fabric, encoder_rows=8)
    cat, dog = item_of("cat", 2, 8), item_of("dog", 2, 8)
    engine.add("a", text(12), (cat,), n=1)
    engine.add("b", text(12, 2), (dog,), n=1)
    encoder = make_engine("E", fabric=fabric)
    for name, item in (("ea", cat), ("eb", dog)):
        encoder.encode(name, item)
    encoder.run()
    for name in ("ea", "eb"):
        ticket = encoder.encoded[name].ticket
        assert ticket is not None
        engine.core.announce(ticket)
    engine.runner.held.add(cat.key)
    Trace(engine).expect(
        """
        a 0+2, b 0+2 | a 0, b 1 | load cat                      | a needs cat: missing, b needs dog: missing
                     |          |                               |
                     |          |                               | a has cat
        a 2+10       | a 2 3    |                               | a token, a Finished
        b 2+10       | b 4 5    | load dog now, free pages 0 1  | b has dog, b token, b Finished
        """,
        {3: engine.runner.held.clear},
    )
    assert engine.tokens["a"] == wanted(text(12), (cat,), 1)
    assert engine.tokens["b"] == wanted(text(12, 2), (dog,), 1)
    assert_nothing_is_held(engine)


def test_preemption_of_a_request_whose_picture_is_being_loaded():
    """4 blocks. b has computed the 8 tokens before its cat when a, which is before it, needs a 3rd block: b gives up its 2, and a gets the later
    one. The load goes on for b, which waits for 1 block beside the one that it finds; in step 6 a takes that, too, and ends. Then b finds nothing,
    but the cat is here: it computes all of its 12 tokens, in a's last block, which is not full, then in those of a's full ones that go first."""
    fabric = Fabric()
    engine = make_engine("PD", fabric=fabric, num_kv_blocks=4)
    cat = item_of("cat", 8, 3)
    engine.add("a", text(8), n=6)
    engine.add("b", text(12, 2), (cat,), n=1)
    engine.core.announce(ticket_from(fabric, cat))
    engine.runner.held.add(cat.key)
    Trace(engine).expect(
        """
        a 0+8, b 0+8 | a 0 1, b 2 3 | load cat | b needs cat: missing, a token
        a 8+1        | a 3          |          | a token
        a 9+1        |              |          | b has cat, a token
        a 10+1       |              |          | a token
        a 11+1       |              |          | a token
        a 12+1       | a 2          |          | a token, a Finished
        b 0+12       | b 2 3 1      |          | b token, b Finished
        """,
        {3: engine.runner.held.clear},
    )
    assert engine.core.scheduler.num_preempted == 1
    assert engine.tokens["b"] == wanted(text(12, 2), (cat,), 1)
    assert_nothing_is_held(engine)


def test_an_abort_during_the_pull_of_kv():
    """4 blocks; 9 tokens reserve 3. r leaves while its copy writes two of them: none is free before the copy has ended, so s, which needs 3, waits
    with 1 left. Then the 3 go to the end of the free ones, the last of them first."""
    fabric = Fabric()
    prefill = make_engine("EP", fabric=fabric)
    engine = make_engine("D", fabric=fabric, num_kv_blocks=4)
    for name, seed in (("r", 1), ("s", 2)):
        prefill.add(name, text(8, seed), n=2, hands_over=True)
        prefill.run()
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        spec = RequestSpec(name, (*text(8, seed), *prefill.tokens[name]), 8, sampling, kv_tickets=tickets_of(prefill, name))
        engine.core.add_request(spec)
    engine.runner.held.add(("r", 0))
    Trace(engine).expect(
        """
              |         | pull r to 0 1 |
              |         |               |
              |         |               |
              |         | pull s to 3 2 |
        s 8+1 | s 3 2 1 |               | s token, s Finished
        """,
        {2: partial(engine.core.scheduler.abort, "r"), 3: engine.runner.held.clear},
    )
    assert prefill.tokens["s"] + engine.tokens["s"] == wanted(text(8, 2), n=2)
    assert "r" not in engine.ends
    assert_nothing_is_held(engine)


def test_two_requests_that_wait_for_one_key():
    """Both say that they lack the cat, since either may leave; one ticket answers both, one load brings it, and both read the same pages."""
    fabric = Fabric()
    engine = make_engine("PD", fabric=fabric)
    cat = item_of("cat", 2, 8)
    engine.add("a", text(12), (cat,), n=1)
    engine.add("b", text(12, 2), (cat,), n=1)
    Trace(engine).expect(
        """
        a 0+2, b 0+2   | a 0, b 1     |          | a needs cat: missing, b needs cat: missing
                       |              | load cat | a has cat, b has cat
        a 2+10, b 2+10 | a 2 3, b 4 5 |          | a token, a Finished, b token, b Finished
        """,
        {2: lambda: engine.core.announce(ticket_from(fabric, cat))},
    )
    assert engine.tokens["a"] == wanted(text(12), (cat,), 1)
    assert engine.tokens["b"] == wanted(text(12, 2), (cat,), 1)
    assert_nothing_is_held(engine)
