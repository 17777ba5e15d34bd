"""`ChatTemplate`: a model folder's jinja template, in a sandbox, with the names that transformers gives it.

The names and their behaviour are those of `transformers.utils.chat_template_utils`, whose import would bring torch along.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triptych.errors import ConfigError, RequestError
from triptych.models.layout.registry import read_json
from triptych.models.tokenizer import TOKEN_NAMES


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """Raises `ConfigError` for a folder without a (valid) template."""

    def __init__(self, model_dir: Path, tokenizer_config: Mapping[str, Any]) -> None:
        self.source = _read_source(model_dir, tokenizer_config)
        self._names = {name: _token_text(tokenizer_config[name]) for name in TOKEN_NAMES if tokenizer_config.get(name)}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        try:
            self._template = environment.from_string(
                self.source, globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now}
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template of '{model_dir}' cannot be read: {error}.") from None

    @property
    def takes_strings(self) -> bool:
        """Whether it distinguishes contents that are strings from lists of parts; where not, all are made lists."""
        return "is string" in self.source or "is not iterable" in self.source or "is not mapping" in self.source

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """With the generation prompt. Raises `RequestError` when the template refuses the messages."""
        try:
            return self._template.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._names)
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error.message}.", param="messages") from None


def _read_source(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> str:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source: Any = tokenizer_config.get("chat_template")
    path = model_dir / "chat_template.json"
    if path.is_file():
        source = read_json(path).get("chat_template")
    if isinstance(source, list):  # several by name: older checkpoints
        source = next((each.get("template") for each in source if each.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ConfigError(f"'{model_dir}' has no chat template; put one into chat_template.jinja.")
    return source


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, Mapping) else str(token)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike jinja's own, it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
