"""The shipped prompts, and the formats that the reader knows."""

import collections
import json

import numpy as np
import pytest

from experiments.prompts import (
    Prompt,
    load_prompts,
    read_prompts,
    system_prompt,
)

SHAREGPT = {
    "id": "c1",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "How tall is a giraffe?\n"},
        {"from": "gpt", "value": "About 5 m."},
        {"from": "human", "value": "And an okapi?"},
    ],
}
ALPACA = {"instruction": "Add the numbers.", "input": "3 and 4", "output": "7"}
MT_BENCH = {"question_id": 7, "category": "math", "turns": ["Is 91 prime?", "And 97?"]}
OWN = {"id": "x-1", "category": "summary", "text": "Shorten this: a b c"}

FORMATS = {
    "sharegpt": (SHAREGPT, Prompt("c1", "chat", "How tall is a giraffe?")),
    "alpaca": (
        ALPACA,
        Prompt("prompt-1", "instruction", "Add the numbers.\n\n3 and 4"),
    ),
    "alpaca without input": (
        {**ALPACA, "input": ""},
        Prompt("prompt-1", "instruction", "Add the numbers."),
    ),
    "alpaca with its template": (
        {**ALPACA, "text": "Below is an instruction."},
        Prompt("prompt-1", "instruction", "Add the numbers.\n\n3 and 4"),
    ),
    "mt_bench": (MT_BENCH, Prompt("7", "math", "Is 91 prime?")),
    "own": (OWN, Prompt("x-1", "summary", "Shorten this: a b c")),
    "own, text only": ({"text": "Hi"}, Prompt("prompt-1", "other", "Hi")),
}


def write(tmp_path, content):
    path = tmp_path / "prompts.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(("entry", "prompt"), FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("layout", ["array", "indented array", "lines"])
def test_format_is_told_by_its_fields(tmp_path, entry, prompt, layout):
    entries = [entry, {"text": "the next one"}]
    if layout == "lines":
        content = "\n".join(map(json.dumps, entries))
    else:
        content = json.dumps(entries, indent=2 if layout == "indented array" else None)
    first, second = load_prompts(write(tmp_path, content))
    assert first == prompt
    assert second == Prompt("prompt-2", "other", "the next one")


def test_byte_order_mark_crlf_and_blank_lines_are_fine(tmp_path):
    content = b"\xef\xbb\xbf" + json.dumps(OWN).encode() + b"\r\n\r\n"
    assert len(load_prompts(write(tmp_path, content))) == 1


def test_line_separator_inside_a_text_is_no_line_end(tmp_path):
    content = json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False)
    assert load_prompts(write(tmp_path, content))[0].text == "a\u2028b\x85c"


MALFORMED = {
    "not JSON": ('{"text": "a"', "not JSON"),
    "nested too deeply": ("[" * 100_000, "not JSON"),
    "not an object": ('"text"', "not an object but str"),
    "unknown fields": ('{"prompt": "a"}', "none of the fields"),
    "text is a number": ('{"text": 3}', "text is not text but int"),
    "empty text": ('{"text": " \\n"}', "empty text"),
    "half a surrogate pair": ('{"text": "a\\ud800"}', "surrogate"),
    "no human turn": ('{"conversations": [{"from": "gpt", "value": "a"}]}', "no human"),
    "no conversation": ('{"conversations": null}', "conversations is not a list"),
    "no value": ('{"conversations": [{"from": "human"}]}', "value of the first human"),
    "no turn": ('{"turns": []}', "no turn"),
    "turn is a list": ('{"turns": [["a"]]}', "first turn is not text but list"),
    "instruction is null": (
        '{"instruction": null, "input": "a"}',
        "instruction is not",
    ),
}


@pytest.mark.parametrize(("line", "problem"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_entry_is_skipped_and_named(tmp_path, line, problem):
    path = write(tmp_path, f'{{"text": "good"}}\n{line}\n{{"text": "good too"}}')
    found = read_prompts(path)
    assert [prompt.text for prompt in found.prompts] == ["good", "good too"]
    assert found.problems[0].startswith("line 2: ")
    assert problem in found.problems[0]
    assert found.warning.startswith("skipped 1 of 3 prompts: line 2: ")
    with pytest.warns(UserWarning, match="skipped 1 of 3 prompts"):
        assert load_prompts(path) == found.prompts


def test_malformed_entry_of_an_array_is_named_by_its_number(tmp_path):
    found = read_prompts(write(tmp_path, json.dumps([OWN, 3, SHAREGPT])))
    assert len(found.prompts) == 2
    assert found.problems == ["entry 2: not an object but int"]


def test_long_list_of_problems_is_cut(tmp_path):
    found = read_prompts(write(tmp_path, json.dumps([OWN, *range(9)])))
    assert found.warning.startswith("skipped 9 of 10 prompts: entry 2: ")
    assert found.warning.endswith("; and 6 more")
    assert len(found.problems) == 9


REFUSED = {
    "empty": ("", "the file is empty"),
    "blank": (" \n\n", "the file is empty"),
    "empty array": ("[]", "the file is empty"),
    "nothing usable": ('{"a": 1}\n{"b": 2}', "skipped 2 of 2 prompts: line 1: none of"),
    "broken array": ('[{"text": "a"},\n{"text"}]', "not JSON .* at line 2 column 8"),
    "not text": (b"\x00\xff\xfe", "not UTF-8 text"),
}


@pytest.mark.parametrize(("content", "reason"), REFUSED.values(), ids=REFUSED)
def test_nothing_usable_is_refused_in_one_line(tmp_path, content, reason):
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=reason) as error:
        load_prompts(path)
    message = str(error.value)
    assert str(path) in message
    assert "ShareGPT, Alpaca, MT-Bench" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_file_that_cannot_be_read_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"prompts file .*(No such|[Dd]irectory)"):
        load_prompts(tmp_path / name)


def test_shipped_prompts_are_complete_and_varied(recwarn):
    prompts = load_prompts()
    assert not recwarn.list
    assert len(prompts) >= 190
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    counts = collections.Counter(prompt.category for prompt in prompts)
    assert set(counts) == {"chat", "code", "summary", "translation", "document"}
    assert min(counts.values()) >= 15


def test_shipped_prompts_are_written_out():
    """No text is made of repeated sentences, and no two long ones share them."""
    seen: dict[str, str] = {}
    for prompt in load_prompts():
        for sentence in prompt.text.replace("\n", " ").split(". "):
            if len(sentence) > 60:
                assert seen.setdefault(sentence, prompt.id) == prompt.id
        words = prompt.text.split()
        phrases = [tuple(words[i : i + 8]) for i in range(len(words) - 7)]
        assert len(set(phrases)) >= 0.97 * len(phrases), prompt.id


@pytest.mark.parametrize("first", [50, 100, None])
def test_lengths_of_any_first_part_are_spread_like_those_of_sharegpt(first):
    lengths = [len(prompt.text) / 4.2 for prompt in load_prompts()[:first]]
    quantiles = np.percentile(lengths, [10, 25, 50, 75, 90, 95])
    np.testing.assert_allclose(quantiles, [9, 15, 35, 133, 506, 863], rtol=0.25)


def test_system_prompt_is_a_paragraph():
    text = system_prompt()
    assert text == text.strip()
    assert 60 <= len(text.split()) <= 150
