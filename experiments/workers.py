"""Runs independent pieces of work in several processes, or on a Ray cluster."""

import concurrent.futures
import concurrent.futures.process
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

from experiments.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

LAUNCHERS = ("processes", "ray")
# XLA's threads would take the cores of other workers, and loops of small operations, as
# the simulator's, take twice as long with several. The variable is how many it makes.
_ONE_THREAD = (
    "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=1"
)
_THREADS = {"NPROC": "1"}


def count_cores() -> int:
    """Returns how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def run_all(
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    workers: int = 0,
    launcher: str = "processes",
) -> Generator[tuple[int, R], None, None]:
    """Yields the number of an item and its result, as they are done.

    Stopping the iteration, by an exception or by closing it, ends the workers.

    Args:
      function: of a module's top level, for it goes to other processes.
      items: what it is called with.
      workers: processes; 0: one for each core, and with Ray, as the cluster allows.
      launcher: one of `LAUNCHERS`.

    Raises:
      UserError: Ray is not installed, there is no such launcher, or a worker died.
      Exception: whatever `function` raises.
    """
    todo = list(items)
    if launcher == "ray":
        yield from _on_ray(function, todo, workers)
    elif launcher == "processes":
        yield from _in_processes(function, todo, workers or count_cores())
    else:
        raise UserError(f"launcher {launcher!r} is not one of {', '.join(LAUNCHERS)}")


def _in_processes(
    function: Callable[[T], R], todo: list[T], workers: int
) -> Generator[tuple[int, R], None, None]:
    if not todo:
        return
    # Not forked: JAX has threads.
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment(**_variables()))
        pool = concurrent.futures.ProcessPoolExecutor(
            min(workers, len(todo)),
            mp_context=context,
            initializer=_start_worker,
            initargs=(os.getpid(),),
        )
        stack.callback(_end, pool)
        futures = {pool.submit(function, item): i for i, item in enumerate(todo)}
        for future in concurrent.futures.as_completed(futures):
            try:
                result = future.result()
            except concurrent.futures.process.BrokenProcessPool:
                raise UserError(
                    "a worker was killed, perhaps for want of memory; what was done is "
                    "kept: use fewer --workers, and --resume"
                ) from None
            yield futures[future], result


def _on_ray(
    function: Callable[[T], R], todo: list[T], workers: int
) -> Generator[tuple[int, R], None, None]:
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "--launcher=ray needs Ray: pip install 'paged-jax[ray]', or leave it out"
        ) from None
    started = not ray.is_initialized()
    if started:
        # An address in RAY_ADDRESS is that of a cluster; without one it is local.
        cluster = os.environ.get("RAY_ADDRESS")
        local: dict[str, Any] = {} if cluster else {"num_cpus": workers or None}
        ray.init(include_dashboard=False, log_to_driver=False, **local)
    try:
        variables = _variables() | {
            # The function is imported there, from the same places if they exist.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        options: Any = {"num_cpus": 1, "runtime_env": {"env_vars": variables}}
        remote: Any = ray.remote(**options)(function)
        waiting = {remote.remote(item): i for i, item in enumerate(todo)}
        while waiting:
            [done], _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), ray.get(done)
    finally:
        if started:
            ray.shutdown()


def _start_worker(parent: int) -> None:
    """Leaves Ctrl-C to the parent, which ends its workers; and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        # A parent that is killed cannot end its workers.
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _end(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()


def _variables() -> dict[str, str]:
    """Returns the environment of a worker."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_ONE_THREAD}".strip()
    return {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | _THREADS


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Sets variables that the processes started within inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
