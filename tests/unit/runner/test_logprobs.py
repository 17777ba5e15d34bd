import math

import pytest
import torch

from triptych.runner import logprobs
from triptych.runner.logprobs import prompt_logprobs, token_logprobs

LOGITS = torch.randn(7, 50, generator=torch.Generator().manual_seed(4)) * 3
TOKENS = [int(LOGITS[row].sort(descending=True).indices[5 * row]) for row in range(7)]  # ranks 1, 6, 11 ...


def test_a_token_has_its_logprob_its_rank_and_the_alternatives_asked_for() -> None:
    normalisers = [math.log(sum(math.exp(value) for value in row)) for row in LOGITS.tolist()]
    for row, token in enumerate(token_logprobs(LOGITS, TOKENS, [0, 1, 2, 3, 50, 99, 0])):
        in_order = sorted(range(50), key=lambda token_id: -float(LOGITS[row, token_id]))
        assert token.token_id == TOKENS[row]
        assert token.rank == 5 * row + 1
        assert token.logprob == pytest.approx(float(LOGITS[row, TOKENS[row]]) - normalisers[row], abs=1e-5)
        assert [token_id for token_id, _ in token.top] == in_order[: (0, 1, 2, 3, 50, 50, 0)[row]]
        values = [float(LOGITS[row, token_id]) - normalisers[row] for token_id, _ in token.top]
        assert [value for _, value in token.top] == pytest.approx(values, abs=1e-5)


def test_of_equally_probable_tokens_each_has_the_better_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert [token_logprobs(logits, [token_id], [0])[0].rank for token_id in range(4)] == [4, 1, 1, 3]


def test_an_impossible_token_has_a_logprob_that_json_can_say() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    [token] = token_logprobs(logits, [1], [3])
    assert token.logprob == token.top[-1][1] == -9999.0
    assert token.rank == 3


@pytest.mark.parametrize("max_numbers", [1, 50, 149, 150, 2**24])
def test_a_prompts_logprobs_do_not_depend_on_the_slices_and_no_slice_is_larger_than_it_may(
    max_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "MAX_SLICE_NUMBERS", max_numbers)
    sizes: list[int] = []

    def to_logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(hidden.numel())
        return hidden * 2

    tokens = prompt_logprobs(LOGITS / 2, TOKENS, 2, to_logits, vocab_size=50)
    assert tokens == tuple(token_logprobs(LOGITS, TOKENS, [2] * 7))
    assert max(sizes) <= max(max_numbers, 50)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_prompt_with_a_position_that_gives_no_numbers_has_no_logprobs(bad: float) -> None:
    hidden = LOGITS.clone()
    hidden[3, 8] = bad
    assert prompt_logprobs(hidden, TOKENS, 2, lambda rows: rows, vocab_size=50) is None
