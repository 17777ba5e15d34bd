"""Templates: the names that transformers gives them, the sandbox, and folders without one."""

import json
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from triptych.errors import ConfigError, RequestError
from triptych.router.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "be <brief> & 'kind'"},
    {"role": "user", "content": "hé 漢字"},
    {"role": "assistant", "content": "yes"},
]
TEMPLATES = {
    "tojson": "{% for m in messages %}{{ m | tojson }}\n{{ m | tojson(indent=2) }}{% endfor %}",
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}",
    "loopcontrols": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "tokens": "{{ bos_token }}{% if add_generation_prompt %}go{% endif %}{{ tools is none }}",
    "macros": "{% macro say(x) %}<{{ x | trim }}>{% endmacro %}{{ say(messages[1].content) }}{{ dict(a=1).a }}",
}


def make(folder: Path, source: str) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return ChatTemplate(folder, {"bos_token": {"content": "<s>"}})


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, tmp_path: Path) -> None:
    (wanted,), _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=True, bos_token="<s>"
    )
    assert make(tmp_path, TEMPLATES[name]).render(MESSAGES) == wanted


def test_what_a_template_says_against_the_messages_is_the_clients_400(tmp_path: Path) -> None:
    template = make(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        template.render(MESSAGES)


def test_a_template_cannot_reach_python(tmp_path: Path) -> None:
    for attack in ("{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}"):
        with pytest.raises(RequestError, match="template"):
            make(tmp_path, attack).render(MESSAGES)


def test_the_template_may_stand_in_the_tokenizers_config_or_a_file_of_its_own(tmp_path: Path) -> None:
    assert ChatTemplate(tmp_path, {"chat_template": "A"}).render([]) == "A"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert ChatTemplate(tmp_path, {"chat_template": named}).render([]) == "D"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert ChatTemplate(tmp_path, {}).render([]) == "J"


def test_a_folder_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        ChatTemplate(tmp_path, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        make(tmp_path, "{% for %}")
