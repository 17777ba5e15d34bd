"""The form that an answer must have, as clients ask for it: OpenAI's `response_format`, and vLLM's `structured_outputs`.

Shapes are checked here; whether a schema, an expression or a grammar can be used is for the workers to say, which compile it.
"""

import json
from collections.abc import Mapping
from typing import Any

from triptych.errors import RequestError, suggest
from triptych.sampling_params import StructuredOutput

_SCHEMA_FIELDS = ("name", "schema", "strict", "description")
_KINDS = {
    "json": "a JSON schema, as an object or a string",
    "json_object": "true",
    "regex": "a string",
    "choice": "a list of strings, with at least one",
    "grammar": "a string",
}


def to_structured_output(response_format: Any, structured_outputs: Any) -> StructuredOutput | None:
    """None where any text will do. Raises `RequestError` for a shape that is neither API's, and for both at once."""
    by_format, by_outputs = _of_response_format(response_format), _of_structured_outputs(structured_outputs)
    if by_format is not None and by_outputs is not None:
        raise RequestError("response_format and structured_outputs both say what form to answer in; send one of them.")
    structure = by_format or by_outputs
    if structure is not None:
        structure.check()
    return structure


def _of_response_format(value: Any) -> StructuredOutput | None:
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return StructuredOutput("json_object")
        case {"type": "json_schema", "json_schema": {"name": str(), "schema": dict(schema), **rest}}:
            for name in rest:
                if name not in _SCHEMA_FIELDS:
                    where = f"response_format.json_schema.{name}"
                    message = f"there is no field '{where}'; {suggest(name, _SCHEMA_FIELDS, otherwise='leave it out.')}"
                    raise RequestError(message, param=where)
            return StructuredOutput("json_schema", json.dumps(schema))
        case {"type": "json_schema"}:
            message = (
                'response_format of type json_schema needs "json_schema": {"name": a string, "schema": the schema as an object}.'
            )
            raise RequestError(message, param="response_format.json_schema")
        case _:
            message = 'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": ...}.'
            raise RequestError(message, param="response_format")


def _of_structured_outputs(value: Any) -> StructuredOutput | None:
    if value is None:
        return None
    given = {name: each for name, each in value.items() if each is not None} if isinstance(value, Mapping) else {}
    if len(given) != 1:
        message = f"structured_outputs must be an object with exactly one of {', '.join(_KINDS)}."
        raise RequestError(message, param="structured_outputs")
    match given:
        case {"json": dict(schema)}:
            return StructuredOutput("json_schema", json.dumps(schema))
        case {"json": str(schema)}:
            return StructuredOutput("json_schema", schema)
        case {"json_object": True}:
            return StructuredOutput("json_object")
        case {"regex": str(text)}:
            return StructuredOutput("regex", text)
        case {"grammar": str(text)}:
            return StructuredOutput("grammar", text)
        case {"choice": list(choices)} if choices and all(isinstance(choice, str) for choice in choices):
            return StructuredOutput("choice", json.dumps(choices))
        case _:
            raise _wrong_shape(*given)


def _wrong_shape(name: Any) -> RequestError:
    where = f"structured_outputs.{name}"
    wanted = _KINDS.get(name)
    if wanted is None:
        return RequestError(f"there is no field '{where}'; {suggest(str(name), _KINDS)}", param=where)
    return RequestError(f"{where} must be {wanted}.", param=where)
