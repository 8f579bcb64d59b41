import functools
import itertools
import unicodedata

import gguf
import numpy as np
import pytest
from gguf_files import add_value, byte_stand_ins
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.models.checkpoint import CheckpointError
from paged_jax.models.config import tiny
from paged_jax.models.gguf_file import GGUFFile
from paged_jax.models.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer

pytestmark = pytest.mark.newest(reason="plain Python and the library of tokenizers")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _, BYTE = (int(t) for t in gguf.TokenType)


def build(tmp_path, **changes):
    """A tokenizer from a file that holds only its metadata; None drops a key."""
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    for name, value in changes.items():
        if value is not None:
            add_value(writer, f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return build_tokenizer(GGUFFile(tmp_path / "t.gguf"), tiny(bos_token_id=1))


def byte_level(tmp_path, **changes):
    tokens = ["<unk>", "<s>", "</s>", "<tool>", *byte_stand_ins(), "zq"]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * 257,
        "merges": ["z q"],
    }
    return build(tmp_path, **values | changes)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "It's 1234  x!\n\n y", "It|'s| 1234| | x|!|\n\n| y"),
        ("smollm", "a1234 ½x 56", "a|1|2|3|4| |½|x| |5|6"),
        ("smollm", "don't  stop", "don|'t| | stop"),
        (
            "llama-bpe",
            "I'M 1234567  x!!\n\ny\r\n",
            "I|'M| |123|456|7| | x|!!\n\n|y|\r\n",
        ),
        ("llama-bpe", "(word) 12ab", "(word|)| |12|ab"),
        ("qwen2", "We'll 1234  x!!\n\ny", "We|'ll| |1|2|3|4| | x|!!\n\n|y"),
        ("default", "x+y (12345)!", "x|+|y| |(|123|45|)!"),
    ],
)
def test_texts_are_cut_like_the_family_does(pre, text, pieces, tmp_path):
    tokenizer = byte_level(tmp_path, pre=pre)
    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    stand_ins = {s: b for b, s in enumerate(byte_stand_ins())}
    actual = [bytes(stand_ins[c] for c in piece).decode() for piece, _ in cut]
    assert actual == pieces.split("|")


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_text_comes_back(pre, tmp_path):
    tokenizer = byte_level(tmp_path, pre=pre)

    @given(text=st.text(max_size=30))
    def check(text):
        expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        decoded = tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False)
        bos = "<s>" if pre == "llama-bpe" else ""
        assert decoded == bos + expected

    check()


def test_llama3_takes_a_word_that_is_a_token_whole(tmp_path):
    tokens = ["<unk>", "<s>", *byte_stand_ins(), "zq", "abc"]
    options = {"tokens": tokens, "token_type": None, "add_bos_token": False}
    whole = byte_level(tmp_path, pre="llama-bpe", **options)
    assert whole.encode("abc") == [len(tokens) - 1]
    merged = byte_level(tmp_path, pre="gpt-2", **options)
    assert len(merged.encode("abc")) == 3


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "starts"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_a_start_token_is_added_where_the_file_asks_for_it(
    pre, add_bos_token, starts, tmp_path
):
    tokenizer = byte_level(tmp_path, pre=pre, add_bos_token=add_bos_token)
    assert (tokenizer.encode("a")[0] == 1) == starts
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 1


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path):
    tokenizer = byte_level(tmp_path)
    assert tokenizer.special_token_ids == {0, 1, 2}
    ids = tokenizer.encode("a</s><tool>")
    assert ids[1:] == [2, 3]
    assert tokenizer.decode(ids) == "a<tool>"


# Each longer token has one way to be made; scores as in a trained vocabulary, longer
# words likelier the later they are listed.
WORDS = ("ab", "cd", "▁a", "bc", "abcd", "▁the", "th", "▁th", "dd", "ddcd")


@functools.cache
def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    letters = [*"▁abcdeht", "é"]
    scores = [0.0] * len(tokens)
    scores += [-100.0 - i for i in range(len(letters))]
    scores += [-float(i * 7 % 10) for i in range(len(WORDS))]
    tokens += [*letters, *WORDS]
    types += [NORMAL] * (len(letters) + len(WORDS))
    return tokens, scores, types


def sentencepiece(tmp_path, **changes):
    tokens, scores, types = sentencepiece_vocabulary()
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "add_bos_token": False,
        "unknown_token_id": 0,
    }
    return build(tmp_path, **values | changes)


def merge_by_score(text: str) -> list[int]:
    """The neighbours that make the best-scored token join first, leftmost on a tie."""
    tokens, scores, _ = sentencepiece_vocabulary()
    ids = {token: i for i, token in enumerate(tokens)}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = ["".join(pair) for pair in itertools.pairwise(parts)]
        known = [i for i, pair in enumerate(pairs) if pair in ids]
        if not known:
            break
        best = max(known, key=lambda i: (scores[ids[pairs[i]]], -i))
        parts[best : best + 2] = [pairs[best]]
    result = []
    for part in parts:
        spelled = [f"<0x{b:02X}>" for b in part.encode()]
        result += [ids[part]] if part in ids else [ids[byte] for byte in spelled]
    return result


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path):
    tokenizer = sentencepiece(tmp_path)

    @given(text=st.text(alphabet="abcdeht é日😀\n", max_size=20))
    def check(text):
        ids = tokenizer.encode(text)
        assert ids == merge_by_score(text)
        assert tokenizer.decode(ids) == text

    check()
    # The words of the vocabulary do get used.
    tokens, *_ = sentencepiece_vocabulary()
    words = [tokens[i] for i in tokenizer.encode("the abcd ae")]
    assert words == ["▁the", "▁", "abcd", "▁a", "e"]


def test_sentencepiece_without_a_space_in_front(tmp_path):
    tokenizer = sentencepiece(tmp_path, add_space_prefix=False)
    tokens, *_ = sentencepiece_vocabulary()
    ids = tokenizer.encode("ab ae")
    assert [tokens[i] for i in ids] == ["ab", "▁a", "e"]
    assert tokenizer.decode(ids) == "ab ae"


def test_sentencepiece_starts_with_the_start_token_by_default(tmp_path):
    tokenizer = sentencepiece(tmp_path, add_bos_token=None)
    assert tokenizer.encode("ab")[0] == 1
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores must have one value per token"),
        ({"scores": [0.5]}, "tokenizer.ggml.scores must have one value per token"),
        ({"unknown_token_id": 10_000}, "unknown_token_id 10000 is not below the"),
        ({"model": "t5"}, r"tokenizer 't5' is not supported; use one of \('gpt2',"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"token_type": [1]}, "token_type must have one value per token"),
    ],
)
def test_what_is_wrong_with_a_vocabulary_is_named(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        sentencepiece(tmp_path, **changes)


def test_scores_may_be_of_any_number_type(tmp_path):
    _, scores, _ = sentencepiece_vocabulary()
    integers = [int(score) for score in np.round(scores)]
    tokenizer = sentencepiece(tmp_path, scores=integers)
    assert tokenizer.encode("the ab") == merge_by_score("the ab")
