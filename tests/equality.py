"""The same tokens in every way of serving: the product of all of them.

`DIMENSIONS` lists the ways; a value more is one line there and the branch that makes it
so. A cell of the product is one request in one way, and is compared with the request
served alone with nothing shared. See `scripts/equality`.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import sys
import time
from typing import NamedTuple

import mappings
import near_ties
import numpy as np
from beam_cases import golden_model
from engines import all_tokens, assert_all_free, drawn, greedy

from paged_jax import Engine, EngineConfig, Field, LoadedModel, SamplingParams
from paged_jax.requests import RequestStatus
from paged_jax.sequences import SequenceStatus

DIMENSIONS = {
    "block_size": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "sharing": (True, False),
    "preemption": ("recompute", "swap"),
    "prefix": ("none", "registered", "cached"),
    "company": ("alone", "batched", "preempted"),
    "choice": (
        "greedy",
        *(f"n={n}" for n in range(1, 9)),
        *(f"beams={k}" for k in range(2, 9)),
    ),
}


class Cell(NamedTuple):
    """One request in one way of serving; a value of each of `DIMENSIONS`."""

    block_size: int
    sharing: bool
    preemption: str
    prefix: str
    company: str
    choice: str

    @property
    def setting(self) -> tuple:
        """What an engine is made and prepared for."""
        return self[:4]


# The small run: an engine for each block size. What else can be combined is, in pairs.
QUICK = [
    (1, True, "swap", "cached"),
    (2, True, "recompute", "registered"),
    (4, False, "recompute", "none"),
    (8, True, "recompute", "cached"),
    (16, True, "swap", "none"),
    (32, True, "swap", "cached"),
    (64, False, "swap", "none"),
    (128, True, "recompute", "registered"),
    (256, True, "swap", "registered"),
    (4, True, "recompute", "none"),
]

OUTPUT = 10  # tokens of each sequence
WIDEST = 8  # sequences of a request
SEQUENCES = 2 * WIDEST


def possible(setting: tuple) -> bool:
    """Says whether an engine can be made so: a prefix is shared, or is none."""
    _, sharing, _, prefix = setting
    return sharing or prefix == "none"


def settings() -> list[tuple]:
    """Returns every setting of the product."""
    names = ("block_size", "sharing", "preemption", "prefix")
    every = itertools.product(*(DIMENSIONS[name] for name in names))
    return [setting for setting in every if possible(setting)]


def cells_of(setting: tuple) -> list[Cell]:
    """Returns the cells that one engine serves."""
    others = itertools.product(DIMENSIONS["company"], DIMENSIONS["choice"])
    return [Cell(*setting, *other) for other in others]


# --------------------------------------------------------------------------- requests


@functools.cache
def the_model() -> LoadedModel:
    """The golden Llama, sharp enough for beams, at home in longer texts."""
    model = golden_model("llama", 3.0)
    config = dataclasses.replace(model.config, max_position_embeddings=1024)
    return model._replace(config=config)


def prompt_length(block_size: int) -> int:
    """Tokens of a prompt: a whole block at least, and the last one lacks three."""
    return max(13, 2 * block_size - 3)


def prefix_of(block_size: int) -> list[int]:
    """The prefix of all prompts: whole blocks and, above size 1, part of one."""
    return _text("prefix", max(9, block_size + 1))


def _text(name: str, length: int) -> list[int]:
    rng = np.random.default_rng([*name.encode()])
    return rng.integers(3, the_model().config.vocab_size, length).tolist()


def request(choice: str, block_size: int) -> tuple[list[int], SamplingParams]:
    """Returns the prompt and the parameters of a choice."""
    prefix = prefix_of(block_size)
    prompt = prefix + _text(choice, prompt_length(block_size) - len(prefix))
    kind, _, count = choice.partition("=")
    if kind == "greedy":
        return prompt, greedy(OUTPUT)
    count = int(count)
    if kind == "n":
        return prompt, drawn(
            OUTPUT, seed=count, n=count, temperature=1.3, top_k=40, top_p=0.95
        )
    return prompt, greedy(
        OUTPUT,
        n=count,
        beam_width=count,
        length_penalty=(1.0, 2.0, 0.0)[count % 3],
        early_stopping=(False, True, "never")[count % 3],
        stop_token_ids=[50] if count % 2 else [],
    )


# ---------------------------------------------------------------------------- engines


def _longest(block_size: int) -> int:
    """Most tokens of a sequence: a request's, or those of one that is in its way."""
    length = prompt_length(block_size)
    return length + OUTPUT + _extra(block_size)


