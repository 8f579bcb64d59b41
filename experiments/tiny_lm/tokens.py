"""Bytes as tokens: token `b` is the byte `b`, and one more ends a text."""

import tokenizers

END_OF_TEXT = 256
VOCAB_SIZE = 257
_NAME = "<|endoftext|>"


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Returns the tokenizer; it adds nothing to a text."""
    vocab = {stand_in: byte for byte, stand_in in _stand_ins().items()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.add_special_tokens([_NAME])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _stand_ins() -> dict[int, str]:
    """Returns the printable character that stands for each byte in a vocabulary.

    Printable bytes of Latin-1 stand for themselves, the others for what comes after it.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
