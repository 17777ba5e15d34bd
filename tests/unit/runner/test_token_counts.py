from collections import Counter
from random import Random

import pytest
from sampling_rig import state_of

PROMPT = [5, 9, 5, 30, 2]


def counted(prompt: list[int], answer: list[int], **penalties: float) -> dict[int, int]:
    counts = state_of(prompt, answer, **penalties).token_counts
    return dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True))


def test_a_request_without_penalties_counts_nothing() -> None:
    request = state_of(PROMPT, [1, 1], temperature=1.0, logit_bias={3: 1.0})
    request.append_token(4)
    assert not request.token_counts.is_active
    assert len(request.token_counts.token_ids) == len(request.token_counts.counts) == 0


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_of_the_answer_count_the_answer(penalty: str) -> None:
    assert counted(PROMPT, [7, 5, 7], **{penalty: 0.5}) == {7: 2, 5: 1}


def test_a_repetition_penalty_is_about_the_prompt_too_which_counts_as_never_answered() -> None:
    assert counted(PROMPT, [7, 5, 7], repetition_penalty=1.2) == {5: 1, 9: 0, 30: 0, 2: 0, 7: 2}
    assert counted(PROMPT, [], repetition_penalty=1.2) == {5: 0, 9: 0, 30: 0, 2: 0}


@pytest.mark.parametrize("penalties", [{"repetition_penalty": 0.8}, {"frequency_penalty": 1.0}], ids=str)
def test_counts_that_grew_token_by_token_are_those_counted_anew_after_a_move(penalties: dict[str, float]) -> None:
    rng = Random(1)
    answer = [rng.randrange(400) for _ in range(900)]
    request = state_of(PROMPT, answer[:3], **penalties)
    for token_id in answer[3:]:
        request.append_token(token_id)
    grown = dict(zip(request.token_counts.token_ids.tolist(), request.token_counts.counts.tolist(), strict=True))
    expected = {**dict.fromkeys(PROMPT if "repetition_penalty" in penalties else (), 0), **Counter(answer)}
    assert grown == expected == counted(PROMPT, answer, **penalties)
