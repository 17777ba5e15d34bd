"""Sampling is a pure function of logits, parameters, seed and position, and draws from the distribution it says."""

import math
from random import Random
from typing import Any

import pytest
import torch
from sampling_rig import random_sampling, state_of
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from triptych.output import TokenLogprob
from triptych.runner.request_state import RequestState
from triptych.runner.sampler import Sampler, uniforms

VOCAB = 12
LOGITS = torch.linspace(-2.0, 2.0, VOCAB).roll(5)


def request(num_tokens: int = 3, num_prompt_tokens: int = 3, **sampling: Any) -> RequestState:
    return state_of(range(num_prompt_tokens), range(num_prompt_tokens, num_tokens), **sampling)


def sample(logits: torch.Tensor, requests: list[RequestState]) -> list[TokenLogprob]:
    tokens = Sampler().sample(logits, requests)
    given = [token for token in tokens if not isinstance(token, str)]
    assert len(given) == len(tokens)
    return given


def draw(count: int, logits: torch.Tensor = LOGITS, **sampling: Any) -> list[int]:
    """One token for each of `count` seeds, in one batch."""
    requests = [request(seed=seed, **sampling) for seed in range(count)]
    return [token.token_id for token in sample(logits.repeat(count, 1), requests)]


def chi_square(tokens: list[int], probabilities: torch.Tensor) -> float:
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double()
    expected = probabilities.double() * len(tokens)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    return float((((counts - expected) ** 2)[possible] / expected[possible]).sum())


