"""Random histories over an encode, a prefill and a decode engine: arrivals, aborts, failed loads and lapsed leases in any order.

Whatever happens, each request ends once, with the tokens worked by hand, and at the end nothing is held anywhere.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import pytest
from engine_rig import Engine, TurnedClock, assert_nothing_is_held, item_of, make_engine, wanted

from triptych.engine.arithmetic_runner import Fabric
from triptych.engine.events import ECNeeded, EncodeFailed, Failed, Finished, HandedOver, KVPublished
from triptych.engine.request import RequestSpec
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import KVTicket
from triptych.sampling_params import SamplingParams

RETRYABLE = (FailureReason.STALE, FailureReason.PEER_LOST, FailureReason.TIMEOUT, FailureReason.CORRUPT)


@dataclass
class Client:
    """One request as a router leads it."""

    name: str
    prompt: list[int]
    items: tuple[MediaItem, ...]
    num_tokens: int
    tokens: list[int] = field(default_factory=list[int])
    attempt: int = 0
    is_early: bool = False  # the decode engine has its prompt while the prefill engine computes it
    first_part: KVTicket | None = None  # that it got with the prompt
    is_over: bool = False
    was_aborted: bool = False

    @property
    def id(self) -> str:
        return f"{self.name}.{self.attempt}"


class History:
    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.fabric = Fabric()
        chunk = rng.choice((3, 7, 16, 64))
        self.clock = TurnedClock()
        rows, blocks = (24, 64), (24, 64)
        make = partial(make_engine, fabric=self.fabric, clock=self.clock, lease_s=5.0)
        self.e = make("E", encoder_rows=rng.choice(rows))
        self.p = make("P", chunk=chunk, encoder_rows=rng.choice(rows), num_kv_blocks=rng.choice(blocks))
        self.d = make("D", num_kv_blocks=rng.choice(blocks), max_num_seqs=3)
        self.engines = (self.e, self.p, self.d)
        self.clients: list[Client] = []
        self.encodes: dict[str, tuple[MediaItem, str]] = {}  # encode id -> (item, request id)

    def run(self) -> None:
        for _ in range(self.rng.randrange(20, 60)):
            self._act()
        self.fabric.is_holding = False
        self.fabric.failures.clear()
        for _ in range(12_000):
            self._pump(self.rng.choice(self.engines))
            self.clock.now += 0.02  # a lost announcement ends in its deadline
            if all(client.is_over for client in self.clients):
                break
        assert all(client.is_over for client in self.clients), [c.id for c in self.clients if not c.is_over]
        for _ in range(2):
            self.clock.now += 20.0  # whatever nobody released lapses
            for engine in self.engines * 4:
                self._pump(engine)
        for engine in self.engines:
            assert_nothing_is_held(engine)

    def _act(self) -> None:
        rng = self.rng
        match rng.choices(("arrive", "pump", "abort", "fault", "hold", "time"), (4, 12, 1, 1, 1, 1))[0]:
            case "arrive":
                self._arrive()
            case "abort":
                live = [client for client in self.clients if not client.is_over]
                if live:
                    client = rng.choice(live)
                    client.is_over = client.was_aborted = True
                    for engine in (self.p, self.d):
                        engine.core.scheduler.abort(client.id)
                        engine.core.scheduler.release(client.id)
            case "fault":
                targets = [item.key for client in self.clients for item in client.items] + [each.id for each in self.clients]
                if targets:
                    self.fabric.failures[rng.choice(targets)] = rng.choice(RETRYABLE)
            case "hold":
                self.fabric.is_holding = not self.fabric.is_holding
            case "time":
                self.clock.now += rng.choice((0.1, 1.0, 6.0))
            case _:
                self._pump(rng.choice(self.engines))

    def _arrive(self) -> None:
        rng = self.rng
        name = f"r{len(self.clients)}"
        length = rng.randrange(8, 40)
        items: list[MediaItem] = []
        place = rng.randrange(0, 4)
        while place + 6 < length and rng.random() < 0.6:
            rows = min(rng.randrange(2, 12), length - place)
            items.append(item_of(f"pic{rows}-{rng.randrange(4)}", place, rows))
            place += rows + rng.randrange(1, 4)
        prompt = [rng.randrange(900) for _ in range(length)]
        client = Client(name, prompt, tuple(items), rng.randrange(1, 7))
        self.clients.append(client)
        self._prefill(client)

    def _prefill(self, client: Client) -> None:
        client.attempt += 1
        client.is_early = False
        self.p.core.add_request(self._spec(client, ()))

    def _take_part(self, client: Client, ticket: KVTicket) -> None:
        """Some are sent early; a delivery may be lost, or come twice."""
        if not client.is_early and not ticket.first_block and self.rng.random() < 0.7:
            client.is_early, client.first_part = True, ticket
            self.d.core.add_request(replace(self._spec(client, (ticket,)), has_more_kv=True))
        elif client.is_early and not ticket.first_block:
            self._drop_early(client)
        elif client.is_early:
            for _ in range(self.rng.choice((0, 1, 1, 1, 2))):
                self.d.core.deliver_kv(client.id, (ticket,), (), False)

    def _drop_early(self, client: Client) -> None:
        client.is_early = False
        self.d.core.scheduler.abort(client.id)

    def _hand_over(self, client: Client, tickets: tuple[KVTicket, ...], tokens: list[int]) -> None:
        if client.is_early and (client.first_part != tickets[0] or self.rng.random() < 0.1):
            self._drop_early(client)
        if client.is_early:
            self.d.core.deliver_kv(client.id, tickets, tuple(tokens), True)
        else:
            self.d.core.add_request(self._spec(client, tickets))

    def _spec(self, client: Client, tickets: tuple[KVTicket, ...]) -> RequestSpec:
        sampling = SamplingParams(max_tokens=client.num_tokens, temperature=0.0)
        ids = (*client.prompt, *client.tokens)
        return RequestSpec(client.id, ids, len(client.prompt), sampling, client.items, not tickets, tickets)

    def _pump(self, engine: Engine) -> None:
        if self.rng.random() < 0.8:
            for key in engine.preparations:
                engine.core.scheduler.prepared(key, None, 0.0)
            engine.preparations.clear()
        engine.step()
        events, engine.events = engine.events, []
        for event in events:
            client = next((each for each in self.clients if each.id == getattr(event, "id", "")), None)
            match event:
                case ECNeeded() if client is not None and not client.is_over:
                    self._encode(client, next(item for item in client.items if item.key == event.key))
                case EncodeFailed():
                    self.encodes.pop(event.id)
                case KVPublished() if client is not None and not client.is_over:
                    self._take_part(client, event.ticket)
                case HandedOver() if client is not None:
                    before = len(client.tokens)
                    self._take_tokens(engine, client)
                    self._hand_over(client, event.tickets, client.tokens[before:])
                case Failed() if client is not None and engine is self.d and client.is_early and client.id not in self.p.ends:
                    client.is_early = False
                    del self.d.ends[client.id]
                case Finished() if client is not None:
                    if engine is self.p and client.is_early:
                        self._drop_early(client)
                    self._take_tokens(engine, client)
                    client.is_over = True
                    assert client.tokens == wanted(client.prompt, client.items, client.num_tokens), client.name
                case Failed() if client is not None and not client.is_over:
                    assert event.reason in (*RETRYABLE, FailureReason.EVICTED), event
                    self._take_tokens(engine, client)
                    self.p.core.scheduler.release(client.id)
                    self._prefill(client)
                case _:
                    pass
        for encode_id, encoded in list(self.e.encoded.items()):
            del self.e.encoded[encode_id]
            assert encoded.ticket is not None
            if self.rng.random() < 0.9:
                self.p.core.announce(encoded.ticket)
            if self.rng.random() < 0.5:
                self.e.core.scheduler.release(encode_id)

    def _take_tokens(self, engine: Engine, client: Client) -> None:
        client.tokens += engine.tokens.pop(client.id, [])

    def _encode(self, client: Client, item: MediaItem) -> None:
        encode_id = f"e{len(self.encodes)}-{self.rng.random()}"
        self.encodes[encode_id] = (item, client.id)
        self.e.encode(encode_id, item)


@pytest.mark.parametrize("base", range(0, 400, 50))
def test_every_request_ends_once_with_the_right_tokens_and_nothing_is_held(base: int):
    for seed in range(base, base + 50):
        try:
            History(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
