import pytest

from experiments.base_config import base_config
from experiments.command_line import parse
from experiments.errors import UserError
from experiments.sweep import expand, parse_sweeps
from paged_jax import ConfigError


@pytest.fixture
def config():
    config = base_config()
    config.seed = 0
    return config


def cells_of(*words):
    command = parse(list(words))
    sweeps = parse_sweeps(command.config, command.config.sweep)
    sweeps |= parse_sweeps(command.config, command.sweep)
    return expand(command.config, sweeps, command.overridden)


def test_values_have_the_types_of_their_keys(config):
    lines = [
        "engine.block_size=8, 16",
        "engine.batching=static,continuous",
        "config.workload.rate=1,2.5",
        "engine.chunked_prefill=true,false",
        "engine.num_blocks=100",
    ]
    assert parse_sweeps(config, lines) == {
        "engine.block_size": (8, 16),
        "engine.batching": ("static", "continuous"),
        "workload.rate": (1.0, 2.5),
        "engine.chunked_prefill": (True, False),
        "engine.num_blocks": (100,),
    }


@pytest.mark.parametrize(
    "line,message",
    [
        ("engine.blocksize=8", "did you mean engine.block_size"),
        ("engine.block_size", "KEY=VALUE"),
        ("engine.block_size=", "KEY=VALUE"),
        ("engine.block_size=8,,16", "values of type int"),
        ("engine.block_size=8,x", "values of type int"),
        ("engine.chunked_prefill=perhaps", "values of type bool"),
        ("cells=1", "cannot be swept"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused(config, line, message):
    with pytest.raises(UserError, match=message):
        parse_sweeps(config, [line])


def test_a_key_is_swept_once(config):
    with pytest.raises(UserError, match="twice"):
        parse_sweeps(config, ["engine.block_size=8", "engine.block_size=16"])


def test_the_product_of_two_sweeps(config):
    sweeps = {"engine.block_size": (8, 16), "engine.batching": ("static", "continuous")}
    cells = expand(config, sweeps)
    assert [(c.engine.block_size, c.engine.batching) for c in cells] == [
        (8, "static"),
        (8, "continuous"),
        (16, "static"),
        (16, "continuous"),
    ]
    assert len({c.key for c in cells}) == 4


def test_the_headline_has_the_cells_of_the_ablation():
    cells = cells_of()
    offline = [c for c in cells if c.workload.name == "offline"]
    assert {(c.engine.memory, c.engine.batching) for c in offline} == {
        (memory, batching)
        for memory in ("max", "pow2", "oracle", "paged")
        for batching in ("static", "continuous")
    }
    others = [
        (c.workload.name, c.engine.memory, c.engine.batching, c.workload.sharing)
        for c in cells
        if c.workload.name != "offline"
    ]
    assert others == [
        ("poisson", "max", "static", False),
        ("poisson", "paged", "continuous", False),
        ("system_prompt", "paged", "continuous", False),
        ("system_prompt", "paged", "continuous", True),
    ]


def test_cells_differ_in_memory_manager_and_batching_only():
    offline = [c for c in cells_of() if c.workload.name == "offline"]
    for cell in offline:
        for field, value in vars(cell.engine).items():
            if field not in ("memory", "batching"):
                assert value == getattr(offline[0].engine, field), field
        assert cell.workload == offline[0].workload


def test_a_sweep_overrides_the_cells_and_equal_ones_run_once():
    cells = cells_of("--sweep=engine.batching=static", "--config.workload.rate=1")
    offline = [c for c in cells if c.workload.name == "offline"]
    assert [c.engine.memory for c in offline] == ["max", "pow2", "oracle", "paged"]
    assert len(cells) == len({c.key for c in cells}) == 8


def test_the_sweep_of_a_configuration_can_be_replaced():
    sizes = [c.engine.block_size for c in cells_of("--config=block_size")]
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    words = ("--config=block_size", "--sweep=engine.block_size=16,64")
    assert [c.engine.block_size for c in cells_of(*words)] == [16, 64]


def test_an_override_that_every_cell_would_undo_is_refused():
    with pytest.raises(UserError, match="use --sweep engine.memory=VALUE"):
        cells_of("--config.engine.memory=max")


def test_settings_out_of_range_are_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="block_size is 3"):
        cells_of("--sweep=engine.block_size=16,3")
    with pytest.raises(ConfigError, match="KV budget is 8 blocks"):
        cells_of("--config.engine.full_length_requests=0.5")
    with pytest.raises(UserError, match="workload.lengths"):
        cells_of("--config.workload.lengths=orca")


def test_only_paged_memory_can_share():
    with pytest.raises(UserError, match="only paged memory can share"):
        cells_of("--config=block_size", "--config.engine.memory=max")


@pytest.mark.parametrize(
    "cells", [(), ("max",), ({"engine.memoryy": "max"},), ({"engine.block_size": "8"},)]
)
def test_malformed_cells_are_refused(config, cells):
    config.cells = cells
    with pytest.raises(UserError):
        expand(config, {})


def test_the_identity_of_a_cell_is_that_of_the_summary():
    cell = cells_of("--config=block_size")[0]
    assert cell.identity == {
        "memory": "paged",
        "batching": "continuous",
        "sharing": True,
        "block_size": 1,
        "workload": "system_prompt",
        "engine.block_size": 1,
    }
