"""Beam searches without a model: they repeat which beam recorded ones continued.

How much beams share is decided by which beam each survivor continues, and that by the
model. A simulation has none: each of its searches takes the ancestry of one that
SmolLM2-135M has made (`experiments/data/beam_traces.json`, made by
`experiments.beam_traces`). That another model's beams part as these do is an
assumption. The ancestry stands in for what a forward pass finds, the log-probabilities
of candidates, so that all else is done by the library's own code.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.beam_traces import load_traces
from experiments.errors import UserError
from experiments.simulator.trace import Trace
from paged_jax.beams import BeamState, NewBeams, Stopping, submit_beams
from paged_jax.new_arrays import on_device, zeros
from paged_jax.sampling import Candidates
from paged_jax.state import SchedulerState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ancestry:
    """Recorded searches, and which of them each simulated one repeats.

    Attributes:
      parents: i8[A, L, K]. After each token of each recorded search, the number of the
        beam that each of K continued; the best beam first.
      steps: i32[A]. How many of the L are recorded, 2 or more.
      search: i32[R + 1]. Of each request slot with a beam, the recorded search.
    """

    parents: jax.Array
    steps: jax.Array
    search: jax.Array


class EnteringBeams(NamedTuple):
    """What requests that enter say of their beams, arrays of W rows.

    Attributes:
      width: i32[W]. Beams of the search; 0 for padding.
      number: i32[W]. Which of them each is.
      search: i32[W]. The recorded search that it repeats.
    """

    width: jax.Array
    number: jax.Array
    search: jax.Array


def recorded_parents(width: int) -> list[np.ndarray]:
    """Returns i8[steps, K] of each of the searches that come with the project.

    Args:
      width: K, beams.

    Raises:
      UserError: no search of that width is recorded.
    """
    traces = load_traces()
    if width not in traces:
        known = ", ".join(map(str, sorted(traces)))
        raise UserError(
            f"beam width {width}: no search of that width is recorded to repeat; take "
            f"one of {known}"
        )
    return [trace.parents for trace in traces[width]]


def draw_searches(
    rng: np.random.Generator, count: int, recorded: Sequence[np.ndarray]
) -> np.ndarray:
    """Draws the recorded search that each request repeats, i64[N].

    A search is as likely as it has steps after the first, so that a step of a short one
    is not repeated more often than a step of a long one.

    Args:
      rng: source of randomness.
      count: N, requests.
      recorded: the searches, as from `recorded_parents`.
    """
    steps = np.array([max(len(parents) - 1, 0) for parents in recorded])
    return rng.choice(len(recorded), count, p=steps / steps.sum())


class Searches:
    """The host's side: the recorded searches, and which requests repeat which."""

    def __init__(self, width: int, recorded: Sequence[np.ndarray] | None = None):
        """Checks recorded searches.

        Args:
          width: K, beams of each; 1: there are none.
          recorded: their parents, i8[steps, K]; None: those that come with the project.
            Of one with fewer than two steps, what is missing: all beams continue the
            first one, then each itself.

        Raises:
          UserError: none is recorded, or parents of another width or that no beam is,
            or a first step in which not all beams come from the prompt's only one.
        """
        self._width = width
        if recorded is None:
            recorded = recorded_parents(width) if width > 1 else []
        for number, parents in enumerate(recorded):
            if len(parents) and parents.shape[1:] != (width,):
                raise UserError(
                    f"recorded search {number} has parents of shape {parents.shape}; "
                    f"beam width {width} needs (steps, {width})"
                )
            if ((parents < 0) | (parents >= width)).any() or parents[:1].any():
                raise UserError(
                    f"recorded search {number} is none of {width} beams: parents are "
                    f"from 0 to {width - 1}, and all 0 in the first step"
                )
        self._recorded = recorded

    def on_device(self, num_requests: int) -> Ancestry | tuple[()]:
        """Returns the searches as arrays, for `num_requests` slots; () if none."""
        if self._width == 1:
            return ()
        steps = [max(len(parents), 2) for parents in self._recorded]
        table = np.zeros((len(steps), max(steps), self._width), np.int8)
        table[:, 1] = np.arange(self._width)
        for row, parents in zip(table, self._recorded, strict=True):
            if len(parents):
                row[: len(parents)] = parents
        return Ancestry(
            parents=on_device(table),
            steps=on_device(np.array(steps, np.int32)),
            search=zeros(num_requests + 1),
        )

    def beams_of(self, taken: Sequence[Trace], rows: int) -> EnteringBeams | tuple[()]:
        """Returns the beams of requests that enter, padded to W `rows`; () if none.

        Raises:
          UserError: searches of another width, or requests that are none, or beams of
            one request with different lengths, or searches that are not recorded.
        """
        width, known = self._width, len(self._recorded)
        for trace in taken:
            if trace.beam_width != width:
                raise UserError(
                    f"the trace has beam width {trace.beam_width}, and "
                    f"engine.max_beam_width is {width}; make them the same"
                )
            if width > 1 and (trace.output_len != trace.output_len[:, :1]).any():
                raise UserError(
                    "the beams of a request end at once; give all the same output_len"
                )
        if width == 1:
            return ()
        of_request = np.concatenate([trace.search for trace in taken])
        for unknown in of_request[(of_request < 0) | (of_request >= known)][:1]:
            raise UserError(
                f"a request repeats search {unknown}, and {known} are recorded; take "
                f"one from 0 to {known - 1}"
            )
        beams = np.zeros((3, rows), np.int32)
        beams[:, : len(of_request) * width] = (
            np.full(len(of_request) * width, width),
            np.tile(np.arange(width), len(of_request)),
            np.repeat(of_request, width),
        )
        return EnteringBeams(*map(jnp.array, beams))


