import json
from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from router.chat_template import ChatTemplate
from router.errors import ChatTemplateError, RefusedByTemplate
from router.model_folder import read_model_folder
from tests.router.tokenizers_for_tests import byte_level

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße <b>'x'</b>"},
]
SIMPLE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {%- if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "<|{{ message['role'] }}|>{{ message.content | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = [
    SIMPLE,
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}:{{ m['content'] | tojson }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content.split('x')[0].upper() }}"
    "{% endgeneration %}{% endfor %}{{ tools is none }}",
    "{{ (messages | map(attribute='role') | list) | tojson(indent=2) }}",
    "{{ messages | tojson(true) }}{{ messages | tojson(False, 1) }}",
    "{{ messages | tojson(ensure_ascii=true, indent=2, sort_keys=true) }}",
    "{{ messages[1] | tojson(separators=(',', ':')) }}",
    "{{ messages[1] | tojson(false, none, ('; ', '=')) }}",
    "{{ pad_token }}{{ image_token }}{{ sep_token is defined }}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{{ '%s!' % messages[0]['role'] }} {{ '-' * 10 }} {{ 7 % 4 }} {{ 2 ** 8 }}",
]


def render(source: str, max_chars: int = 10_000) -> str:
    template = ChatTemplate(
        source,
        special_tokens={"bos_token": "<|begin|>", "eos_token": "<|end|>"},
        max_chars=max_chars,
        now=lambda: datetime(2026, 11, 21),
    )
    return template.render(MESSAGES)


@pytest.mark.parametrize("source", TEMPLATES)
def test_rendering_equals_that_of_transformers(tmp_path: Path, source: str) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "image_token": "<image>",
    }
    names = {"eos_token": "<|end|>", "pad_token": "<|end|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(source)
    theirs = AutoTokenizer.from_pretrained(tmp_path)

    folder = read_model_folder(tmp_path, max_prompt_chars=10_000)

    assert folder.chat_template is not None
    assert folder.tokenizer is not None
    text = folder.chat_template.render(MESSAGES)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = folder.tokenizer.encode(text, add_special_tokens=False)
    assert ids == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "{{ messages[0].role }}"},
        {"chat_template": [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ messages[0].role }}"},
        ]},
        {"chat_template": {"tool_use": "no", "default": "{{ messages[0].role }}"}},
    ],
)  # fmt: skip
def test_a_template_of_the_tokenizer_config_is_found(
    tmp_path: Path, config: dict[str, object]
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    template = read_model_folder(tmp_path, max_prompt_chars=100).chat_template

    assert template is not None
    assert template.render(MESSAGES) == "system"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'].codecs.open('/etc/passwd').read() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].system('id') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ messages.append({}) }}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ [1] * 1000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
        "{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ undefined_name.attribute }}",
        "{{ 1 / 0 }}",
    ],
)
def test_an_attack_fails(attack: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(attack)


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(RefusedByTemplate, match="only users"):
        render("{{ raise_exception('only users') }}")


def test_output_is_bounded_to_the_character() -> None:
    assert render("12345", max_chars=5) == "12345"
    with pytest.raises(ChatTemplateError, match="more than 4"):
        render("12345", max_chars=4)


def test_the_date_comes_from_the_given_clock() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "21 Nov 2026"
