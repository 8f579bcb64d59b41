"""How fast a prompt's chunk is attended to, as a share of the tensor cores' speed."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from experiments.aot.targets import TARGETS
from experiments.gpu_check.bandwidth import Attention
from experiments.gpu_check.jobs import CUDNN, OURS, ROWS, XLA, Job
from experiments.gpu_check.problems import Problem, make_problem
from experiments.gpu_check.timing import repeated, seconds_of
from pallas_kernels import paged_attention
from pallas_kernels.mosaic_decode import paged_attention_mosaic
from pallas_kernels.mosaic_mixed import paged_attention_mixed

# Tokens before the chunk, and in it.
POINTS = ((0, 2048), (6144, 2048))
BLOCK_SIZE = 16
# Published, of all the GPUs that the kernels are for.
PEAK = TARGETS["h100"].flops


def jobs(small: bool) -> Iterator[Job]:
    """Yields each contender at each point.

    Args:
        small: whether to time one tiny point, for an interpreter.
    """
    for name in CONTENDERS:
        if name in NOT_REHEARSED and small:
            continue
        for before, tokens in ((3, 9),) if small else POINTS:
            yield Job(
                "prefill",
                f"{name}, chunk of {tokens} after {before}",
                RANKS.get(name, OURS),
                dict(before=before, tokens=tokens, name=name),
                functools.partial(_time, name, before, tokens, small),
                ours=name != "cudnn",
            )


def _time(name: str, before: int, tokens: int, small: bool) -> dict[str, Any]:
    """Returns what a contender does at a point."""
    shape: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=64) if small else {}
    problem = make_problem([], BLOCK_SIZE, chunks=[(before, tokens)], **shape)
    attend, arrays = CONTENDERS[name](problem)
    turns, repeats = (1, 1) if small else (2 if name in SLOW else 10, 5)
    run = repeated(attend, turns)
    seconds = seconds_of(run, problem.q, arrays, repeats=repeats) / turns
    flops = problem.flops / seconds
    return dict(seconds=seconds, flops=flops, share=flops / PEAK)


def _mixed(problem: Problem) -> Attention:
    def attend(q, problem: Problem):
        return paged_attention_mixed(
            q, *problem[1:3], 0, problem.metadata, scale=problem.scale
        )

    return attend, problem


def _rows(problem: Problem) -> Attention:
    """Each token as a row of its own, as if it were a decode."""

    def attend(q, problem: Problem):
        return paged_attention_mosaic(
            q, *problem[1:3], 0, problem.metadata, scale=problem.scale
        )

    return attend, problem


def _xla(problem: Problem) -> Attention:
    def attend(q, problem: Problem):
        return paged_attention(
            q, *problem[1:3], 0, problem.metadata, scale=problem.scale, backend="xla"
        )

    return attend, problem


def _cudnn(problem: Problem) -> Attention:
    """The attention of cuDNN, over keys and values side by side, with no pages."""
    tokens = problem.q.shape[0]
    if int(problem.metadata.lengths[0]) != 1:
        raise ValueError("its causal mask is for a chunk at the start only")
    blocks = problem.metadata.block_tables[0]
    keys, values = (
        x[0, blocks].reshape(1, -1, *x.shape[3:])[:, :tokens] for x in problem[1:3]
    )

    def attend(q, arrays):
        return jax.nn.dot_product_attention(
            q[None],
            *arrays,
            scale=problem.scale,
            is_causal=True,
            implementation="cudnn",
        )[0]

    return attend, (keys, values)


CONTENDERS: dict[str, Callable[[Problem], Attention]] = {
    "pallas": _mixed,
    "rows": _rows,
    "xla": _xla,
    "cudnn": _cudnn,
}
# What is not worth interpreting; of slow ones, few turns are enough.
NOT_REHEARSED = ("rows", "cudnn")
SLOW = ("rows", "xla")
RANKS = {"cudnn": CUDNN, "rows": ROWS, "xla": XLA}
