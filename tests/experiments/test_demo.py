"""The demo's numbers, and what it prints."""

import pytest

from experiments import demo
from paged_jax.block_tables import Status


@pytest.fixture(scope="module")
def shown():
    return demo.run()


def test_every_operation_is_carried_out(shown):
    assert {step.status for step in shown.steps} == {Status.OK}


def test_blocks_and_free_blocks_step_by_step(shown):
    assert [(step.table, step.free) for step in shown.steps] == [
        ([1, 2], 98),  # request 1: 32 tokens
        ([3, 4, 5], 95),  # request 2: 48 tokens
        ([1, 2], 95),  # request 3 shares: nothing is taken
        ([1, 6], 94),  # request 3 writes: one copy
        ([7, 8, 9, 10], 90),  # request 4: 64 tokens
        ([], 91),  # request 1 leaves: block 1 stays for request 3
        ([], 94),
        ([], 96),
        ([6, 1, 5], 93),  # request 5: the blocks freed last
    ]


def test_sharing_and_copying_are_shown(shown):
    assert [step.note for step in shown.steps if step.note] == [
        "reference counts [2, 2]",
        "copy block 2 to 6",
        "admitted: 4 blocks fit",
    ]


def test_35_tokens(shown):
    assert shown.fill == [16, 16, 3]


def test_position_20(shown):
    assert shown.lookup_table == [3, 7, 12]
    assert shown.lookup == (20, 7, 4, 116)


def test_a_refused_operation_stops_the_demo(monkeypatch):
    monkeypatch.setattr(demo, "NUM_BLOCKS", 4)
    with pytest.raises(RuntimeError, match="request 2: .*OUT_OF_BLOCKS, 2 blocks free"):
        demo.run()


def test_the_printed_table_has_the_numbers(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    demo.main()
    printed = capsys.readouterr().out
    for text in ("90", "96", "16, 16, 3", "13 slots are unused", "7 x 16 + 4 = 116"):
        assert text in printed
