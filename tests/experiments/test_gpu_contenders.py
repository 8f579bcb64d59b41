"""What the check for GPUs times, without a GPU: shapes, and what becomes a constant."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import compat

if not compat.has_mosaic():
    pytest.skip("needs jax >= 0.11", allow_module_level=True)

from jax._src.cudnn import fused_attention_stablehlo as cudnn

from experiments.gpu_check import bandwidth, prefill, sharing
from experiments.gpu_check.problems import make_problem
from experiments.gpu_check.timing import repeated

# One group and one point of each: 2 MiB of keys, which would be 4 MiB of text.
decode = functools.partial(make_problem, [4096] * 2, 16, kv_heads=1, heads=4)
chunk = functools.partial(make_problem, [], 16, chunks=[(0, 4096)], kv_heads=2, heads=4)


def contenders():
    for name, make in bandwidth.CONTENDERS.items():
        dtype = bandwidth.QUANTISED.get(name, "bfloat16")
        yield pytest.param(functools.partial(decode, dtype=dtype), make, id=name)
    for name, make in prefill.CONTENDERS.items():
        yield pytest.param(chunk, make, id=f"prefill {name}")
    for cascade in (False, True):

        def make(problem, cascade=cascade):
            return sharing.attention(cascade), problem

        yield pytest.param(decode, make, id=f"sharing {cascade}")


@pytest.fixture(autouse=True)
def cudnn_there(monkeypatch):
    """Lets what asks for cuDNN be traced, as with its version 9.12."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)


@pytest.mark.filterwarnings("ignore:.*paged_attention is deprecated")
@pytest.mark.parametrize("problem,make", [*contenders()])
def test_each_attends_and_keeps_no_cache_in_its_program(problem, make):
    problem = problem()
    attend, arrays = make(problem)
    with compat.for_gpu():
        out = jax.eval_shape(repeated(attend, 3), problem.q, arrays)
        jaxpr = jax.make_jaxpr(repeated(attend, 3))(problem.q, arrays)
    assert (out.shape, out.dtype) == (problem.q.shape, problem.q.dtype)
    assert bytes_of_constants(jaxpr.jaxpr, jaxpr.consts) < 2**16


def bytes_of_constants(jaxpr, constants) -> int:
    """Returns the bytes of all constants of a program, those inside included."""
    total = sum(getattr(x, "nbytes", 0) for x in constants)
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            if hasattr(value, "jaxpr") and hasattr(value, "consts"):
                total += bytes_of_constants(value.jaxpr, value.consts)
            elif hasattr(value, "eqns"):
                total += bytes_of_constants(value, ())
    return total


def test_what_a_function_closes_over_is_seen():
    x = jnp.ones(2**16)

    @jax.jit
    def close(q):
        return q + x

    jaxpr = jax.make_jaxpr(close)(x)
    assert bytes_of_constants(jaxpr.jaxpr, jaxpr.consts) == x.nbytes


def test_the_lowered_text_of_the_kernels_stays_small():
    problem = decode()
    for name in ("pallas", "contiguous", "xla"):
        attend, arrays = bandwidth.CONTENDERS[name](problem)
        with compat.for_gpu():
            traced = repeated(attend, 2).trace(problem.q, arrays)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert len(text) < 2**20, name
