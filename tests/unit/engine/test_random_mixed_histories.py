"""Random histories of one engine that encodes, takes items and KV from others, prefills and decodes: all that can meet, meets.

Beside test_random_histories.py: pictures that come twice in a prompt, placeholders with gaps, items brought by a load while they are asked of
the tower, aborts between any two steps, and ids that are used again.
"""

from dataclasses import dataclass
from random import Random

import pytest
from engine_rig import Engine, TurnedClock, assert_nothing_is_held, key_of, make_engine, tickets_of, wanted

from triptych.engine.arithmetic_runner import Fabric
from triptych.engine.core import EngineCore
from triptych.engine.encode_queue import EncodeSpec
from triptych.engine.events import ECNeeded, Encoded, EncodeFailed, Failed, Finished
from triptych.engine.request import RequestSpec
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import KVTicket
from triptych.sampling_params import SamplingParams

LOST = (FailureReason.STALE, FailureReason.PEER_LOST, FailureReason.CORRUPT)


@dataclass
class Asked:
    """A request that runs, under an id that others had before it."""

    prompt: list[int]
    items: tuple[MediaItem, ...]
    num_tokens: int
    generated: list[int]  # by the prefill worker which it came from


class MixedHistory:
    def __init__(self, seed: int, role: str, has_atomic_items: bool) -> None:
        self.rng = rng = Random(seed)
        self.fabric, self.clock = Fabric(), TurnedClock()
        self.engine = make_engine(
            role,
            fabric=self.fabric,
            clock=self.clock,
            chunk=rng.choice((3, 7, 16, 64)),
            encoder_rows=rng.choice((16, 24, 64)),
            num_kv_blocks=rng.choice((16, 24, 64)),
            max_num_seqs=rng.choice((2, 8)),
            lease_s=3.0,
        )
        if has_atomic_items:
            config, runner = self.engine.core._config, self.engine.runner  # pyright: ignore[reportPrivateUsage]
            self.engine.core = EngineCore(config, runner, self.clock, has_atomic_items=True)
        self.encoder = make_engine("E", fabric=self.fabric, clock=self.clock, encoder_rows=128, lease_s=3.0, worker_id="e2")
        self.prefill = make_engine("EP", fabric=self.fabric, clock=self.clock, encoder_rows=128, lease_s=6.0, worker_id="p2")
        self.asked: dict[str, Asked] = {}
        self.encodes: list[str] = []
        self.num_encodes = 0
        self.max_num_seqs = self.engine.core._config.scheduler.max_num_seqs  # pyright: ignore[reportPrivateUsage]

    def run(self) -> None:
        for _ in range(self.rng.randrange(30, 90)):
            self._act()
            self._check()
        self.fabric.is_holding = False
        self.fabric.failures.clear()
        for _ in range(3000):
            self._pump()
            self._check()
            self.clock.now += 0.02
            if not self.asked:
                break
        assert not self.asked, list(self.asked)
        while self.encodes or self.engine.preparations:
            self._pump()
        self.clock.now += 20.0  # whatever nobody released lapses
        self._pump()
        self._pump()
        assert_nothing_is_held(self.engine)
        cache = self.engine.core.scheduler.cache
        cache.check_invariants()

    def _check(self) -> None:
        scheduler = self.engine.core.scheduler
        scheduler.check_invariants()
        assert scheduler.num_running <= self.max_num_seqs

    def _act(self) -> None:
        rng = self.rng
        acts = ("arrive", "pump", "abort", "abort encode", "release", "fault", "hold", "time", "encode", "announce")
        match rng.choices(acts, (5, 14, 2, 1, 1, 1, 1, 1, 2, 2))[0]:
            case "arrive":
                self._arrive()
            case "abort" if self.asked:
                name = rng.choice(list(self.asked))
                del self.asked[name]
                self.engine.core.scheduler.abort(name)
            case "abort encode" if self.encodes:
                self.engine.core.scheduler.abort(self.encodes.pop(rng.randrange(len(self.encodes))))
            case "release":
                self.engine.core.scheduler.release(f"e{rng.randrange(self.num_encodes + 1)}")
            case "fault":
                names = [item.key for asked in self.asked.values() for item in asked.items] + list(self.asked)
                if names:
                    self.fabric.failures[rng.choice(names)] = rng.choice(LOST)
            case "hold":
                self.fabric.is_holding = not self.fabric.is_holding
            case "time":
                self.clock.now += rng.choice((0.1, 1.0, 4.0))
            case "encode":
                self._encode_here(self._picture(0, 8))
            case "announce":
                self._announce(self._picture(0, 8))
            case _:
                self._pump()

    def _picture(self, place: int, num_rows: int) -> MediaItem:
        """With or without a gap; its key says how many rows it has."""
        gap = self.rng.choice((0, 0, 3))
        runs = ((place, num_rows),) if not gap else ((place, 2), (place + 2 + gap, num_rows - 2))
        return MediaItem(key_of(f"pic{num_rows}-{self.rng.randrange(3)}"), "image", runs, num_rows)

    def _arrive(self) -> None:
        rng = self.rng
        name = f"r{rng.randrange(6)}"
        if name in self.asked:
            return
        length, place = rng.randrange(8, 44), rng.randrange(0, 4)
        items: list[MediaItem] = []
        while place + 16 < length and rng.random() < 0.7:
            item = self._picture(place, rng.choice((6, 8, 11)))
            items.append(item)
            place = item.end + rng.randrange(0, 4)
        prompt = [rng.randrange(900) for _ in range(length)]
        asked = Asked(prompt, tuple(items), rng.randrange(2, 7), [])
        tickets = self._prefilled_elsewhere(asked) if rng.random() < 0.4 else ()
        self.engine.tokens.pop(name, None)
        self.engine.ends.pop(name, None)
        self.asked[name] = asked
        sampling = SamplingParams(max_tokens=asked.num_tokens, temperature=0.0)
        ids = (*prompt, *asked.generated)
        self.engine.core.add_request(RequestSpec(name, ids, length, sampling, asked.items, kv_tickets=tickets))

    def _prefilled_elsewhere(self, asked: Asked) -> tuple[KVTicket, ...]:
        name = f"elsewhere{self.rng.random()}"
        engine = self.prefill
        was_holding, self.fabric.is_holding = self.fabric.is_holding, False
        engine.add(name, asked.prompt, asked.items, n=asked.num_tokens, hands_over=True)
        for index, item in enumerate(asked.items):
            engine.encode(f"{name}-{index}", item, will_stay=True)
        engine.run()
        self.fabric.is_holding = was_holding
        asked.generated = engine.tokens.pop(name)
        return tickets_of(engine, name)

    def _encode_here(self, item: MediaItem) -> None:
        self.num_encodes += 1
        name = f"e{self.num_encodes}"
        self.encodes.append(name)
        will_stay = self.rng.random() < 0.5
        self.engine.core.add_encode(EncodeSpec(name, item.key, "image", item.num_rows, (), will_stay))

    def _announce(self, item: MediaItem) -> None:
        name = f"x{self.rng.random()}"
        self.encoder.encode(name, item)
        self.encoder.run()
        encoded = self.encoder.encoded.pop(name, None)
        self.encoder.core.scheduler.release(name)
        if encoded is not None and encoded.ticket is not None:
            self.engine.core.announce(encoded.ticket)

    def _pump(self) -> None:
        engine, rng = self.engine, self.rng
        for key in engine.preparations[:]:
            if rng.random() < 0.7:
                engine.preparations.remove(key)
                if rng.random() < 0.1:
                    engine.core.scheduler.preparation_failed(key, "the pool is full", FailureReason.INTERNAL)
                else:
                    engine.core.scheduler.prepared(key, None, 0.0)
        engine.step()
        events, engine.events = engine.events, []
        for event in events:
            match event:
                case ECNeeded() if event.id in self.asked:
                    self._answer(event)
                case Encoded() | EncodeFailed():
                    if event.id in self.encodes:
                        self.encodes.remove(event.id)
                    if isinstance(event, EncodeFailed):
                        # not prepared; released before it was answered; queued for too long
                        assert event.reason in (FailureReason.INTERNAL, FailureReason.MISSING, FailureReason.TIMEOUT)
                        self._encode_again(engine, event.key)
                case Finished() if event.id in self.asked:
                    asked = self.asked.pop(event.id)
                    tokens = asked.generated + engine.tokens[event.id]
                    assert tokens == wanted(asked.prompt, asked.items, asked.num_tokens), event.id
                case Failed() if event.id in self.asked:
                    assert event.reason in (*LOST, FailureReason.TIMEOUT, FailureReason.EVICTED), event
                    del self.asked[event.id]
                case _:
                    pass

    def _answer(self, event: ECNeeded) -> None:
        for item in self.asked[event.id].items:  # none matches if the question was that of an earlier request of this id
            if item.key == event.key:
                (self._encode_here if self.rng.random() < 0.5 else self._announce)(item)
                return

    def _encode_again(self, engine: Engine, key: str) -> None:
        for asked in self.asked.values():
            item = next((item for item in asked.items if item.key == key), None)
            if item is not None:
                self._encode_here(item)
                return


@pytest.mark.parametrize("has_atomic_items", (False, True))
@pytest.mark.parametrize("base", range(0, 120, 40))
def test_whatever_meets_in_one_engine_each_request_ends_once_and_right(base: int, has_atomic_items: bool):
    for seed in range(base, base + 40):
        try:
            MixedHistory(seed, "EPD", has_atomic_items).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
