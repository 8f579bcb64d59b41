import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from paged_jax.detokenizer import Detokenizer
from paged_jax.tokenizer import Tokenizer

SPECIAL = "<|end|>"


def byte_level() -> Tokenizer:
    """Byte pairs: a token may be any bytes, also half of a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    merges = []
    stand_in = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("日", "😀", " n", "na"):
        ((word, _),) = stand_in.pre_tokenize_str(text)
        for cut in range(2, len(word) + 1):
            pair = (word[: cut - 1], word[cut - 1])
            merges.append(pair)
            vocab.setdefault("".join(pair), len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = stand_in
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(SPECIAL, special=True), AddedToken("<tool>")])
    return Tokenizer(backend)


def byte_fallback() -> Tokenizer:
    """SentencePiece: spaces as U+2581, bytes spelled out, one leading space dropped."""
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += ["\u2581", "a", "b", "\u2581a", "\u2581the", "\u2581\u2581", "é", "日"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_tokens([AddedToken(SPECIAL, special=True)])
    return Tokenizer(backend)


def whole_words() -> Tokenizer:
    """Words joined by spaces, with no decoder."""
    vocab = {f"t{i}": i for i in range(8)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    backend.add_tokens([AddedToken(SPECIAL, special=True)])
    return Tokenizer(backend)


TOKENIZERS = {t.__name__: t() for t in (byte_level, byte_fallback, whole_words)}


@st.composite
def tokenizer_and_ids(draw):
    tokenizer = TOKENIZERS[draw(st.sampled_from(sorted(TOKENIZERS)))]
    size = tokenizer.vocab_size
    # The last ids are the interesting ones; the first are bytes.
    ids = st.one_of(st.integers(0, size - 1), st.integers(max(0, size - 12), size - 1))
    return tokenizer, draw(st.lists(ids, max_size=24))


@given(
    case=tokenizer_and_ids(),
    skip=st.booleans(),
    cuts=st.lists(st.integers(1, 4), max_size=24),
)
def test_the_pieces_joined_are_the_text(case, skip, cuts):
    tokenizer, ids = case
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces, rest = [], ids
    for cut in [*cuts, len(ids)]:
        pieces.append(detokenizer.push(rest[:cut]))
        rest = rest[cut:]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=20))
def test_no_piece_of_a_text_ends_inside_a_character(text):
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text)
    pieces = [detokenizer.push([id_]) for id_ in ids]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text and SPECIAL not in text:
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_pieces_come_as_soon_as_they_are_settled():
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("né日!")
    assert len(ids) == 5
    pieces = [detokenizer.push([id_]) for id_ in ids]
    assert pieces == ["n", "", "é", "日", "!"]
    assert detokenizer.flush() == ""


def test_what_is_held_back_comes_at_the_end():
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer)
    first_byte = tokenizer.encode("é")[:1]
    assert detokenizer.push(first_byte) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_space_survives_a_special_token_before_it():
    tokenizer = TOKENIZERS["byte_fallback"]
    detokenizer = Detokenizer(tokenizer)
    a, the = (tokenizer.backend.token_to_id(t) for t in ("\u2581a", "\u2581the"))
    special = tokenizer.backend.token_to_id(SPECIAL)
    pieces = [detokenizer.push([id_]) for id_ in (a, special, special, the)]
    assert pieces == ["a", "", "", " the"]


def test_added_tokens_that_are_not_special_are_text():
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode(f"a<tool>{SPECIAL}b")) == "a<tool>b"


def test_special_tokens_are_shown_on_request():
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    assert detokenizer.push(tokenizer.encode(f"a{SPECIAL}")) == f"a{SPECIAL}"
