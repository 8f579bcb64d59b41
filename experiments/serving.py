"""Serves one workload with one engine: what a cell does, timed."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments import environment
from experiments.errors import UserError
from experiments.preemption_cost import PreemptionCost, measure_preemption
from experiments.settings import WorkloadSettings
from experiments.usage import OthersMeter
from experiments.workloads import Request, Workload
from paged_jax import SamplingParams

_COMPILED = "/jax/core/compile/backend_compile_duration"
# A host that waits for the next arrival looks at the clock at least this often.
_LONGEST_SLEEP_S = 0.05


@dataclasses.dataclass(frozen=True)
class Served:
    """What happened to one request; times in seconds since the start of the run.

    Attributes:
      id: the request.
      digest: is the same wherever the same is asked.
      prompt_id: the text it asked.
      prompt_ids: tokens of the prompt.
      token_ids: generated tokens.
      text: their text.
      arrival: when it arrived, by the workload.
      first_token: when its first token was there.
      finished: when its last token was there.
      further: generated tokens of its sequences after the first.
      beam_parents: of a beam search, as in `RequestOutput`; else None.
    """

    id: str
    digest: str
    prompt_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    arrival: float
    first_token: float
    finished: float
    further: tuple[tuple[int, ...], ...] = ()
    beam_parents: tuple[tuple[int, ...], ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all its sequences."""
        return len(self.token_ids) + sum(map(len, self.further))


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of serving a workload.

    Attributes:
      served: the requests, in the order of the workload.
      log: f32[iterations, F], see `paged_jax.step_log.Field`.
      log_times: f64[iterations], when each step ended, seconds since the start.
      wall_s: from the first request to the last token.
      device_s: of that, time in the device's loops.
      rate: arrivals, requests a second; None if all were there at time 0.
      compilations: programs compiled while serving.
      host_syncs: blocking reads of device values.
      host_read_bytes: what these brought to the host.
      schedule_us: time of one step without the model.
      warmup_s: compiling or loading what had not been, before the clock started.
      block_table_bytes: the block tables of all sequence rows.
      block_bytes: keys and values of one block.
      total_slots: slots of the pool.
      peak_rss_bytes: most memory the process held.
      memory_plan: rows of a table: what, how much, how it comes about.
      preemption: what preempting a sequence takes; None if it was not measured.
      other_cores: that other programs used meanwhile, in the mean; None if not known.
    """

    served: list[Served]
    log: np.ndarray
    log_times: np.ndarray
    wall_s: float
    device_s: float
    rate: float | None
    compilations: int
    host_syncs: int
    host_read_bytes: int
    schedule_us: float
    warmup_s: float
    block_table_bytes: int
    block_bytes: int
    total_slots: int
    peak_rss_bytes: int
    memory_plan: list[tuple[str, str, str]]
    preemption: PreemptionCost | None = None
    other_cores: float | None = None


def run_cell(
    engine: Any,
    settings: WorkloadSettings,
    workload: Workload,
    rate: float | None = None,
    *,
    on_ready: Callable[[list[tuple[str, str, str]]], None] = lambda plan: None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Run:
    """Serves a workload to its end.

    The clock starts when everything is compiled, and stops when the last request has
    ended: the ramp-up and the tail count, and so does computing a shared prefix.

    Args:
      engine: a fresh `paged_jax.Engine`.
      settings: what the workload was made from.
      workload: the requests.
      rate: requests a second, for workloads that arrive over time.
      on_ready: called with the memory plan when everything is compiled.
      on_progress: called with the number of requests that ended, now and then.

    Raises:
      UserError: a request was refused, because it does not fit.
    """
    environment.reset_peak_rss()
    started = time.perf_counter()
    engine.warmup()
    warmup_s = time.perf_counter() - started
    plan = engine.memory_plan
    on_ready(plan.as_rows())
    engine.reset_stats()

    compilations = _CompilationCounter()
    clock, others = _Clock(), OthersMeter()
    prefix = None
    with compilations:
        if settings.sharing and workload.prefix:
            prefix = engine.register_prefix(list(workload.prefix))
        outputs = _serve(engine, settings, workload, rate, clock, on_progress)
        wall_s, other_cores = clock.now(), others.cores()
    static = engine.config.step_config()
    log, stats = np.asarray(engine.log), engine.stats
    peak = environment.peak_rss_bytes()
    if prefix is not None:
        engine.release_prefix(prefix)
    served = [_served(request, outputs, rate, clock) for request in workload.requests]
    return Run(
        served=served,
        log=log,
        log_times=clock.step_times(len(log)),
        wall_s=wall_s,
        device_s=stats.device_seconds,
        rate=rate,
        compilations=compilations.count,
        host_syncs=stats.host_syncs,
        host_read_bytes=stats.host_read_bytes,
        schedule_us=engine.schedule_us(),
        warmup_s=warmup_s,
        block_table_bytes=4 * static.num_rows * static.table_width,
        block_bytes=plan.block,
        total_slots=static.num_blocks * static.block_size,
        peak_rss_bytes=peak,
        memory_plan=[tuple(row) for row in plan.as_rows()],
        preemption=measure_preemption(engine, settings.preempted_tokens)
        if settings.preempted_tokens
        else None,
        other_cores=other_cores,
    )


class _Clock:
    """Seconds since it was made, and how many steps were done when."""

    def __init__(self):
        self.start = time.perf_counter()
        self._marks = [(0, 0.0)]

    def now(self) -> float:
        return time.perf_counter() - self.start

    def mark(self, iterations: int) -> None:
        self._marks.append((iterations, self.now()))

    def step_times(self, iterations: int) -> np.ndarray:
        """Returns f64[iterations]: the end of each step, interpolated between marks."""
        counts, times = np.array(self._marks).T
        return np.interp(np.arange(1, iterations + 1), counts, times)


class _CompilationCounter:
    """Counts the programs that XLA compiles, or loads from its cache, in a `with`."""

    _listening = False
    _current: "_CompilationCounter | None" = None

    def __init__(self):
        self.count = 0

    def __enter__(self):
        # JAX cannot forget a listener: one is registered for good.
        if not _CompilationCounter._listening:
            jax.monitoring.register_event_duration_secs_listener(self._on_event)
            _CompilationCounter._listening = True
        _CompilationCounter._current = self
        return self

    def __exit__(self, *error):
        _CompilationCounter._current = None

    @staticmethod
    def _on_event(event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs, kwargs
        current = _CompilationCounter._current
        if current is not None and event == _COMPILED:
            current.count += 1


def _serve(engine, settings, workload, rate, clock, on_progress) -> dict[str, Any]:
    """Submits the requests when they arrive; returns the outputs by request id."""
    waiting = list(workload.requests)
    total = len(waiting)
    seconds = 1 / rate if rate else 0.0
    outputs: dict[str, Any] = {}
    while len(outputs) < total:
        arrived = 0
        now = clock.now()
        while arrived < len(waiting) and waiting[arrived].arrival * seconds <= now:
            request = waiting[arrived]
            engine.submit(
                list(request.tokens),
                _params(request),
                request_id=request.id,
            )
            arrived += 1
        del waiting[:arrived]
        if not engine.has_unfinished():
            pause = waiting[0].arrival * seconds - clock.now()
            time.sleep(min(max(pause, 0.0), _LONGEST_SLEEP_S))
            continue
        offline = engine.config.steps_per_sync_offline
        steps = settings.arrival_steps if waiting else offline
        for output in engine.step(max_steps=steps):
            if output.finished:
                outputs[output.request_id] = output
        clock.mark(engine.stats.iterations)
        on_progress(len(outputs))
    return outputs


def _params(request: Request) -> SamplingParams:
    """Returns what a request asks for; its output is as long as the workload says."""
    forced = {"n": request.n, "max_tokens": request.output_len, "ignore_eos": True}
    if request.beam_width > 1:
        return SamplingParams(beam_width=request.beam_width, **forced)
    return SamplingParams(temperature=request.temperature, seed=request.seed, **forced)


def _served(request, outputs, rate, clock) -> Served:
    output = outputs[request.id]
    metrics = output.metrics
    for completion in output.outputs:
        if completion.finish_reason != "length" or (
            len(completion.token_ids) != request.output_len
        ):
            raise UserError(
                f"request {request.id} of {len(request.tokens)} + {request.output_len} "
                f"tokens ended with {completion.finish_reason!r} after "
                f"{len(completion.token_ids)}; raise engine.full_length_requests"
            )
    sequences = [tuple(map(int, one.token_ids)) for one in output.outputs]
    arrival = request.arrival / rate if rate else 0.0
    return Served(
        id=request.id,
        digest=request.digest,
        prompt_id=request.prompt_id,
        prompt_ids=tuple(request.tokens),
        token_ids=sequences[0],
        text=output.outputs[0].text,
        arrival=arrival,
        first_token=_finite(metrics.first_token_time) - clock.start,
        finished=_finite(metrics.finished_time) - clock.start,
        further=tuple(sequences[1:]),
        beam_parents=output.beam_parents,
    )


def _finite(seconds: float | None) -> float:
    return math.nan if seconds is None else seconds
