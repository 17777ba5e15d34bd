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
