"""Times steps of the real engine: sequences that decode, or a prompt."""

import dataclasses
import time

import jax
import jax.numpy as jnp

from experiments.machine_speed import Clock
from paged_jax import EngineConfig
from paged_jax.device_loop import DeviceLoop
from paged_jax.memory_managers import MANAGERS
from paged_jax.model_checks import choose_backend
from paged_jax.model_forward import ModelForward, NoModel
from paged_jax.models.checkpoint import LoadedModel
from paged_jax.schedule_timing import greedy_requests
from paged_jax.step import Program, run_steps
from paged_jax.submit import init_scheduler

_MANAGER = MANAGERS["paged"]


class StepBench:
    """A model's serving loop with rows, blocks and tables enough for all points.

    Attributes:
      model: the model.
      config: the loop's settings.
      program: its static part.
      loop: the loop.
    """

    def __init__(
        self,
        model: LoadedModel,
        points: list[tuple[int, int]],
        steps: int,
        clock: Clock = time.perf_counter,
        longest_prompt: int = 0,
    ):
        """Prepares memory; compiles nothing yet.

        Args:
          model: loaded, and packed if it is to be fast.
          points: sequences, and tokens of each before the first step.
          steps: most that are timed in one go.
          clock: in seconds.
          longest_prompt: most tokens of a prompt that is timed.
        """
        self.model, self.clock = model, clock
        c = model.config
        rows = max(batch for batch, _ in points)
        most_tokens = max(longest_prompt, *(context for _, context in points))
        longest = most_tokens + steps + 2
        self.config = EngineConfig(
            max_seqs=rows,
            max_requests=rows,
            max_model_len=longest,
            max_prefixes=0,
            token_budget=max(rows, longest_prompt, 8),
            num_blocks=max(blocks_of(point, steps) for point in points)
            + EngineConfig().block_size,
            steps_per_sync=steps,
        )
        self.forward = ModelForward(c, choose_backend("auto", c.head_dim, c.dtype))
        static = self.config.step_config()
        self.program = Program(static, self.forward, _MANAGER.on_device())
        # Fills tables and lengths as a prefill would, without computing anything.
        tokens = rows * longest
        instant = dataclasses.replace(static, token_budget=tokens, buckets=(tokens,))
        self._instant = Program(instant, NoModel(), _MANAGER.on_device())
        self._fill = jax.jit(run_steps, static_argnums=0, donate_argnums=2)
        self.loop = DeviceLoop(self.program, _MANAGER, self.config, c, model.params)

    def prepare(self, batch: int, context: int) -> None:
        """Lets `batch` sequences of `context` tokens decode from the next step on."""
        most = self.config.max_model_len - context
        self._submit(batch, context, most)
        self.loop.state = jax.block_until_ready(
            self._fill(self._instant, None, self.loop.state, jnp.int32(1))
        )

    def _submit(self, batch: int, prompt: int, output: int) -> None:
        """Empties the engine, and hands it so many requests."""
        state = self.loop.state
        scheduler = init_scheduler(self.program.config, _MANAGER, False)
        self.loop.state = dataclasses.replace(state, scheduler=scheduler)
        self.loop.submit(greedy_requests(self.config, [(prompt, [output])] * batch))

    def step_seconds(self, batch: int, context: int, steps: int) -> float:
        """Returns the time of one of `steps` steps, their report included."""
        self.prepare(batch, context)
        self.loop.run(1)
        started = self.clock()
        self.loop.run(steps)
        return (self.clock() - started) / steps

    def prompt_seconds(self, tokens: int) -> float:
        """Returns the time of a step that computes a prompt, its report included."""
        self._submit(1, tokens, 2)
        jax.block_until_ready(self.loop.state)
        started = self.clock()
        self.loop.run(1)
        return self.clock() - started


def blocks_of(point: tuple[int, int], steps: int) -> int:
    """Returns the blocks that a batch takes by the end of its steps."""
    batch, context = point
    return batch * -(-(context + steps + 2) // EngineConfig().block_size)
