import re
from datetime import datetime

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from paged_jax.tokenizer import Tokenizer

VOCAB = {"<pad>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4, "three": 5}

CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|system|>be kind<|end|>' }}
    {% endif %}
{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}"""


def words(**options) -> Tokenizer:
    """A tokenizer of whole words, which puts <s> before a text."""
    backend = tokenizers.Tokenizer(models.WordLevel(VOCAB, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    options = {"bos_token_id": 1, "eos_token_ids": (2,)} | options
    return Tokenizer(backend, **options)


def render(template: str, messages, **options) -> str:
    return words(chat_template=template).apply_chat_template(messages, **options)


def user(content):
    return {"role": "user", "content": content}


def test_special_tokens_are_added_on_request():
    tokenizer = words()
    assert tokenizer.encode("one two") == [1, 3, 4]
    assert tokenizer.encode("one two", add_special_tokens=False) == [3, 4]
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_special_tokens_in_a_text_are_recognised():
    assert words().encode("one</s> two", add_special_tokens=False) == [3, 2, 4]


def test_decoding_skips_special_tokens_unless_asked_not_to():
    tokenizer = words()
    assert tokenizer.decode([1, 3, 5, 2]) == "one three"
    kept = tokenizer.decode((1, 3, 5, 2), skip_special_tokens=False)
    assert kept == "<s> one three </s>"


def test_its_facts():
    tokenizer = words()
    assert tokenizer.vocab_size == 6
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.bos_token_id == 1


def test_bytes_that_are_no_text_become_the_replacement_character():
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("a€")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "a€"
    assert tokenizer.decode(ids[:2]) == "a\ufffd"


def test_a_template_sees_the_conversation():
    conversation = [user(" hi "), {"role": "assistant", "content": "yes?"}]
    expected = "<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>yes?<|end|>"
    rendered = render(CHATML, conversation, add_generation_prompt=False)
    assert rendered.replace("\n", "") == expected
    rendered = render(CHATML, conversation)
    assert rendered.replace("\n", "") == expected + "<|assistant|>"
    rendered = render(
        CHATML, [{"role": "system", "content": "be brief"}, *conversation]
    )
    assert rendered.startswith("<|system|>be brief<|end|>")


def test_a_template_sees_the_start_and_end_tokens():
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    assert render(template, [user("x")]) == "<s>x</s>"
    bare = words(chat_template=template, bos_token_id=None, eos_token_ids=())
    assert bare.apply_chat_template([user("x")]) == "x"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # Lines that hold only a block leave nothing behind.
        ("{% if true %}\n  {% set x = 1 %}\na\n{% endif %}", "a\n"),
        ("{%- for m in messages[::-1] -%}{{ m.content }}{%- endfor -%}", "secondfirst"),
        (
            "{%- set ns = namespace(n=0) -%}"
            "{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{%- endfor -%}"
            "{{ ns.n }}",
            "2",
        ),
        (
            "{%- for m in messages -%}{{ m.content }}{%- break -%}{%- endfor -%}",
            "first",
        ),
        ("{{ messages[0]['content'].split('r')[0].lstrip('f') }}", "i"),
        ("{{ tools is none }} {{ undefined_thing is defined }}", "True False"),
        ("{{ {'ä': [1, none]} | tojson }}", '{"ä": [1, null]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ messages[0].content is string and messages is not string }}", "True"),
    ],
)
def test_what_templates_use_works(template, expected):
    assert render(template, [user("first"), user("second")]) == expected


def test_a_template_knows_the_date():
    rendered = render("{{ strftime_now('%d %b %Y') }}", [user("x")])
    assert datetime.strptime(rendered, "%d %b %Y")


def test_a_model_without_template_says_so():
    with pytest.raises(ValueError, match="has no chat template; give it plain text"):
        words().apply_chat_template([user("x")])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system turn') }}", "failed: no system turn"),
        ("{{ raise_exception('no\nlines') }}", "failed: no lines"),
        ("{% if %}", "The chat template failed: "),
        ("{{ messages[0].role + 1 }}", "The chat template failed: "),
        ("{{ messages[9].role.x }}", "The chat template failed: "),
        # Templates come with checkpoints: they can neither reach into Python nor
        # change what they are given.
        ("{{ ''.__class__.__mro__ }}", "failed: .* unsafe"),
        ("{{ messages.append(1) }}", "failed: .* unsafe"),
    ],
)
def test_a_template_that_fails_says_why(template, message):
    with pytest.raises(ValueError, match=message) as caught:
        render(template, [user("x")])
    assert re.fullmatch(r"[^\n]+", str(caught.value))
