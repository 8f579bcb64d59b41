"""The memory split is the paper's; the cost model is the physics that it says."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from experiments.errors import UserError
from experiments.simulator.costs import Overheads, RooflineCosts
from experiments.simulator.hardware import GIB, HARDWARE
from experiments.simulator.memory_split import split_memory
from experiments.simulator.model_profiles import MODELS
from experiments.simulator.work import Work

ROOT = Path(__file__).resolve().parents[3]
A100, BIG = HARDWARE["a100-40gb"], HARDWARE["a100-80gb"]


# Table 1 of the paper: GPUs, parameters in GB, KV memory in GB, slots. Blocks: what its
# set-up gives; the artifact replicates some small weights, and has 603 and 3753.
@pytest.mark.parametrize(
    "name, hardware, devices, params, kv, slots, blocks",
    [
        ("opt-13b", A100, 1, 26, 12, 15700, 983),
        ("opt-66b", A100, 4, 132, 21, 9700, 607),
        ("opt-175b", BIG, 8, 346, 264, 60100, 3761),
    ],
)
def test_table_1(name, hardware, devices, params, kv, slots, blocks):
    model = MODELS[name]
    split = split_memory(model, hardware, devices)
    assert split.num_blocks == blocks
    assert model.weight_bytes / 1e9 == pytest.approx(params, rel=0.02)
    assert split.kv * devices / 2**30 == pytest.approx(kv, rel=0.02)
    assert split.num_blocks * 16 == pytest.approx(slots, rel=0.01)


def test_every_number_of_an_accelerator_stands_in_the_table_of_constants():
    text = (ROOT / "docs/reproduction.md").read_text("utf-8")
    section = text.split("### Constants")[1].split("###")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ")]
    kinds = {row.split(" | ")[2] for row in rows[2:]}
    assert kinds == {"physics", "published", "fitted", "measured", "assumed"}
    numbers = set(re.findall(r"[\d.]+", "".join(rows)))
    for hardware in HARDWARE.values():
        for value, unit in (
            (hardware.memory_bytes, GIB),
            (hardware.bandwidth, 1e9),
            (hardware.flops, 1e12),
            (hardware.link_bandwidth, 1e9),
            (hardware.host_bandwidth, 1e9),
        ):
            assert f"{value / unit:g}" in numbers


@pytest.mark.parametrize(
    "name, bytes_per_token",
    [("opt-13b", 819_200), ("opt-66b", 2_359_296), ("opt-175b", 4_718_592)],
)
def test_bytes_of_a_token(name, bytes_per_token):
    assert MODELS[name].kv_bytes_per_token == bytes_per_token


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match="OPT-66B leaves no memory"):
        split_memory(MODELS["opt-66b"], A100, 2)


def work(**fields):
    values = dict.fromkeys(Work._fields, 0.0) | fields
    return Work(**{name: jnp.float32(value) for name, value in values.items()})


DECODE = dict(rows=1, tokens=1, sampled=1, members=1, longest_chunk=1)


def test_one_decode_reads_the_weights_and_its_context():
    model = MODELS["opt-13b"]
    seconds = RooflineCosts(model, A100)(work(**DECODE, context=1000, pairs=1000))
    weights = model.weight_bytes - 2050 * model.hidden_size * 2  # no table of positions
    expected = (weights + 1000 * model.kv_bytes_per_token) / A100.bandwidth
    assert float(seconds) == pytest.approx(expected, rel=1e-5)


def test_a_long_prompt_is_bound_by_arithmetic():
    model = MODELS["opt-13b"]
    tokens = 2048.0
    prompt = dict(DECODE, tokens=tokens, longest_chunk=tokens, context=tokens)
    prompt["pairs"] = tokens * (tokens + 1) / 2
    seconds = float(RooflineCosts(model, A100)(work(**prompt)))
    products = 2 * model.layer_weights * model.num_layers * tokens
    assert seconds > products / A100.flops
    assert seconds < 1.1 * products / A100.flops


def test_more_devices_are_faster_but_for_what_they_send():
    model = MODELS["opt-66b"]
    one = RooflineCosts(model, A100, num_devices=1)(work(**DECODE, context=500))
    four = RooflineCosts(model, A100, num_devices=4)(work(**DECODE, context=500))
    assert float(one) / 4 < float(four) < float(one) / 3.9


def test_overheads_add_up():
    costs = RooflineCosts(MODELS["opt-13b"], A100)
    slow = RooflineCosts(
        MODELS["opt-13b"], A100, overheads=Overheads(0.01, 0.001, 1e-6, 3e-6)
    )
    base = work(**dict(DECODE, rows=8), swapped_out_blocks=2, swapped_in_blocks=1)
    more = float(slow(base)) - float(costs(base))
    assert more == pytest.approx(0.01 + 8 * 0.001 + 80 * (1e-6 + 2 * 3e-6), rel=1e-3)


def test_a_padded_batch_costs_as_if_all_were_the_longest():
    costs = RooflineCosts(MODELS["opt-13b"], A100, padded=True)
    ended = work(
        rows=1, tokens=1, sampled=1, context=100, pairs=100, members=5,
        longest_chunk=1, longest_context=1000,
    )  # fmt: skip
    full = ended._replace(rows=jnp.float32(5), tokens=jnp.float32(5))
    assert float(costs(ended)) == float(costs(full._replace(context=jnp.float32(1))))
    unpadded = RooflineCosts(MODELS["opt-13b"], A100)
    assert float(costs(ended)) > float(unpadded(ended))
