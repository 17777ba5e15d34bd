"""Every short history of a prefill engine: two requests that share a picture, its tickets, loads that hold and fail, and time.

After each, the world is left alone: whoever is there ends, once and right, by a token or by a deadline, and nothing is held.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_rig import Engine, TurnedClock, assert_nothing_is_held, item_of, make_engine, wanted
from every_sequence import follow_every_sequence

from triptych.engine.arithmetic_runner import Fabric
from triptych.engine.events import Failed, Finished
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import ECTicket

PROMPT = [(37 + 11 * i) % 900 for i in range(14)]
CAT, DOG = item_of("cat", 2, 6), item_of("dog", 9, 4)
ITEMS = {"a": (CAT, DOG), "b": (CAT,)}  # a holds what b wants while it waits for more than the cache has room for


def encoded_by(fabric: Fabric, clock: TurnedClock, item: MediaItem) -> ECTicket:
    encoder = make_engine("E", fabric=fabric, clock=clock, worker_id=f"e-{item.key[:6]}")
    encoder.encode("e", item)
    encoder.run()
    ticket = encoder.encoded["e"].ticket
    assert ticket is not None
    return ticket


@dataclass
class World:
    fabric: Fabric = field(default_factory=Fabric)
    clock: TurnedClock = field(default_factory=TurnedClock)
    left: set[str] = field(default_factory=set[str])
    engine: Engine = field(init=False)
    tickets: dict[str, ECTicket] = field(init=False)

    def __post_init__(self) -> None:
        self.engine = make_engine("PD", fabric=self.fabric, clock=self.clock, encoder_rows=8, chunk=8)
        self.tickets = {item.key: encoded_by(self.fabric, self.clock, item) for item in (CAT, DOG)}

    def arrive(self, name: str) -> None:
        if name not in self.engine.ends and name not in self.left and not self.is_there(name):
            self.engine.add(name, PROMPT, ITEMS[name], n=2)

    def is_there(self, name: str) -> bool:
        return name in self.engine.core.scheduler._requests  # pyright: ignore[reportPrivateUsage]

    def leave(self, name: str) -> None:
        if self.is_there(name):
            self.left.add(name)
            self.engine.core.scheduler.abort(name)

    def step(self) -> None:
        self.engine.step()

    def check(self) -> None:
        self.engine.core.scheduler.check_invariants()
        world: World = pickle.loads(pickle.dumps(self))
        world.come_to_an_end()

    def come_to_an_end(self) -> None:
        engine, there = self.engine, [name for name in ITEMS if self.is_there(name)]
        self.fabric.is_holding = False
        engine.run()
        self.clock.now += 10.0
        engine.run()
        for name in there:
            assert isinstance(engine.ends.get(name), Finished | Failed), f"{name} never ends"
        for name, end in engine.ends.items():
            expected = wanted(PROMPT, ITEMS[name], 2)
            assert engine.tokens.get(name, []) == (expected if isinstance(end, Finished) else [])
        assert_nothing_is_held(engine)


def _pass_time(world: World) -> None:
    world.clock.now += 6.0


def _hold(world: World) -> None:
    world.fabric.is_holding = not world.fabric.is_holding


def _break(world: World) -> None:
    world.fabric.failures[CAT.key] = FailureReason.STALE


def test_after_every_short_history_each_request_ends_once_and_right_and_nothing_is_held():
    events: dict[str, Callable[[World], None]] = {
        "a arrives": lambda w: w.arrive("a"),
        "b arrives": lambda w: w.arrive("b"),
        "a leaves": lambda w: w.leave("a"),
        "a ticket for the cat": lambda w: w.engine.core.announce(w.tickets[CAT.key]),
        "a ticket for the dog": lambda w: w.engine.core.announce(w.tickets[DOG.key]),
        "loads hold, or go on": _hold,
        "the cat's next load fails": _break,
        "step": World.step,
        "time": _pass_time,
    }
    world = World()
    world.arrive("a")
    assert follow_every_sequence(world, events, depth=4) > 1000