def _extra(block_size: int) -> int:
    """Tokens that what is in the way generates while a prompt is computed."""
    return prompt_length(block_size) // WIDEST + 3


def make_engine(setting: tuple) -> Engine:
    """Returns an engine whose pool holds the largest request, and little more."""
    size, sharing, preemption, prefix = setting
    length = prompt_length(size)
    last = -(-(length + OUTPUT) // size)
    whole = length // size if sharing else 0
    blocks = whole + WIDEST * (last - whole)
    if prefix == "registered":
        blocks += -(-len(prefix_of(size)) // size)
    return _engine(
        size,
        max(blocks, -(-_longest(size) // size)),
        _longest(size),
        sharing=sharing,
        preemption=preemption,
        prefix_caching=prefix == "cached",
        max_prefixes=int(prefix == "registered"),
    )


def _engine(block_size, num_blocks, max_model_len, **fields) -> Engine:
    config = EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_seqs=SEQUENCES,
        max_requests=3 * WIDEST,
        max_n=WIDEST,
        max_beam_width=WIDEST,
        max_stop_ids=2,
        token_budget=SEQUENCES,
        watermark=0.0,
        spare_blocks=0,
        **fields,
    )
    return Engine(the_model(), config)


@functools.cache
def _reference(max_model_len: int) -> Engine:
    blocks = WIDEST * -(-max_model_len // 16)
    return _engine(16, blocks, max_model_len, sharing=False, preemption="recompute")


class Product:
    """Serves cells and compares them.

    Attributes:
      near_ties: cell -> gap, of those that differ at a near-tie.
      wrong: cell -> what is wrong.
    """

    def __init__(self, block_sizes):
        self._longest = max(map(_longest, block_sizes))
        self._expected = {}
        self.near_ties: dict[Cell, float] = {}
        self.wrong: dict[Cell, str] = {}

    def expected(self, choice: str, block_size: int) -> list[tuple[int, ...]]:
        """Returns the tokens of a request served alone, with nothing shared."""
        key = choice, prompt_length(block_size)
        if key not in self._expected:
            prompt, params = request(choice, block_size)
            (output,) = _reference(self._longest).generate([prompt], params)
            self._expected[key] = all_tokens(output)
        return self._expected[key]

    def run(self, setting: tuple) -> dict[str, collections.Counter]:
        """Serves every cell of a setting; returns counts for each company."""
        engine = make_engine(setting)
        size, _, _, prefix = setting
        held = None
        if prefix == "registered":
            held = engine.register_prefix(prefix_of(size))
        if prefix == "cached":
            engine.generate([[*prefix_of(size), 3]], greedy(1))
        counts = {}
        for company in DIMENSIONS["company"]:
            cells = [cell for cell in cells_of(setting) if cell.company == company]
            outputs, problems = _SERVE[company](engine, cells)
            for cell in cells:
                if cell in problems:
                    self.wrong[cell] = problems[cell]
                else:
                    self._compare(cell, outputs[cell])
            counts[company] = collections.Counter(
                same=sum(c not in self.wrong | self.near_ties for c in cells),
                near_ties=sum(c in self.near_ties for c in cells),
                wrong=sum(c in self.wrong for c in cells),
            )
        if held is not None:
            engine.release_prefix(held)
        assert_all_free(engine)
        return counts

    def _compare(self, cell: Cell, got: list[tuple[int, ...]]) -> None:
        want = self.expected(cell.choice, cell.block_size)
        prompt, params = request(cell.choice, cell.block_size)
        if got == want:
            return
        gap = near_ties.gap(the_model(), prompt, params, got, want)
        if gap <= near_ties.TIE:
            self.near_ties[cell] = gap
        else:
            self.wrong[cell] = f"{got} for {want}; the choices are {gap:.2g} apart"


def _hit(engine: Engine, cell: Cell) -> str | None:
    """Says what is wrong if a request that could use a prefix did not."""
    log = engine.log
    if cell.prefix == "cached" and not log[:, Field.HIT_TOKENS].sum():
        return "nothing was found in the prefix cache"
    most = prompt_length(cell.block_size)
    first = log[log[:, Field.TOKENS] > 0][:, Field.TOKENS].cumsum()
    if cell.prefix != "none" and cell.company == "alone":
        generated = log[:, Field.SAMPLED].sum()
        if first[-1] >= most + generated:
            return "the whole prompt was computed, though a prefix is shared"
    return None


def _alone(engine: Engine, cells: list[Cell]):
    outputs, problems = {}, {}
    for cell in cells:
        prompt, params = request(cell.choice, cell.block_size)
        engine.reset_stats()
        outputs[cell] = all_tokens(engine.generate([prompt], params)[0])
        if problem := _hit(engine, cell):
            problems[cell] = problem
    return outputs, problems


def _batched(engine: Engine, cells: list[Cell]):
    asked = [request(cell.choice, cell.block_size) for cell in cells]
    engine.reset_stats()
    outputs = engine.generate(*map(list, zip(*asked)))
    if engine.log[:, Field.RUNNING].max() < WIDEST:
        return {}, dict.fromkeys(cells, "no batch came about")
    return dict(zip(cells, map(all_tokens, outputs))), {}


def _preempted(engine: Engine, cells: list[Cell]):
    """Serves each request after others that take its blocks away."""
    outputs, problems = {}, {}
    for cell in cells:
        # Who is in the way at the right time is found by trying.
        for rival in _rivals(engine, cell):
            outputs[cell], came_about = _contend(engine, cell, rival)
            if came_about:
                break
        else:
            problems[cell] = f"no {cell.preemption} came about"
    return outputs, problems


class _Rival(NamedTuple):
    """A request that is in another's way.

    Attributes:
      width: its sequences.
      prompt: tokens of its prompt.
      output: tokens of each sequence.
      ahead: steps before the other comes.
    """

    width: int
    prompt: int
    output: int
    ahead: int


def _rivals(engine: Engine, cell: Cell):
    """Yields rivals that may take a request's blocks away."""
    size, length = cell.block_size, prompt_length(cell.block_size)
    if not cell.sharing:
        # Each sequence computes the prompt: they start far apart, if it is not short.
        # They need another block when they come to the end of the whole ones.
        prompt = min(length, 13)
        end = max((length + OUTPUT - 1) // size * size, prompt + 8)
        prefill = -(-prompt * WIDEST // SEQUENCES)
        for width in range(WIDEST, 0, -1):
            for before in (length // 8 + 4, length // 8 + 8, 8, 2, length // 16 + 4):
                ahead = prefill + end - prompt - before
                yield _Rival(width, prompt, _longest(size) - prompt, max(ahead, 0))
        # Any other start: a wide request may have to come before others have grown.
        for width in range(WIDEST, 0, -1):
            for ahead in range(prefill + end):
                yield _Rival(width, prompt, _longest(size) - prompt, ahead)
        return
    blocks = engine.config.total_blocks
    if cell.prefix == "registered":
        blocks -= -(-len(prefix_of(size)) // size)
    whole, prefill = length // size, -(-length // SEQUENCES)
    most = _longest(size) - length
    fits = [
        (width, output)
        for width, output in itertools.product(range(WIDEST, 0, -1), (most, OUTPUT))
        if whole + width * (-(-(length + output) // size) - whole) <= blocks
    ]
    # The likely ones first.
    for lead in ((2, 5, 8, 11, -prefill), (3, 4, 6, 7, 9, 10, 12, 13, 14, 15, 0, 1)):
        for (width, output), after in itertools.product(fits, lead):
            yield _Rival(width, length, output, prefill + after)


def _contend(engine: Engine, cell: Cell, rival: _Rival):
    """Serves a request beside a rival.

    Returns:
      The tokens, and whether the request was preempted as it was to be.
    """
    done = {}
    in_the_way = _text("in the way", rival.prompt)
    params = drawn(rival.output, seed=rival.width, n=rival.width)
    engine.submit(in_the_way, params)
    steps = engine.config.steps_per_sync
    for start in range(0, rival.ahead, steps):
        engine.step(max_steps=min(steps, rival.ahead - start))
    name = engine.submit(*request(cell.choice, cell.block_size))
    ran = came_about = False
    while engine.has_unfinished():
        one = None if name in done or came_about else 1
        done |= {output.request_id: output for output in engine.step(max_steps=one)}
        if one and name not in done:
            waits, runs, swapped = _standing(engine, name)
            came_about = swapped if cell.preemption == "swap" else ran and waits
            ran |= runs
    return all_tokens(done[name]), came_about


def _standing(engine: Engine, name: str) -> tuple[bool, bool, bool]:
    """Says whether sequences of a request wait, run, and are swapped out."""
    slots = [sequence.slot for sequence in engine._table.records[name].sequences]
    if None in slots:
        return False, False, False
    state = engine.state.scheduler
    status = np.asarray(state.requests.status)[slots]
    rows = np.isin(np.asarray(state.sequences.request), slots)
    rows = np.asarray(state.sequences.status)[rows]
    return (
        RequestStatus.WAITING in status,
        RequestStatus.RUNNING in status,
        SequenceStatus.SWAPPED in rows,
    )


_SERVE = {"alone": _alone, "batched": _batched, "preempted": _preempted}


# ----------------------------------------------------------------------------- script


def main(arguments: list[str] | None = None) -> int:
    """Runs the product, and prints a table.

    Args:
      arguments: of the command line.

    Returns:
      0, 1 if tokens differ or a cell is not what it says, 130 if it was interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="equality", description="Compares the tokens of every way of serving."
    )
    parser.add_argument(
        "--quick", action="store_true", help="an engine or two for each block size"
    )
    parser.add_argument(
        "--block-sizes",
        type=int,
        nargs="+",
        choices=DIMENSIONS["block_size"],
        default=DIMENSIONS["block_size"],
        metavar="B",
        help="only these, of 1, 2, 4, ... 256",
    )
    given = parser.parse_args(arguments)
    chosen = QUICK if given.quick else settings()
    chosen = [setting for setting in chosen if setting[0] in given.block_sizes]
    product = Product(given.block_sizes)
    companies = DIMENSIONS["company"]
    print(f"{len(chosen)} engines, {len(DIMENSIONS['choice'])} requests in each column")
    print(
        f"{'block':>5} {'sharing':<8}{'preemption':<11}{'prefix':<11}"
        + "".join(f"{company:<22}" for company in companies)
        + "s",
        flush=True,
    )
    try:
        for setting in chosen:
            started = time.monotonic()
            size, sharing, preemption, prefix = setting
            counts = product.run(setting)
            row = (
                f"{size:>5} {'on' if sharing else 'off':<8}{preemption:<11}{prefix:<11}"
            )
            for company in companies:
                row += f"{_in_words(counts[company]):<22}"
            print(f"{row}{time.monotonic() - started:.0f}", flush=True)
            mappings.give_back()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        for cell, gap in product.near_ties.items():
            print(f"near-tie, choices {gap:.2g} apart: {_name(cell)}")
        for cell, what in product.wrong.items():
            print(f"WRONG: {_name(cell)}: {what}")
    print(f"{len(product.near_ties)} near-ties, {len(product.wrong)} wrong")
    return int(bool(product.wrong))


def _in_words(counts: collections.Counter) -> str:
    words = [f"{counts['same']} same"]
    if counts["near_ties"]:
        words.append(f"{counts['near_ties']} near")
    if counts["wrong"]:
        words.append(f"{counts['wrong']} WRONG")
    return ", ".join(words)


def _name(cell: Cell) -> str:
    return ", ".join(f"{k} {v}" for k, v in cell._asdict().items())
