"""What goes wrong with one item ends that item's requests; whoever runs beside them, or comes later, does not notice."""

from collections.abc import Callable

import msgspec
import pytest
from engine_rig import Engine, assert_nothing_is_held, item_of, make_engine, wanted

from triptych.engine.arithmetic_runner import Fabric
from triptych.engine.events import Failed, Finished
from triptych.errors import FailureReason
from triptych.output import ECTicket

ITEM = item_of("cat", 5, 10)
PROMPT = [100 + place for place in range(30)]
NUM_TOKENS = 40


def published(fabric: Fabric) -> ECTicket:
    e = make_engine("E", fabric=fabric)
    e.encode("e", ITEM)
    e.run()
    ticket = e.encoded["e"].ticket
    assert ticket is not None
    return ticket


def never(_: Engine, __: ECTicket) -> None:
    """Nobody publishes it."""


def from_nobody(p: Engine, ticket: ECTicket) -> None:
    p.core.announce(msgspec.structs.replace(ticket, data=msgspec.structs.replace(ticket.data, producer="nobody")))


def of_other_generations(p: Engine, ticket: ECTicket) -> None:
    generations = tuple(each + 1 for each in ticket.data.generations)
    p.core.announce(msgspec.structs.replace(ticket, data=msgspec.structs.replace(ticket.data, generations=generations)))


def of_other_rows(p: Engine, ticket: ECTicket) -> None:
    p.core.announce(msgspec.structs.replace(ticket, num_rows=ticket.num_rows - 1))


def it_failed(p: Engine, _: ECTicket) -> None:
    p.core.item_failed("lost", ITEM.key, "a broken file", FailureReason.BAD_MEDIA)


@pytest.mark.parametrize("happens", [never, from_nobody, of_other_generations, of_other_rows, it_failed])
def test_streams_beside_a_request_whose_item_never_comes_get_a_token_in_every_step(
    happens: Callable[[Engine, ECTicket], None],
) -> None:
    fabric = Fabric()
    ticket = published(fabric)
    p = make_engine("PD", fabric=fabric)
    p.add("beside", PROMPT, n=NUM_TOKENS)
    p.step()
    p.add("lost", PROMPT, (ITEM,))
    p.step()
    happens(p, ticket)
    for _ in range(NUM_TOKENS - 2):
        before = len(p.tokens["beside"])
        p.step()
        assert len(p.tokens["beside"]) == before + 1
    assert isinstance(p.ends["beside"], Finished)
    assert p.tokens["beside"] == wanted(PROMPT, n=NUM_TOKENS)
    p.clock.now += 11.0  # past the wait's deadline, if that is what it takes
    p.run()
    assert isinstance(p.ends["lost"], Failed)
    assert p.ends["lost"].status in (400, 503)
    p.add("later", PROMPT)
    p.run()
    assert p.tokens["later"] == wanted(PROMPT)
    assert_nothing_is_held(p)


def test_a_request_for_the_item_that_another_waited_for_in_vain_is_served_when_it_is_published() -> None:
    fabric = Fabric()
    p = make_engine("PD", fabric=fabric)
    p.add("lost", PROMPT, (ITEM,))
    p.run()
    p.clock.now += 11.0
    p.run()
    assert isinstance(p.ends["lost"], Failed)
    p.add("again", PROMPT, (ITEM,))
    p.core.announce(published(fabric))
    p.run()
    assert p.tokens["again"] == wanted(PROMPT, (ITEM,))
    assert_nothing_is_held(p)
