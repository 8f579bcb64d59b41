"""One run: text, training, checkpoint, loss curve, and a look at what it writes."""

import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.figures import BLUE, GREY, ORANGE
from experiments.tiny_lm.baselines import bigram_bits, unigram_bits
from experiments.tiny_lm.checkpoint import save_directory
from experiments.tiny_lm.corpus import Corpus, as_stream, load_corpus
from experiments.tiny_lm.settings import MODEL, Settings
from experiments.tiny_lm.tokens import byte_tokenizer
from experiments.tiny_lm.training import Point, train
from paged_jax import Engine, EngineConfig, SamplingParams

_SAMPLES = 8
_PROMPT_BYTES = 16
_SHOWN_BYTES = 160


def train_and_save(
    folder: Path, settings: Settings, say: Callable[[str], None]
) -> dict[str, Any]:
    """Trains a model, and writes it and its loss curve.

    Args:
      folder: an existing folder.
      settings: how to train.
      say: gets lines for the user.

    Returns:
      The result as JSON; the loss and its baselines are in bits per byte of text that
      was held out.
    """
    start = time.perf_counter()
    corpus = load_corpus()
    train_stream, held_out = as_stream(corpus.train), as_stream(corpus.held_out)
    say(
        f"{len(corpus.train)} texts, {len(train_stream) / 1e6:.2f} MB, to learn from; "
        f"{len(corpus.held_out)}, {len(held_out) / 1e6:.2f} MB, held out"
    )
    say(f"{MODEL.num_params:,} parameters, {settings.steps} steps")
    say(f"{'step':>6}{'train':>9}{'held out':>10}   bits per byte")

    def on_point(point: Point) -> None:
        say(f"{point.step:>6}{point.train:>9.3f}{point.held_out:>10.3f}")

    params, curve = train(MODEL, settings, train_stream, held_out, on_point)
    seconds = time.perf_counter() - start
    baselines = {
        "unigram": unigram_bits(train_stream, held_out),
        "bigram": bigram_bits(train_stream, held_out),
    }
    save_directory(folder, MODEL, params, byte_tokenizer())
    write_curve(folder, curve, baselines)
    return {
        "steps": settings.steps,
        "seconds": round(seconds, 1),
        "texts": [len(corpus.train), len(corpus.held_out)],
        "train_bits_per_byte": curve[-1].train,
        "held_out_bits_per_byte": curve[-1].held_out,
        "baseline_bits_per_byte": baselines,
        "samples": sample(folder, corpus, settings.seed),
    }


def sample(folder: Path, corpus: Corpus, seed: int) -> dict[str, Any]:
    """Serves the model: lets it go on from the beginnings of held-out texts.

    Returns:
      How many samples there are, how many came to an end of text, and one of those
      that did, as JSON.
    """
    config = EngineConfig(
        max_model_len=MODEL.max_position_embeddings,
        max_seqs=_SAMPLES,
        max_requests=_SAMPLES,
        token_budget=_SAMPLES,  # one size of step, so one program to compile
    )
    engine = Engine.from_pretrained(str(folder), config, seed=seed)
    prompts = [
        list(text.encode()[:_PROMPT_BYTES])
        for text in corpus.held_out
        if len(text.encode()) > _PROMPT_BYTES
    ][:_SAMPLES]
    params = SamplingParams(temperature=0.8, max_tokens=config.max_model_len)
    outputs = engine.generate(prompts, params)
    ended = [o for o in outputs if o.outputs[0].finish_reason == "stop"]
    shown = ended[0] if ended else outputs[0]
    text = engine.tokenizer.decode(shown.prompt_token_ids) + "|" + shown.outputs[0].text
    return {
        "count": len(outputs),
        "ended": len(ended),
        "example": text[:_SHOWN_BYTES],
    }


def write_curve(folder: Path, curve: list[Point], baselines: dict[str, float]) -> None:
    """Writes the loss curve as loss_curve.csv and loss_curve.png, in bits per byte."""
    with open(folder / "loss_curve.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "train_bits_per_byte", "held_out_bits_per_byte"])
        writer.writerows([p.step, f"{p.train:.4f}", f"{p.held_out:.4f}"] for p in curve)
    steps, train_bits, held_out = np.array(curve).T
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, train_bits, color=BLUE, label="train, mean since the last point")
    axes.plot(steps, held_out, color=ORANGE, label="held out")
    for style, (name, bits) in zip(("--", ":"), baselines.items()):
        axes.axhline(bits, color=GREY, linestyle=style, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(folder / "loss_curve.png", dpi=120)
