"""Builds a tokenizer from the vocabulary inside a GGUF file."""

from typing import Any

import gguf
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from paged_jax.models.checkpoint import CheckpointError
from paged_jax.models.config import ModelConfig
from paged_jax.models.fields import Fields
from paged_jax.models.gguf_file import GGUFFile
from paged_jax.tokenizer import Tokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How each family cuts a text before merging: one pattern after the other, each cutting
# the pieces that the one before left.
PRE_TOKENIZERS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "smollm": (r"\p{N}", _GPT2),
}
MODELS = ("gpt2", "llama")


def build_tokenizer(file: GGUFFile, config: ModelConfig) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Args:
        file: the open file.
        config: from `gguf.read_config`.

    Raises:
        CheckpointError: the vocabulary is missing or malformed, or of a kind that is
            not supported.
    """
    fields = Fields(str(file.path), file.metadata)
    kind = fields.string("tokenizer.ggml.model")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens is missing.")
    if kind == "gpt2":
        backend = _byte_level(fields, tokens)
    elif kind == "llama":
        backend = _sentencepiece(fields, tokens)
    else:
        raise CheckpointError(
            f"{file.path}: the tokenizer {kind!r} is not supported; "
            f"use one of {MODELS}."
        )
    _add_special_tokens(fields, tokens, backend)
    _add_bos(fields, config, backend, kind)
    return Tokenizer(
        backend,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        chat_template=fields.string("tokenizer.chat_template", None),
    )


def _byte_level(fields: Fields, tokens: list[str]) -> tokenizers.Tokenizer:
    pre = fields.string("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{fields.where}: the pre-tokenizer {pre!r} is not supported; "
            f"use one of {tuple(PRE_TOKENIZERS)}."
        )
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    lines = fields.values.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise CheckpointError(f"{fields.where}: tokenizer.ggml.merges is missing.")
    merges = [_merge(line) for line in lines]
    try:
        # Llama 3 takes a word that is a token whole, whatever its merges say.
        model = models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # `tokenizers` raises bare Exception
        raise CheckpointError(
            f"{fields.where}: tokenizer.ggml.merges do not fit the tokens: {error}."
        ) from error
    backend = tokenizers.Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(Regex(pattern), "isolated")
                for pattern in PRE_TOKENIZERS[pre]
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _sentencepiece(fields: Fields, tokens: list[str]) -> tokenizers.Tokenizer:
    scores = fields.values.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(
            f"{fields.where}: tokenizer.ggml.scores must have one value per token."
        )
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    unknown = fields.integer("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise CheckpointError(
            f"{fields.where}: tokenizer.ggml.unknown_token_id {unknown} is not below "
            f"the {len(tokens)} tokens."
        )
    model = models.BPE(
        vocab,
        _merges_from_scores(vocab, scores.tolist()),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    # Spaces are written as U+2581, and a text starts with one.
    prefix, strip = [], []
    if fields.boolean("tokenizer.ggml.add_space_prefix", True):
        prefix = [normalizers.Prepend("\u2581")]
        strip = [decoders.Strip(" ", 1, 0)]
    backend.normalizer = normalizers.Sequence(
        [*prefix, normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *strip,
        ]
    )
    return backend


def _merges_from_scores(
    vocab: dict[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, the best-scored result first."""
    merges = []
    for token, id_ in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[id_], vocab[left], vocab[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _add_special_tokens(
    fields: Fields, tokens: list[str], backend: tokenizers.Tokenizer
) -> None:
    kinds = fields.values.get("tokenizer.ggml.token_type")
    if kinds is None:
        return
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{fields.where}: tokenizer.ggml.token_type must have one value per token."
        )
    special = (gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN)
    added = (*special, gguf.TokenType.USER_DEFINED)
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind in special, normalized=False)
            for token, kind in zip(tokens, kinds.tolist(), strict=True)
            if kind in added
        ]
    )


def _add_bos(
    fields: Fields, config: ModelConfig, backend: tokenizers.Tokenizer, kind: str
) -> None:
    starts = kind == "llama" or fields.values.get("tokenizer.ggml.pre") == "llama-bpe"
    if not fields.boolean("tokenizer.ggml.add_bos_token", starts):
        return
    id_: Any = config.bos_token_id
    token = None if id_ is None else backend.id_to_token(id_)
    if token is None:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, id_)]
    )
