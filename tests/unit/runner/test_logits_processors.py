"""Biases, bans and penalties against `transformers`' processors, and where it has none, against the formula of OpenAI's documentation."""

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from sampling_rig import random_sampling, state_of
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from triptych.runner.logits_processors import process_logits
from triptych.runner.request_state import RequestState

VOCAB = 200
IDS: Any = torch.tensor([[1]])  # of `transformers`' own annotations, few hold


def bias_processor(bias: dict[int, float]) -> Any:
    sequences: Any = {(token_id,): value for token_id, value in bias.items()}
    return SequenceBiasLogitsProcessor(sequences)


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def tokens_of(seed: int, count: int) -> list[int]:
    """Of a hundred ids, so that many come again, and many never."""
    rng = Random(seed)
    return [rng.randrange(100) for _ in range(count)]


def ids_of(request: RequestState) -> Any:
    return torch.from_numpy(request.token_ids(0, request.num_tokens)).unsqueeze(0)


def answer_counts(request: RequestState) -> torch.Tensor:
    counts = Counter(request.token_ids(request.num_prompt_tokens, request.num_tokens).tolist())
    return torch.tensor([float(counts[token_id]) for token_id in range(VOCAB)])


def expected(logits: torch.Tensor, request: RequestState) -> torch.Tensor:
    """[vocabulary]: bias, ban, penalties, in vLLM's order."""
    sampling, ids, scores = request.sampling, ids_of(request), logits.unsqueeze(0).clone()
    if sampling.logit_bias:
        scores = bias_processor(sampling.logit_bias)(ids, scores)
    ban = MinNewTokensLengthLogitsProcessor(request.num_prompt_tokens, sampling.min_tokens, list(sampling.stop_token_ids))
    scores = ban(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    counts = answer_counts(request)
    return scores[0] - counts * sampling.frequency_penalty - (counts > 0).float() * sampling.presence_penalty


@pytest.mark.parametrize("penalty", [0.6, 1.0001, 1.3, 20.0])
def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_answer(penalty: float) -> None:
    logits, request = logits_of(1), state_of(tokens_of(1, 60), tokens_of(2, 20), repetition_penalty=penalty)
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids_of(request), logits.clone())
    assert not wanted.equal(logits)
    torch.testing.assert_close(process_logits(logits, [request]), wanted)


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-2.0, 0.0), (0.0, -1.0), (0.4, 2.0)])
def test_presence_and_frequency_penalties_are_subtracted_for_the_answers_tokens_alone(presence: float, frequency: float) -> None:
    logits = logits_of(1)
    request = state_of(tokens_of(1, 60), tokens_of(2, 90), presence_penalty=presence, frequency_penalty=frequency)
    counts = answer_counts(request)
    assert counts.max() > 2
    wanted = logits - counts * frequency - (counts > 0).float() * presence
    torch.testing.assert_close(process_logits(logits, [request]), wanted)


def test_biases_are_added_to_their_tokens() -> None:
    logits, bias = logits_of(1), {0: 5.0, 17: -100.0, VOCAB - 1: 0.25}
    wanted = bias_processor(bias)(IDS, logits)
    assert process_logits(logits, [state_of([1], logit_bias=bias)]).equal(wanted)


@pytest.mark.parametrize("seed", range(8))
def test_any_mix_in_any_batch_is_what_the_processors_give_one_after_another(seed: int) -> None:
    rng = Random(seed)
    requests = [
        state_of(
            tokens_of(seed + row, rng.randrange(1, 60)), tokens_of(seed - row, rng.randrange(40)), **random_sampling(rng, VOCAB)
        )
        for row in range(12)
    ]
    logits = logits_of(12, seed)
    before = logits.clone()
    processed = process_logits(logits, requests)
    assert logits.equal(before), "the model's own logits are wanted afterwards"
    for row, request in enumerate(requests):
        torch.testing.assert_close(processed[row], expected(logits[row], request))
        assert processed[row].equal(process_logits(logits[row : row + 1], [request])[0]), "it depends on its neighbours"


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "logprobs": 3}, {"min_tokens": 2}],
    ids=str,
)
def test_a_batch_in_which_nobody_asks_for_a_change_is_not_even_copied(sampling: dict[str, Any]) -> None:
    logits = logits_of(2)
    requests = [state_of([1, 2], [3, 4], stop_token_ids=(5,), **sampling) for _ in range(2)]
    assert process_logits(logits, requests) is logits
