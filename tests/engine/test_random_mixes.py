"""The same greedy tokens as `transformers`' `generate` for 200 random mixes of requests that begin alike, in caches that are too small for them.

A mix is served by one cluster of a random layout, with random block size, chunk, places and cache sizes. Its requests come at random moments with
random priorities. Each cluster serves two mixes: the second meets what the first has left in the caches.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest
from cluster import Cluster, job_of, running_cluster
from oracle import NUM_CONVERSATIONS, Oracle, Wanted, conversations

NUM_CLUSTERS, MIXES_PER_CLUSTER = 100, 2
LAYOUTS = ("EPD1", "E1PD1", "E1P1D1")
MAX_PROMPT = 130  # tokens: longer prompts, whose time goes into the model, are in test_equality.py
ENCODER_CACHE_ROWS = (80, 160)  # the largest picture has 75


@pytest.fixture(scope="session")
def related(oracle: Oracle) -> list[list[Wanted]]:
    """By conversation."""
    return [oracle.answer_conversation(each) for each in conversations()]


@pytest.fixture(scope="session")
def seen() -> Counter[str]:
    """What all clusters came to."""
    return Counter()


@dataclass(frozen=True)
class Arrival:
    wanted: Wanted
    after: int  # tokens that must have been answered by then, to anybody
    priority: int


def random_mix(rng: Random, related: list[list[Wanted]], mixed: list[Wanted]) -> list[Arrival]:
    """Most of two conversations. A request comes no later than all before it have been answered, so that each comes."""
    pool = [wanted for conversation in rng.sample(related, 2) for wanted in conversation]
    pool += rng.sample([each for each in mixed if len(each.prompt) <= MAX_PROMPT], 2)
    chosen = rng.choices(pool, k=rng.randrange(2, 9))
    arrivals: list[Arrival] = []
    for index, wanted in enumerate(chosen):
        answered = sum(len(each.tokens) for each in chosen[:index])
        arrivals.append(Arrival(wanted, int(answered * max(0.0, rng.uniform(-0.5, 1.0))), rng.choice((-1, 0, 0, 1))))
    return arrivals


def tokens_at_most(wanted: Wanted) -> int:
    return len(wanted.prompt) + wanted.request.max_tokens


class Crowd:
    """Asks for a mix and compares the answers."""

    def __init__(self, cluster: Cluster, stop_ids: tuple[int, ...]) -> None:
        self._cluster = cluster
        self._stop_ids = stop_ids
        self._num_answered = 0
        self._news = asyncio.Condition()

    async def ask_all(self, name: str, mix: list[Arrival]) -> None:
        self._num_answered = 0
        await asyncio.gather(*(self._ask(f"{name}-{index}", arrival) for index, arrival in enumerate(mix)))

    async def _ask(self, name: str, arrival: Arrival) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self._num_answered >= arrival.after)
        job = replace(job_of(name, arrival.wanted, self._stop_ids), priority=arrival.priority)
        answer = await self._cluster.ask(job)
        assert answer.tokens == arrival.wanted.tokens, name
        assert answer.logprobs == pytest.approx(arrival.wanted.logprobs, abs=1e-3), name
        async with self._news:
            self._num_answered += len(answer.tokens)
            self._news.notify_all()


@pytest.mark.parametrize("seed", range(NUM_CLUSTERS))
async def test_a_random_mix_in_a_small_cluster_gets_the_tokens_of_generate(
    seed: int, oracle: Oracle, wanted: list[Wanted], related: list[list[Wanted]], seen: Counter[str]
):
    rng = Random(seed)
    mixes = [random_mix(rng, related, wanted) for _ in range(MIXES_PER_CLUSTER)]
    block_size = rng.choice((4, 16))
    longest = max(tokens_at_most(arrival.wanted) for mix in mixes for arrival in mix)
    async with running_cluster(
        LAYOUTS[seed % len(LAYOUTS)],
        block_size=block_size,
        num_kv_blocks=int(rng.uniform(1.0, 1.6) * longest) // block_size + 1,
        chunk=rng.choice((16, 48, 256)),
        max_num_seqs=rng.choice((3, 16)),
        encoder_cache_rows=rng.choice(ENCODER_CACHE_ROWS),
    ) as cluster:
        crowd = Crowd(cluster, oracle.stop_ids)
        for number, mix in enumerate(mixes):
            await crowd.ask_all(f"m{number}", mix)
        await cluster.assert_nothing_is_held()
        seen["clusters"] += 1
        for worker in cluster.workers:
            for name in ("prefix_cache_hits", "preemptions"):
                count = worker.counters()[name]
                assert isinstance(count, int)
                seen[name] += count


def test_the_mixes_have_shared_prefixes_and_preempted(seen: Counter[str]):
    if seen["clusters"] < NUM_CLUSTERS:
        pytest.skip("not all of them ran")
    assert seen["prefix_cache_hits"] > 10_000, "of about 100,000 tokens"
    assert seen["preemptions"] > 20


def test_the_pool_has_what_a_prefix_cache_may_confuse(related: list[list[Wanted]], oracle: Oracle):
    assert len(related) == NUM_CONVERSATIONS
    num_beginnings = Counter(wanted.prompt[:8] for conversation in related for wanted in conversation)
    assert len(num_beginnings) <= 3, "system texts are shared between conversations"
    for first, same_picture, other_picture, text_only, second_turn in related:
        assert first.request.pictures == same_picture.request.pictures == second_turn.request.pictures
        assert first.prompt == other_picture.prompt and first.request.pictures != other_picture.request.pictures
        assert not text_only.grids
        assert second_turn.prompt[: len(first.prompt)] == first.prompt
        assert list(second_turn.prompt[len(first.prompt) :][: len(first.tokens)]) == first.tokens, "its first answer is in it"
    answers = [(first.tokens, other.tokens) for first, _, other, *_ in related]
    assert sum(one != other for one, other in answers) >= NUM_CONVERSATIONS // 2, "another picture changes the answer"
