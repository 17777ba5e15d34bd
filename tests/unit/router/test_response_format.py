"""What clients write to have an answer in some form, and what is wrong with other shapes."""

import json
from typing import Any

import pytest

from triptych.errors import RequestError
from triptych.router.response_format import to_structured_output
from triptych.sampling_params import StructuredOutput

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


@pytest.mark.parametrize(
    ("response_format", "structured_outputs", "wanted"),
    [
        (None, None, None),
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, None, StructuredOutput("json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True, "description": "d"}}, None,
            StructuredOutput("json_schema", json.dumps(SCHEMA)),
        ),
        (None, {"json": SCHEMA, "regex": None}, StructuredOutput("json_schema", json.dumps(SCHEMA))),
        ({"type": "text"}, {"json": '{"a":1}'}, StructuredOutput("json_schema", '{"a":1}')),
        (None, {"json_object": True}, StructuredOutput("json_object")),
        (None, {"regex": "a+"}, StructuredOutput("regex", "a+")),
        (None, {"choice": ["a", ""]}, StructuredOutput("choice", '["a", ""]')),
        (None, {"grammar": "root ::= x"}, StructuredOutput("grammar", "root ::= x")),
    ],
)  # fmt: skip
def test_both_apis_ways_to_ask_are_understood(
    response_format: Any, structured_outputs: Any, wanted: StructuredOutput | None
) -> None:
    assert to_structured_output(response_format, structured_outputs) == wanted


@pytest.mark.parametrize(
    ("response_format", "structured_outputs", "param", "sentence"),
    [
        ("json", None, "response_format", "must be"),
        ({"type": "xml"}, None, "response_format", "must be"),
        ({"type": "json_schema"}, None, "response_format.json_schema", '"name": a string'),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, None, "response_format.json_schema", '"name": a string'),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}, None, "response_format.json_schema", "object"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strikt": True}}, None,
            "response_format.json_schema.strikt", "did you mean 'strict'",
        ),
        (None, {}, "structured_outputs", "exactly one of json"),
        (None, [], "structured_outputs", "exactly one of json"),
        (None, {"regex": "a", "choice": ["a"]}, "structured_outputs", "exactly one of json"),
        (None, {"regexp": "a"}, "structured_outputs.regexp", "did you mean 'regex'"),
        (None, {"choice": []}, "structured_outputs.choice", "a list of strings"),
        (None, {"choice": ["a", 1]}, "structured_outputs.choice", "a list of strings"),
        (None, {"json_object": False}, "structured_outputs.json_object", "must be true"),
        (None, {"regex": 5}, "structured_outputs.regex", "must be a string"),
        (None, {"regex": "a" * 65_537}, "regex", "at most 65536"),
        ({"type": "json_object"}, {"regex": "a"}, None, "send one of them"),
    ],
)  # fmt: skip
def test_another_shape_is_named_with_what_would_be_right(
    response_format: Any, structured_outputs: Any, param: str | None, sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence) as caught:
        to_structured_output(response_format, structured_outputs)
    assert caught.value.param == param
