"""The same load in Vidur (Agrawal et al., MLSys 2024), where it is installed.

For its speed only. Vidur's vLLM scheduler batches prompts and decodes apart, so that it
takes other steps than ours; what a step takes is not predicted from Vidur's profiles,
which would have to be downloaded, but is the same formula as here.
"""

# Vidur is not among the project's requirements.
# pyright: reportMissingImports=false

import importlib.util
import logging
import pathlib
import tempfile
import time

from experiments.simulator.trace import Trace
from paged_jax.config import StepConfig


def is_installed() -> bool:
    """Returns whether there is a Vidur to import."""
    return importlib.util.find_spec("vidur") is not None


def time_vidur(
    config: StepConfig, trace: Trace, step_s: float, row_s: float
) -> tuple[int, float]:
    """Serves a trace in Vidur.

    Args:
      config: static settings, from `run.simulator_config`.
      trace: the requests, of one sequence each.
      step_s: what a step takes.
      row_s: what each of its sequences adds.

    Returns:
      Steps, and the seconds of the processor that they took.
    """
    logging.disable(logging.INFO)  # for good: Vidur tells each of its settings
    from vidur._native.entities import ExecutionTime
    from vidur.config import (
        CacheConfig,
        ClusterConfig,
        MetricsConfig,
        ReplicaConfig,
        SimulationConfig,
        TraceRequestGeneratorConfig,
        VllmSchedulerConfig,
    )
    from vidur.entities import Replica
    from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
    from vidur.simulator import Simulator
    from vidur.types import ExecutionTimePredictorType

    class Formula:
        """In place of a predictor; counts the steps."""

        steps = 0

        def __init__(self, **_):
            pass

        def get_execution_time(self, batch, stage):
            Formula.steps += 1
            milliseconds = 1e3 * (step_s + row_s * len(batch.requests))
            return ExecutionTime(1, *[0.0] * 13, milliseconds)

    kind = ExecutionTimePredictorType.RANDOM_FORREST
    ExecutionTimePredictorRegistry.unregister(kind)
    ExecutionTimePredictorRegistry.register(kind, Formula)
    # Its numbers go on from one simulation to the next, and the scheduler begins at 0.
    Replica._id = -1
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.csv"
        rows = zip(trace.arrival, trace.prompt_len, trace.output_len[:, 0])
        lines = [f"day,{when},{prompt},{output}" for when, prompt, output in rows]
        head = "Date,Time,PromptTokenCount,CompletionTokenCount"
        path.write_text("\n".join([head, *lines]), "utf-8")
        simulator = Simulator(
            SimulationConfig(
                log_level="error",
                cluster_config=ClusterConfig(
                    replica_config=ReplicaConfig(
                        num_pipeline_stages=1, tensor_parallel_size=1
                    ),
                    cache_config=CacheConfig(
                        block_size=config.block_size, num_blocks=config.num_blocks
                    ),
                    replica_scheduler_config=VllmSchedulerConfig(
                        batch_size_cap=config.max_seqs,
                        max_tokens_in_batch=config.token_budget,
                    ),
                ),
                request_generator_config=TraceRequestGeneratorConfig(
                    trace_file=str(path),
                    date="day",
                    prefill_scale_factor=1.0,
                    decode_scale_factor=1.0,
                    time_scale_factor=1.0,
                    max_tokens=config.max_model_len,
                ),
                metrics_config=MetricsConfig(
                    write_metrics=False,
                    enable_chrome_trace=False,
                    store_plots=False,
                    store_utilization_metrics=False,
                    output_dir=folder,
                ),
            )
        )
        started = time.process_time()
        simulator.run()
        return Formula.steps, time.process_time() - started
