"""The persistent compilation cache, across processes."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import pytest

from paged_jax import compilation_cache

# Compiles one program before the cache is enabled and one after; reports JAX's own
# events on the second.
PROGRAM = """
    import collections, json, sys
    import jax
    import jax.numpy as jnp
    from paged_jax import compilation_cache

    jnp.zeros(3).block_until_ready()
    directory = compilation_cache.enable()
    x = jnp.arange(64.0).reshape(8, 8).block_until_ready()
    events = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
    y = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ x), x))(x)
    print(json.dumps({
        "directory": str(directory),
        "hits": events["/jax/compilation_cache/cache_hits"],
        "misses": events["/jax/compilation_cache/cache_misses"],
        "result": float(y.sum()),
    }))
"""


def run_program(directory: Path) -> tuple[dict, str]:
    """Runs PROGRAM in a process of its own; returns its report and its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, "PAGED_JAX_CACHE": str(directory)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


@pytest.fixture(autouse=True)
def jax_config_restored():
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.jax_cache.reset_cache()


@pytest.fixture
def no_variables(monkeypatch):
    for name in compilation_cache.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_second_process_compiles_nothing_and_says_nothing(tmp_path):
    cold, _ = run_program(tmp_path / "cache")
    warm, stderr = run_program(tmp_path / "cache")

    assert (cold["hits"], cold["misses"]) == (0, 1)
    assert (warm["hits"], warm["misses"]) == (1, 0)
    assert warm["result"] == cold["result"]
    assert warm["directory"] == str(tmp_path / "cache")
    # A program compiled for other processor features would be reported here.
    assert stderr == ""


def test_a_torn_entry_is_compiled_again_once(tmp_path):
    cold, _ = run_program(tmp_path)
    long_ago = time.time() - 3600
    entries = list(tmp_path.glob("*-cache"))
    for entry in entries:
        entry.write_bytes(b"")
        os.utime(entry, (long_ago, long_ago))

    again, stderr = run_program(tmp_path)
    assert (again["hits"], again["misses"]) == (0, 1)
    assert again["result"] == cold["result"]
    assert stderr == ""
    warm, _ = run_program(tmp_path)
    assert (warm["hits"], warm["misses"]) == (1, 0)


def test_an_empty_entry_that_may_still_be_written_stays(tmp_path):
    entry = tmp_path / "jit_f-0-cache"
    entry.write_bytes(b"")
    compilation_cache.enable(tmp_path)
    assert entry.exists()


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"PAGED_JAX_CACHE": "a", "JAX_COMPILATION_CACHE_DIR": "b"}, "a"),
        ({"JAX_COMPILATION_CACHE_DIR": "b"}, "b"),
        ({"PAGED_JAX_CACHE": "", "JAX_COMPILATION_CACHE_DIR": "b"}, "b"),
    ],
)
def test_a_variable_names_the_directory(
    tmp_path, monkeypatch, no_variables, variables, expected
):
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert compilation_cache.enable() == tmp_path / expected
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / expected)


def test_an_argument_beats_the_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path / "variable"))
    assert compilation_cache.enable(tmp_path / "given") == tmp_path / "given"
    assert not (tmp_path / "variable").exists()


def test_in_a_source_tree_the_default_is_inside_it(no_variables):
    root = Path(compilation_cache.__file__).resolve().parent.parent
    assert compilation_cache.enable() == root / ".cache" / "jax"


def test_outside_a_source_tree_the_default_is_the_users_cache(
    tmp_path, monkeypatch, no_variables
):
    installed = tmp_path / "site-packages" / "paged_jax" / "compilation_cache.py"
    monkeypatch.setattr(compilation_cache, "__file__", str(installed))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert compilation_cache.enable() == tmp_path / "user" / "paged-jax"


def test_a_named_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/cache cannot be written \(Not a dir"):
        compilation_cache.enable(tmp_path / "file" / "cache")


def test_no_default_that_can_be_written_is_a_warning(
    tmp_path, monkeypatch, no_variables
):
    (tmp_path / "file").write_text("")
    installed = tmp_path / "site-packages" / "paged_jax" / "compilation_cache.py"
    monkeypatch.setattr(compilation_cache, "__file__", str(installed))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="name a directory with PAGED_JAX_CACHE"):
        assert compilation_cache.enable() is None


def test_a_directory_without_write_permission_is_an_error(tmp_path, monkeypatch):
    # Asked, not tried: the superuser, who may run this test, can write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"cannot be written \(Permission denied\)"):
        compilation_cache.enable(tmp_path)