def reference(temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The distribution, computed token by token from its definition."""
    weights = {token: math.exp(float(LOGITS[token]) / temperature) for token in range(VOCAB)}
    kept = sorted(weights, key=lambda token: -weights[token])[: top_k or VOCAB]
    total = sum(weights[token] for token in kept)
    nucleus: list[int] = []
    for token in kept:
        if sum(weights[each] for each in nucleus) / total >= top_p:
            break
        nucleus.append(token)
    mass = sum(weights[token] for token in nucleus)
    return torch.tensor([weights[token] / mass if token in nucleus else 0.0 for token in range(VOCAB)])


# The 99.9 % quantile of chi-square with 11 degrees of freedom is 31.3; fewer degrees have a lower one.
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 4, 1.0), (1.3, 0, 0.7), (0.8, 6, 0.8)]
)
def test_draws_follow_the_distribution_that_temperature_top_k_and_top_p_define(
    temperature: float, top_k: int, top_p: float
) -> None:
    tokens = draw(4000, temperature=temperature, top_k=top_k, top_p=top_p)
    assert chi_square(tokens, reference(temperature, top_k, top_p)) < 31.3


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"), [(0.05, 0, 1.0), (0.4, 0, 1.0), (1.0, 0, 1.0), (0.1, 5, 1.0), (0.1, 0, 0.8), (0.2, 6, 0.9)]
)
def test_draws_with_min_p_follow_the_warpers_of_transformers_in_vllms_order(min_p: float, top_k: int, top_p: float) -> None:
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(0.9), MinPLogitsWarper(min_p)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)]
    ids: Any = torch.tensor([[0]])
    scores: Any = LOGITS.unsqueeze(0)
    for warper in warpers:
        scores = warper(ids, scores)
    tokens = draw(4000, temperature=0.9, min_p=min_p, top_k=top_k, top_p=top_p)
    assert chi_square(tokens, torch.softmax(scores[0], dim=-1)) < 31.3


def test_draws_of_one_seed_over_many_positions_follow_the_distribution() -> None:
    requests = [request(num_tokens=3 + n, seed=7) for n in range(4000)]
    tokens = [token.token_id for token in sample(LOGITS.repeat(4000, 1), requests)]
    assert chi_square(tokens, reference(1.0, 0, 1.0)) < 31.3


def test_uniforms_are_those_of_splitmix64() -> None:
    # The published reference: seed 0's stream begins with these outputs; mix(0) is 0, so position p is its output p.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    expected = [(value >> 11) * 2.0**-53 for value in published]
    assert uniforms([0, 0, 0], [0, 1, 2]).tolist() == expected


def test_seeds_of_any_size_and_sign_give_numbers_between_0_and_1() -> None:
    numbers = uniforms([-1, 2**64 - 1, 2**70, 2**63], [0, 0, 2**31, 5])
    assert numbers[0] == numbers[1]
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_a_token_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.2, "top_p": 0.6},
        {"temperature": 0.9, "top_k": 5, "top_p": 0.5, "logprobs": 2},
    ]
    requests = [request(seed=seed, **kind) for seed in range(20) for kind in kinds]
    logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(3))
    together = sample(logits, requests)
    alone = [sample(logits[row : row + 1], [requests[row]])[0] for row in range(len(requests))]
    assert [token.token_id for token in together] == [token.token_id for token in alone]


@pytest.mark.parametrize("seed", range(6))
def test_in_a_mix_of_all_parameters_each_request_gets_the_tokens_that_it_gets_alone(seed: int) -> None:
    """Over many steps, in which penalties grow and requests come and go."""
    rng, vocab_size, num_steps = Random(seed), 700, 12
    generator = torch.Generator().manual_seed(seed)
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randrange(1, 40))] for _ in range(16)]
    kinds = [random_sampling(rng, vocab_size) for _ in prompts]
    # [steps, requests, vocabulary]: few tokens are likely, so that penalties have something to do
    logits = torch.randn(num_steps, 16, vocab_size, generator=generator) * 4
    together = [state_of(prompt, **kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    alone = [state_of(prompt, **kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    for step in range(num_steps):
        rows = sorted(rng.sample(range(16), rng.randrange(1, 17)))
        tokens = sample(logits[step, rows], [together[row] for row in rows])
        for row, token in zip(rows, tokens, strict=True):
            assert [token] == sample(logits[step, row : row + 1], [alone[row]])
            together[row].append_token(token.token_id)
            answer = together[row].token_ids(len(prompts[row]), together[row].num_tokens).tolist()
            alone[row] = state_of(prompts[row], answer, **kinds[row])  # rebuilt, as after a preemption or on another worker


def test_the_same_seed_and_position_give_the_same_token_and_others_vary() -> None:
    assert draw(50, temperature=1.0) == draw(50, temperature=1.0)
    assert len(set(draw(50, temperature=1.0))) > 3


def test_greedy_takes_the_most_probable_token_and_the_lowest_id_of_equals() -> None:
    tied = torch.zeros(1, VOCAB)
    tied[0, [4, 9]] = 1.0
    assert sample(tied, [request(temperature=0.0)])[0].token_id == 4


def test_a_tiny_temperature_is_greedy() -> None:
    assert set(draw(50, temperature=1e-30)) == {int(LOGITS.argmax())}


def test_a_tiny_top_p_keeps_the_most_probable_token() -> None:
    assert set(draw(50, temperature=2.0, top_p=1e-9)) == {int(LOGITS.argmax())}


def test_stop_tokens_are_not_sampled_before_min_tokens_and_are_from_then_on() -> None:
    best = int(LOGITS.argmax())
    second = int(LOGITS.topk(2).indices[1])
    early = request(num_tokens=4, temperature=0.0, min_tokens=2, stop_token_ids=(best,))
    late = request(num_tokens=5, temperature=0.0, min_tokens=2, stop_token_ids=(best,))
    tokens = sample(LOGITS.repeat(2, 1), [early, late])
    assert [token.token_id for token in tokens] == [second, best]


def test_logprobs_are_of_the_models_own_distribution_whatever_is_masked_or_scaled() -> None:
    best = int(LOGITS.argmax())
    settings: dict[str, Any] = {"temperature": 0.3, "top_k": 2, "min_tokens": 5, "stop_token_ids": (best,), "logprobs": 3}
    settings |= {"logit_bias": {4: 3.0}, "repetition_penalty": 1.5}
    [token] = sample(LOGITS.unsqueeze(0), [request(**settings)])
    normaliser = math.log(sum(math.exp(float(value)) for value in LOGITS))
    assert token.token_id != best
    assert token.rank == 2
    assert token.logprob == pytest.approx(float(LOGITS[token.token_id]) - normaliser, abs=1e-5)
    assert [token_id for token_id, _ in token.top] == LOGITS.topk(3).indices.tolist()
    assert [value for _, value in token.top] == pytest.approx(
        [float(value) - normaliser for value in LOGITS.topk(3).values], abs=1e-5
    )


def test_the_number_of_alternatives_is_each_requests_own() -> None:
    tokens = sample(LOGITS.repeat(3, 1), [request(logprobs=0), request(logprobs=2), request()])
    assert [len(token.top) for token in tokens] == [0, 2, 0]
    assert tokens[0].logprob < 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_give_no_token_and_leave_the_neighbours_alone(bad: float, temperature: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = bad
    requests = [request(seed=seed, temperature=temperature, logprobs=1) for seed in range(3)]
    tokens = Sampler().sample(logits, requests)
    alone = [Sampler().sample(logits[row : row + 1], [requests[row]])[0] for row in (0, 2)]
    assert tokens[1] == "the model gave NaN or infinity for token 3 of the request."
    assert isinstance(tokens[0], TokenLogprob)
    assert [tokens[0], tokens[2]] == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_leaves_itself_no_token_gets_none_and_its_neighbours_do(temperature: float) -> None:
    everything = tuple(range(VOCAB))
    impossible = request(temperature=temperature, min_tokens=1, stop_token_ids=everything)
    limitless = request(temperature=temperature, repetition_penalty=1e-44)
    requests = [request(temperature=temperature), impossible, limitless, request(temperature=temperature)]
    tokens = Sampler().sample(LOGITS.repeat(4, 1), requests)
    sentence = "what the request bans, biases and penalises leaves nothing to choose as its token 3."
    assert tokens[1:3] == [sentence] * 2
    assert [tokens[0]] == [tokens[3]] == sample(LOGITS.unsqueeze(0), [request(temperature=temperature)])


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = LOGITS.clone()
    logits[[0, 5, VOCAB - 1]] = float("-inf")
    assert not {0, 5, VOCAB - 1} & set(draw(300, logits, temperature=5.0))


def test_half_precision_logits_are_sampled_in_full_precision() -> None:
    rows = LOGITS.to(torch.bfloat16)
    assert draw(100, rows, temperature=1.0) == draw(100, rows.float(), temperature=1.0)
