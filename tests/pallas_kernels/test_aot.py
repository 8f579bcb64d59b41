"""The kernels and the engine's step, compiled for Hopper GPUs without one."""

import pytest
from aot_environment import report

from experiments.aot.report import faults, step_faults

SCHEMA = {
    "name",
    "config",
    "target",
    "registers",
    "spill_bytes",
    "stack_bytes",
    "smem_bytes",
    "hgmma",
}


@pytest.mark.parametrize("kernel,at_least", [("decode", 13), ("mixed", 8)])
def test_attention_compiles_without_spills_and_keeps_the_memory_busy(kernel, at_least):
    found = report(
        "--covering", "--target", "h200", "--part", "kernels", "--only", kernel
    )
    assert found["exit"] == 0, [
        (row["config"], faults(row)) for row in found["kernels"]
    ]
    rows = found["kernels"]
    assert {row["target"] for row in rows} == {"h200"}
    assert len(rows) >= at_least
    for row in rows:
        assert SCHEMA <= row.keys()
        assert row["spill_bytes"] == row["stack_bytes"] == row["local_memory"] == 0, row
        assert row["hgmma"] > 0, row
        assert row["smem_bytes"] <= 232448, row
        assert row["registers"] <= 255, row
        assert row["loads_in_flight"] >= max(32 * 1024, row["loads_needed"]), row


def test_writes_to_the_cache_are_in_place(tmp_path):
    file = tmp_path / "rows.jsonl"
    command = "--covering", "--part", "kernels", "--keep", str(file)
    found = report(*command, "--only", " B=16 K=3")
    rows = found["kernels"]
    assert found["exit"] == 0, [(row["config"], faults(row)) for row in rows]
    # Of 16 bits, and of 8; for both targets, whose kernels are the same.
    names = ["write", "copy", "gather", "scatter"]
    assert [row["name"] for row in rows[::2]] == 2 * names
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        assert (one["target"], other["target"]) == ("h100", "h200")
        differ = {key for key in one if one[key] != other[key]}
        assert differ == {"target"}
    for row in rows:
        in_place = row["name"] != "gather"
        assert (row["aliased_bytes"] == row["donated_bytes"] > 0) == in_place, row
        # A token's keys and values, or a block's, for each thread block that has room.
        each = 2 * 3 * 64 if row["config"].endswith("int8") else 2 * 3 * 64 * 2
        if row["name"] != "write":
            each *= 16
            each += 2 * 3 * 16 * 4 if row["config"].endswith("int8") else 0
        resident, left = divmod(row["loads_in_flight"], each)
        assert left == 0 and 1 <= resident <= 16, row
        # No room for a copy of the cache, nor of what is moved.
        assert row["temporary_bytes"] < 1024, row
        assert row["spill_bytes"] == row["stack_bytes"] == row["local_memory"] == 0, row

    # The same from the file, but for one that is missing and one that is changed there.
    lines = file.read_text().splitlines(keepends=True)
    changed = lines[0].replace(f'"registers": {rows[0]["registers"]}', '"registers": 7')
    file.write_text("".join([changed, *lines[1:-1]]))
    again = report(*command, "--only", " B=16 K=3")["kernels"]
    assert again == [{**rows[0], "registers": 7}, *rows[1:]]
    assert file.read_text().splitlines(keepends=True) == [changed, *lines[1:]]


def test_the_step_is_changed_in_place_and_fits():
    found = report("--covering", "--target", "h100", "--part", "steps")
    (step,) = found["steps"]
    assert found["exit"] == 0, step_faults(step)
    assert step["aliased_bytes"] == step["donated_bytes"] > step["kv_bytes"] > 0
    assert step["cache_copies"] == 0
    # 256 rows of logits in float32, and a few arrays of their size, at most.
    assert step["activation_bytes"] < 6 * 256 * 49152 * 4
    times = [bound["seconds"] for bound in step["rooflines"]]
    assert times == sorted(times) and times[0] > 0
    # What is swapped out goes to the host's memory: half as many blocks, in place too.
    assert step["host_bytes"] / step["kv_bytes"] == pytest.approx(0.5, abs=1e-3)
    assert step["host_aliased_bytes"] == step["host_bytes"]
    assert step["host_temporary_bytes"] == step["host_cache_copies"] == 0


def test_loads_in_flight_are_asked_of_attention_only():
    row = {name: 0 for name in ("spill_bytes", "stack_bytes", "local_memory")}
    row |= {"aliased_bytes": 0, "donated_bytes": 0, "hgmma": 8}
    assert faults(row | {"loads_in_flight": 12288, "loads_needed": None}) == []
    assert faults(row | {"loads_in_flight": 12288, "loads_needed": 20000}) == [
        "12288 bytes of loads in flight, needs 32768"
    ]
    assert faults(
        row | {"loads_in_flight": 32768, "loads_needed": 20000, "hgmma": 0}
    ) == ["no tensor-core instruction"]


def test_thread_blocks_that_a_multiprocessor_has_room_for():
    from experiments.aot.compile import Figures

    some = Figures(128, 16, 0, 0, 1024, 0, 1, 0)
    assert some.blocks_per_multiprocessor == 16  # by threads
    assert some._replace(threads=32).blocks_per_multiprocessor == 32
    assert some._replace(registers=64).blocks_per_multiprocessor == 8
    assert some._replace(smem_bytes=101 * 1024).blocks_per_multiprocessor == 2


def test_a_step_that_copies_a_cache_or_moves_it_to_the_device_is_reported():
    step = {
        "device_share": 0.1,
        "aliased_bytes": 8,
        "donated_bytes": 8,
        "cache_copies": 0,
        "host_bytes": 4,
        "host_aliased_bytes": 4,
        "host_donated_bytes": 4,
        "host_cache_copies": 0,
    }
    assert step_faults(step) == []
    assert step_faults(step | {"host_cache_copies": 2}) == [
        "2 copies of the host's cache"
    ]
    assert step_faults(step | {"host_aliased_bytes": 0}) == [
        "0 bytes in place of 4 donated, of the host"
    ]
    # Without a kind of memory in its type, the host's cache is on the device.
    assert step_faults(step | {"host_bytes": 0}) == [
        "0 bytes in pinned memory, must be 4"
    ]
