"""Pictures of many requests in one call of the tower: as many calls as the row budget asks for, and each picture as if it were alone."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES, noise, save_tiny_model
from torch import Tensor
from tower_rig import TowerCalls
from worker_rig import NUM_ROWS, config_of, encode_request, key_of, picture, running

from triptych import LLM
from triptych.config import MediaConfig
from triptych.demo import CHECKPOINT
from triptych.engine.events import Encoded
from triptych.errors import UnavailableError
from triptych.llm import ChatOutput
from triptych.media.header import read_header
from triptych.models.inspect import resolve_model
from triptych.models.layout.registry import get_layout_adapter
from triptych.models.loader import Parts, load_model
from triptych.worker.worker import Worker

SIZES = [(60, 60), (120, 30), (31, 150), (200, 200), (56, 56), (300, 90), (64, 128), (61, 61)]  # (width, height)
FILES = [noise(seed, size) for seed, size in enumerate(SIZES)]
NAMES = ("demo", *FAMILIES)


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return CHECKPOINT
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_model(request.param, folder, [])
    return folder


# --- rows ---


class Tower:
    """The tower of the model in `folder`, and the eight pictures prepared for it: the first, fourth and seventh as if alone in
    their requests, the others as some of several."""

    def __init__(self, folder: Path) -> None:
        loaded = load_model(resolve_model(folder), Parts.TOWER)
        self.model, self.adapter = loaded.model, loaded.adapter
        layout, limits = get_layout_adapter(folder), MediaConfig()
        self.layouts = [layout.layout(read_header(data, limits), 1 + index % 3) for index, data in enumerate(FILES)]
        self.inputs = [
            self.adapter.preprocess(data, "image", each.grid, each.num_rows, limits)
            for data, each in zip(FILES, self.layouts, strict=True)
        ]

    @torch.inference_mode()
    def encode(self, places: Sequence[int]) -> list[Tensor]:
        batch = self.adapter.collate([self.inputs[place] for place in places])
        return self.adapter.encode(self.model, "image", batch, [self.layouts[place].num_rows for place in places])


def test_a_pictures_rows_in_any_batch_are_those_of_its_solo_run(folder: Path) -> None:
    """Other sizes, counts and orders beside it, and itself again."""
    tower = Tower(folder)
    alone = [tower.encode([place])[0] for place in range(len(FILES))]
    assert len({tuple(rows.flatten()[:8].tolist()) for rows in alone}) == len(FILES), "rows that are all alike prove nothing"
    rng = Random(3)
    batches = [
        list(range(8)),
        list(reversed(range(8))),
        [2, 2],
        *(rng.choices(range(8), k=rng.randrange(2, 9)) for _ in range(12)),
    ]
    for batch in batches:
        for place, rows in zip(batch, tower.encode(batch), strict=True):
            error = (rows - alone[place]).abs().max() / alone[place].abs().max()
            assert error <= 1e-5, (place, batch)


def test_a_picture_of_nan_spoils_none_of_those_beside_it(folder: Path) -> None:
    tower = Tower(folder)
    alone = [tower.encode([place])[0] for place in range(len(FILES))]
    for bad in (0, 3, 7):
        good = tower.inputs[bad]
        tower.inputs[bad] = {**good, "pixel_values": torch.full_like(good["pixel_values"], float("nan"))}
        found = tower.encode(range(8))
        tower.inputs[bad] = good
        assert not found[bad].isfinite().all()
        for place in set(range(8)) - {bad}:
            torch.testing.assert_close(found[place], alone[place], rtol=1e-5, atol=1e-6)


# --- through an engine ---


def ask(*places: int) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": FILES[place]} for place in places]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]


GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}


def worker_of(llm: LLM) -> Worker:
    (worker,) = llm._serving.pool.workers  # pyright: ignore[reportPrivateUsage]
    assert isinstance(worker.client, Worker)
    return worker.client


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, num_threads=1, kv_cache_mib=32, device="cpu") as llm:
        yield llm


def assert_same(found: Sequence[ChatOutput], wanted: Sequence[ChatOutput]) -> None:
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert [each.logprob for each in one.logprobs] == pytest.approx([each.logprob for each in other.logprobs], abs=1e-4)


def test_eight_pictures_that_are_ready_are_one_call_and_the_answers_are_those_of_one_by_one(llm: LLM) -> None:
    """A salt of its own has each picture encoded again."""
    calls = TowerCalls(worker_of(llm))
    conversations = [ask(place) for place in range(8)]
    wanted = [llm.chat(each, cache_salt="one by one", **GREEDY) for each in conversations]
    assert [len(rows) for rows in calls.rows] == [1] * 8
    one_by_one = [rows[0] for rows in calls.rows]
    calls.expect(8)
    together = llm.chat(conversations, cache_salt="together", **GREEDY)
    assert [sorted(rows) for rows in calls.rows] == [sorted(one_by_one)]
    assert_same(together, wanted)


def test_pictures_of_requests_with_one_and_with_three_share_a_call(llm: LLM) -> None:
    """In LLaVA-OneVision the first and the third are tiled, and those of the other two are not."""
    calls = TowerCalls(worker_of(llm))
    conversations = [ask(3), ask(0, 4, 5), ask(6), ask(1, 2, 7)]
    wanted = [llm.chat(each, cache_salt="mixed, one by one", **GREEDY) for each in conversations]
    calls.expect(8)
    together = llm.chat(conversations, cache_salt="mixed, together", **GREEDY)
    assert [len(rows) for rows in calls.rows] == [8]
    assert_same(together, wanted)


def test_one_that_the_tower_refuses_ends_its_own_request_and_the_seven_beside_it_are_right(llm: LLM) -> None:
    calls = TowerCalls(worker_of(llm))
    conversations = [ask(place) for place in range(8)]
    wanted = [llm.chat(each, cache_salt="before", **GREEDY) for each in conversations]
    calls.expect(8, refused=FILES[5])

    def answer(place: int) -> ChatOutput | None:
        try:
            return llm.chat(conversations[place], cache_salt="refused", **GREEDY)
        except UnavailableError as error:
            assert error.type == "ec_unavailable"
            return None

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(answer, range(8)))
    assert found.pop(5) is None
    assert calls.rows[0] == [], "all eight were tried together first"
    assert_same([each for each in found if each is not None], [*wanted[:5], *wanted[6:]])


@pytest.mark.parametrize("max_rows", [1, 40, 60])
def test_a_call_keeps_to_the_row_budget_unless_one_picture_is_over_it_alone(max_rows: int) -> None:
    with LLM("demo", num_threads=1, kv_cache_mib=32, device="cpu", max_encoder_rows=max_rows) as llm:
        calls = TowerCalls(worker_of(llm))
        calls.expect(8)
        llm.chat([ask(place) for place in range(8)], max_tokens=1)
    assert sum(map(len, calls.rows)) == 8
    assert all(len(rows) == 1 or sum(rows) <= max_rows for rows in calls.rows)
    # Two calls one after another hold more than the budget together, or the second's first picture would have gone with the first.
    assert len(calls.rows) < 2 * sum(map(sum, calls.rows)) / max_rows + 1


async def test_an_encode_worker_takes_the_pictures_of_eight_calls_at_once() -> None:
    seeds = range(8)
    async with running(config_of("E", data_plane="shm")) as (worker,):
        calls = TowerCalls(worker)
        calls.expect(8)
        events = await asyncio.gather(*(worker.encode(encode_request(f"e{seed}", seed), picture(seed)) for seed in seeds))
        assert calls.rows == [[NUM_ROWS] * 8]
        tickets = [event.ticket for event in events if isinstance(event, Encoded) and event.ticket is not None]
        assert sorted(ticket.key for ticket in tickets) == sorted(key_of(seed) for seed in seeds)
        assert len({page for ticket in tickets for page in ticket.data.pages}) == sum(
            len(ticket.data.pages) for ticket in tickets
        )
