from typing import Any

import pytest

from triptych.errors import RequestError
from triptych.sampling_params import SamplingParams


@pytest.mark.parametrize("top_p", [-0.5, 0.0, 1.5, float("nan")])
def test_top_p_beyond_either_end_is_refused_with_the_whole_range(top_p: float) -> None:
    with pytest.raises(RequestError, match=rf"^top_p is {top_p:g}; it must be greater than 0 and at most 1\.$") as refused:
        SamplingParams(max_tokens=1, top_p=top_p).check()
    assert refused.value.param == "top_p"


@pytest.mark.parametrize("top_p", [1e-9, 1.0, 1])
def test_top_p_within_its_range_is_taken(top_p: float) -> None:
    SamplingParams(max_tokens=1, top_p=top_p).check()


@pytest.mark.parametrize(
    ("parameter", "sentence"),
    [
        ({"min_p": -0.1}, "min_p is -0.1; it must be at least 0 and at most 1"),
        ({"min_p": 1.1}, "min_p is 1.1; it must be at least 0 and at most 1"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; it must be at least -2 and at most 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5; it must be at least -2 and at most 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0; it must be a number greater than 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan; it must be a number greater than 0"),
        ({"logit_bias": {7: 101.0}}, "logit_bias[7] is 101; it must be at least -100 and at most 100"),
        ({"logit_bias": {7: float("nan")}}, "logit_bias[7] is nan; it must be at least -100 and at most 100"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be at least 0 and at most 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; it must be at least 0 and at most 20"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_with_the_range(parameter: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(max_tokens=1, **parameter).check()
    assert refused.value.message == f"{sentence}."