def enter_beams(
    beams: BeamState, ancestry: Ancestry, slots: jax.Array, new: EnteringBeams
) -> tuple[BeamState, Ancestry]:
    """Puts beams into request slots, i32[W] (R for padding)."""
    rows = slots.shape[0]
    asked = NewBeams(
        width=new.width,
        length_penalty=jnp.ones(rows, jnp.float32),
        stopping=jnp.full(rows, Stopping.HOPELESS, jnp.int32),
    )
    search = ancestry.search.at[slots].set(new.search)
    return (
        submit_beams(beams, slots, asked, new.number),
        dataclasses.replace(ancestry, search=search),
    )


def repeat_step(ancestry: Ancestry, state: SchedulerState) -> Candidates:
    """Returns candidates of which the best k are those that were recorded.

    The step after token i of a request repeats step i of the recorded search. Beyond
    the last one it goes round in the recorded steps without the first, in which all
    beams come from the prompt.

    The j-th best of k gets the total -j: beam p, whose total is -p, offers a candidate
    of log-probability p - j for each child j, and else none. Sums of such numbers are
    exact, and no text ends before its length.

    Args:
      ancestry: the recorded searches.
      state: scheduler's state, the step's samples not yet counted.

    Returns:
      Arrays of [S, K]; without meaning in rows that are no beams.
    """
    requests, slot = state.requests, state.sequences.request
    assert isinstance(state.beams, BeamState)
    search = ancestry.search[slot]
    step = requests.length[slot] - requests.prompt_len[slot]
    later = 1 + (step - 1) % (ancestry.steps[search] - 1)
    parents = ancestry.parents[search, jnp.where(step > 0, later, 0)]
    own = state.beams.number[slot][:, None]
    child = jnp.arange(parents.shape[1], dtype=jnp.int32)
    return Candidates(
        tokens=jnp.broadcast_to(child, parents.shape),
        logprobs=jnp.where(parents == own, jnp.float32(own - child), -jnp.inf),
    )
