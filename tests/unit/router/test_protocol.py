import json
from typing import Any

import pytest

from triptych.errors import RequestError
from triptych.router.protocol import ChatCompletionRequest


def parse(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.parse(json.dumps({"messages": [{"role": "user", "content": "hello"}]} | fields).encode())


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "seed", "top_k", "min_tokens", "n"])
@pytest.mark.parametrize("value", ["1", True, 1.0])
def test_an_integer_is_no_string_no_boolean_and_no_decimal_number(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}: input should be a valid integer") as refused:
        parse(**{name: value})
    assert refused.value.param == name


def test_a_number_may_be_written_as_an_integer() -> None:
    request = parse(temperature=1, top_p=1, max_tokens=5)
    assert (request.temperature, request.top_p, request.max_tokens) == (1.0, 1.0, 5)
