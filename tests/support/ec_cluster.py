"""The router's part among `RigWorker`s. Every message goes through a bag, from which a test takes, repeats or loses any."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from itertools import count

from connector_rig import EC_TIMEOUT_S, PICTURES, Causes, RigWorker, WatchedNetwork, make_config
from engine_rig import TurnedClock

from triptych.engine.encode_queue import EncodeSpec
from triptych.engine.events import ECLoaded, ECNeeded, Encoded, EncodeEvent, EncodeFailed, EngineEvent, Failed, Finished
from triptych.engine.request import RequestSpec
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import ECTicket
from triptych.sampling_params import SamplingParams

MAX_ENCODES = 3  # of one item for one request; not counting those that an eviction or a lapsed lease made necessary
MAX_RESENDS = 2
ENCODE_TIMEOUT_S, RESEND_S = 200.0, 5.0
MAX_ROUNDS = 20_000


@dataclass(eq=False)
class Message:
    kind: str
    go: Callable[[], None]
    causes: tuple[tuple[str, ...], ...] = ()  # what its loss may cause
    on_loss: Callable[[], None] = lambda: None


class Part(Flag):
    """Of what can happen in a round."""

    MESSAGES = auto()
    PREPARATIONS = auto()
    READS = auto()
    STEPS = auto()


class FeedState(Enum):
    ASKED = auto()  # an encode worker was called
    DELIVERED = auto()  # the ticket was sent on
    DONE = auto()


@dataclass(eq=False)
class Feed:
    """One item on its way to one request."""

    key: str
    worker: RigWorker  # who is to encode it
    encode_id: str = ""
    state: FeedState = FeedState.DONE
    num_encodes: int = 0
    deadline: float | None = None
    ticket: ECTicket | None = None
    num_resends: int = 0


@dataclass(frozen=True)
class Wish:
    """A request to be made. `gap` tokens of text stand before each picture."""

    keys: Sequence[str]
    gap: int = 1
    num_tokens: int = 2
    spread: int = 0  # which encode worker is asked first
    is_eager: bool = False  # its pictures are encoded without being asked for


@dataclass(eq=False)
class Client:
    id: str
    worker: RigWorker
    spread: int
    feeds: dict[str, Feed] = field(default_factory=dict[str, Feed])
    is_over: bool = False


class Cluster:
    def __init__(self, roles: Sequence[str], num_pages: int, chunk: int, verify_checksums: bool) -> None:
        self.verify_checksums = verify_checksums
        self.clock = TurnedClock()
        self.network = WatchedNetwork()
        self.causes: Causes = set()
        self.bag: list[Message] = []
        self.clients: dict[str, Client] = {}
        self.num_failed = 0  # requests whose client had not left
        self._flights: dict[str, tuple[Client, Feed]] = {}  # by encode id
        self._num_pages, self._chunk = num_pages, chunk
        self._numbers = count()
        self.workers = [self._start(role) for role in roles]

    def _start(self, role: str) -> RigWorker:
        config = make_config(role, self._num_pages, self._chunk)
        name = f"{role}{next(self._numbers)}"
        return RigWorker(name, config, self.network, self.clock, self.causes, self.verify_checksums)

    @property
    def consumers(self) -> list[RigWorker]:
        return [worker for worker in self.workers if worker.config.is_ec_consumer]

    @property
    def encoders(self) -> list[RigWorker]:
        return [worker for worker in self.workers if worker.config.has_tower]

    # --- what clients do --------------------------------------------------------------------------------------------

    def request(self, worker: RigWorker, wish: Wish) -> None:
        name = f"r{next(self._numbers)}"
        token_ids, items = _prompt(wish.keys, wish.gap, seed=len(self.clients))
        client = self.clients[name] = Client(name, worker, wish.spread)
        sampling = SamplingParams(max_tokens=wish.num_tokens, temperature=0.0)
        spec = RequestSpec(name, token_ids, len(token_ids), sampling, items)
        self._send("generate", worker, lambda: worker.add_request(spec))
        for key in dict.fromkeys(wish.keys) if wish.is_eager else ():
            self._ask(client, key)

    def leave(self, client: Client) -> None:
        client.is_over = True
        self.causes.add(("lost", client.id))  # if the abort is lost, nobody serves it any more
        self._send("abort", client.worker, lambda: client.worker.abort(client.id))
        self._let_go(client)

    # --- what happens to messages and workers -------------------------------------------------------------------------

    def deliver(self, message: Message) -> None:
        self.bag.remove(message)
        message.go()

    def lose(self, message: Message) -> None:
        self.bag.remove(message)
        self.causes.update(message.causes)
        message.on_loss()

    def repeat(self, message: Message) -> None:
        self.bag.append(message)

    def kill(self, worker: RigWorker) -> None:
        """A fresh one takes its place."""
        worker.die()
        self.workers[self.workers.index(worker)] = self._start(str(worker.config.role))
        for client in [client for client in self.clients.values() if not client.is_over]:
            if client.worker is worker:
                self._end(client)
            for feed in client.feeds.values():
                if feed.worker is worker and feed.state == FeedState.ASKED:
                    self._ask(client, feed.key)

    def sleep(self, seconds: float) -> None:
        """Turn the clock while messages are under way, which may then be later than every deadline."""
        self.clock.now += seconds
        self.causes.add(("slept",))
        for worker in self.workers:
            for request in worker.live.values():
                request.has_slept = True

    def step(self, worker: RigWorker) -> None:
        for event in worker.step():
            self._carry(worker, event)

    # --- the router -------------------------------------------------------------------------------------------------

    def _send(
        self,
        kind: str,
        worker: RigWorker,
        call: Callable[[], None],
        *causes: tuple[str, ...],
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        self.bag.append(Message(kind, lambda: None if worker.is_dead else call(), causes, on_loss))

    def _carry(self, worker: RigWorker, event: EngineEvent) -> None:
        match event:
            case ECNeeded():
                self.bag.append(Message("needed", lambda: self._need(event), (("lost", event.id),)))
            case ECLoaded():
                self.bag.append(Message("loaded", lambda: self._loaded(event)))
            case Encoded() | EncodeFailed():
                client, _ = self._flights[event.id]
                causes = ("lost", event.id), ("lost", client.id)
                self.bag.append(Message("answer", lambda: self._answered(worker, event), causes))
            case Finished() | Failed():
                client = self.clients[event.id]
                self.num_failed += isinstance(event, Failed) and not client.is_over
                self._end(client)
            case _:
                pass

    def _need(self, event: ECNeeded) -> None:
        client = self.clients[event.id]
        feed = client.feeds.get(event.key)
        if client.is_over or (feed is not None and feed.state == FeedState.ASKED):
            return
        if feed is not None and feed.state == FeedState.DELIVERED:
            if event.reason == FailureReason.MISSING and feed.num_resends < MAX_RESENDS:  # question and answer have crossed
                feed.num_resends += 1
                self._deliver(client, feed)
                return
            self._release(feed)
        if feed is not None and event.reason in (FailureReason.EVICTED, FailureReason.STALE):
            feed.num_encodes = 0
        self._ask(client, event.key)

    def _ask(self, client: Client, key: str) -> None:
        place = list(PICTURES).index(key) + client.spread
        feed = client.feeds.setdefault(key, Feed(key, client.worker))
        if feed.num_encodes == MAX_ENCODES:
            self._give_up(client, feed, "exhausted", FailureReason.INTERNAL)
            return
        worker = feed.worker = self.encoders[(place + feed.num_encodes) % len(self.encoders)]
        feed.num_encodes += 1
        feed.num_resends = 0
        feed.encode_id = encode_id = f"e{next(self._numbers)}"
        feed.state, feed.deadline = FeedState.ASKED, self.clock.now + ENCODE_TIMEOUT_S
        self._flights[encode_id] = client, feed
        spec = EncodeSpec(encode_id, key, "image", PICTURES[key], will_stay=worker is client.worker)
        self._send("encode", worker, lambda: worker.add_encode(spec), ("lost", encode_id), ("lost", client.id))

    def _answered(self, worker: RigWorker, event: EncodeEvent) -> None:
        client, feed = self._flights[event.id]
        if feed.encode_id != event.id or feed.state != FeedState.ASKED:  # nobody waits for it any more
            self._send("release", worker, lambda: worker.release(event.id))
        elif isinstance(event, EncodeFailed):
            if event.reason.is_retryable:
                self._ask(client, feed.key)
            else:
                self._give_up(client, feed, "refused", event.reason)
        elif event.ticket is None:
            feed.state, feed.deadline = FeedState.DONE, None
        else:
            feed.ticket = event.ticket
            self._deliver(client, feed)

    def _deliver(self, client: Client, feed: Feed) -> None:
        feed.state, feed.deadline = FeedState.DELIVERED, None
        ticket = feed.ticket
        assert ticket is not None

        def lost() -> None:  # the call has failed
            if feed.ticket is ticket and feed.num_resends < MAX_RESENDS:
                feed.deadline = self.clock.now + RESEND_S

        self._send("ticket", client.worker, lambda: client.worker.announce(ticket), ("lost", client.id), on_loss=lost)

    def _give_up(self, client: Client, feed: Feed, why: str, reason: FailureReason) -> None:
        feed.state, feed.deadline = FeedState.DONE, None
        self.causes.add((why, client.id))
        self._send("failure", client.worker, lambda: client.worker.item_failed(client.id, feed.key, reason), ("lost", client.id))

    def _loaded(self, event: ECLoaded) -> None:
        feed = self.clients[event.id].feeds.get(event.key)
        if feed is not None and feed.state == FeedState.DELIVERED:
            self._release(feed)

    def _end(self, client: Client) -> None:
        client.is_over = True
        self._let_go(client)

    def _let_go(self, client: Client) -> None:
        for feed in client.feeds.values():
            if feed.state == FeedState.ASKED:
                self._abort_encode(feed)
            elif feed.state == FeedState.DELIVERED:
                self._release(feed)
            feed.state, feed.deadline = FeedState.DONE, None

    def _release(self, feed: Feed) -> None:
        worker, encode_id = feed.worker, feed.encode_id
        feed.state, feed.deadline = FeedState.DONE, None
        self._send("release", worker, lambda: worker.release(encode_id))

    def _abort_encode(self, feed: Feed) -> None:
        worker, encode_id = feed.worker, feed.encode_id
        self._send("abort", worker, lambda: worker.abort(encode_id))

    def _check_deadlines(self) -> None:
        """The router's own: an encode that is not answered is asked of another, a delivery that was lost is sent again."""
        for client, feed in self._feeds():
            if feed.deadline is None or feed.deadline > self.clock.now:
                continue
            if feed.state == FeedState.DELIVERED:
                feed.num_resends += 1
                self._deliver(client, feed)
            else:
                # Two workers that encode and prefill may wait for each other's room: who notices is the router.
                may_be_late = self.causes or feed.worker.config.is_ec_consumer
                assert may_be_late, f"{feed.worker.id} never answered {feed.encode_id}, and nothing was wrong"
                self._abort_encode(feed)
                self._ask(client, feed.key)

    def _feeds(self) -> Iterator[tuple[Client, Feed]]:
        return iter([(client, feed) for client in self.clients.values() for feed in client.feeds.values()])

    # --- to the end -------------------------------------------------------------------------------------------------

    def run_round(self, parts: Part = ~Part(0)) -> bool:
        """Whatever can happen without the clock, once; False if there is nothing."""
        messages, preparations, due = [], [], []
        if Part.MESSAGES in parts:
            messages, self.bag = self.bag, []
            for message in messages:
                message.go()
            self._check_deadlines()
        if Part.PREPARATIONS in parts:
            preparations = [(worker, key) for worker in self.workers for key in worker.preparations]
            for worker, key in preparations:
                worker.prepare(key)
        if Part.READS in parts:
            self.network.deliver()
        if Part.STEPS in parts:
            due = [worker for worker in self.workers if worker.is_due]
            for worker in due:
                self.step(worker)
        return bool(messages or preparations or due or self.bag)

    def settle(self) -> None:
        """Without further faults, until nothing is under way and no deadline is left. The clock only goes on when all else rests."""
        self.network.num_ticks = 0
        self.network.give_up()
        for worker in self.workers:
            worker.runner.heal()
        for _ in range(MAX_ROUNDS):
            if not self.run_round():
                deadlines = self._deadlines()
                if not deadlines:
                    break
                self.clock.now = max(self.clock.now, min(deadlines))
        else:
            raise AssertionError("it never comes to rest")
        waiting = [client.id for client in self.clients.values() if not client.is_over]
        assert not waiting, f"{waiting} wait without a deadline"

    def _deadlines(self) -> list[float]:
        seconds = [worker.core.seconds_to_deadline() for worker in self.workers]
        deadlines = [self.clock.now + each for each in seconds if each is not None]
        return deadlines + [feed.deadline for _, feed in self._feeds() if feed.deadline is not None]

    def check_all_is_well(self) -> None:
        """Nothing is held by nobody, and every consumer serves every picture, whatever has happened before."""
        self.clock.now += EC_TIMEOUT_S  # announcements for requests that never came lapse
        for worker in self.workers:
            self.step(worker)
            worker.check_nothing_is_held()
        num_failed = self.num_failed
        for worker in self.consumers:
            self.request(worker, Wish(list(PICTURES)))
        self.settle()
        assert self.num_failed == num_failed
        for worker in self.workers:
            worker.check_nothing_is_held()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def _prompt(keys: Sequence[str], gap: int, seed: int) -> tuple[tuple[int, ...], tuple[MediaItem, ...]]:
    """Pictures between text; with an odd `gap`, a separator stands behind the first row of each."""
    token_ids: list[int] = []
    items: list[MediaItem] = []
    for key in keys:
        token_ids += [(seed * 37 + 11 * place) % 900 for place in range(gap)]
        start, num_rows = len(token_ids), PICTURES[key]
        runs = ((start, num_rows),) if gap % 2 == 0 else ((start, 1), (start + 2, num_rows - 1))
        items.append(MediaItem(key, "image", runs, num_rows))
        token_ids += [0] * (num_rows + len(runs) - 1)
    token_ids += [seed % 900, 7]
    return tuple(token_ids), tuple(items)
