"""The scheduler's decisions, iteration by iteration, against plain Python."""

import random

import chex
import numpy as np
import pytest
from oracles.scheduler import Rules, SchedulerOracle, Sequence
from pythons import SAME_KIND
from scheduling import reserved, run_schedule, small_config

from paged_jax.requests import RequestStatus

# Sequences of a request share its prompt; no prefixes.
GROUPS = dict(sharing=True, max_prefixes=0, max_n=4)

SYSTEMS = {
    "paged continuous": dict(),
    "paged continuous, whole prompts": dict(chunked_prefill=False, token_budget=24),
    "paged continuous, one block size 1": dict(block_size=1, num_blocks=70),
    "paged continuous, blocks to spare": dict(spare_blocks=1),
    "paged static": dict(batching="static"),
    "paged continuous, groups": dict(GROUPS),
    "paged continuous, groups, whole prompts": dict(
        **GROUPS, chunked_prefill=False, token_budget=24
    ),
    "paged continuous, groups, one block size 1": dict(
        **GROUPS, block_size=1, num_blocks=70
    ),
    "paged continuous, groups, recomputed": dict(**GROUPS, preemption="recompute"),
    "paged continuous, groups, few blocks of the host": dict(**GROUPS, host_blocks=6),
    "paged continuous, groups, blocks to spare": dict(
        **GROUPS, num_blocks=16, spare_blocks=1
    ),
    "paged continuous, all swapped": dict(preemption="swap"),
    "paged continuous, groups, all swapped": dict(**GROUPS, preemption="swap"),
    "paged static, groups": dict(**GROUPS, batching="static"),
    "paged continuous, several that share nothing": dict(max_n=4),
    "pow2 continuous, several": dict(max_n=4, memory="pow2", num_blocks=21),
    "max continuous": dict(memory="max", num_blocks=21),
    "max static": dict(memory="max", batching="static", num_blocks=21),
    "pow2 continuous": dict(memory="pow2", num_blocks=21),
    "oracle static": dict(memory="oracle", batching="static", num_blocks=21),
}


def _oracle(config, lengths):
    static = config.step_config()
    rules = Rules(
        block_size=static.block_size,
        num_blocks=static.num_blocks,
        table_width=static.table_width,
        max_seqs=static.max_seqs,
        token_budget=static.token_budget,
        watermark_blocks=static.watermark_blocks,
        spare_blocks=static.spare_blocks,
        chunked=static.chunked_prefill,
        paged=config.memory == "paged",
        static=config.batching == "static",
        host_blocks=static.host_blocks,
        swaps_single=static.swaps_single,
    )
    groups, count = [], 0
    for arrival, (prompt, outputs) in enumerate(lengths):
        members = []
        for output in (outputs,) if isinstance(outputs, int) else outputs:
            size = reserved(config, prompt, output)
            members.append(Sequence(count, arrival, prompt, output, size))
            count += 1
        groups += [members] if static.groups else [[one] for one in members]
    return SchedulerOracle(rules, groups), [one for group in groups for one in group]


def _random_lengths(rng, config):
    limit = config.max_model_len
    longest = limit - 1 if config.chunked_prefill else config.token_budget
    lengths, left = [], rng.randint(1, config.max_requests)
    while left > 0:
        prompt = min(int(rng.expovariate(0.15)) + 1, longest)
        if config.max_n == 1:
            outputs = min(int(rng.expovariate(0.1)) + 1, limit - prompt)
            left -= 1
        else:
            count = min(rng.choice([1, 1, 2, 3, 4]), left)
            outputs = tuple(
                min(int(rng.expovariate(0.1)) + 1, limit - prompt) for _ in range(count)
            )
            # As `RequestRecord.check` refuses: what cannot fit at once, all alone.
            while _peak(config, prompt, outputs) > config.total_blocks:
                outputs = outputs[1:]
            left -= count
        lengths.append((prompt, outputs))
    return lengths


def _peak(config, prompt, outputs):
    whole = prompt // config.block_size
    return whole + sum(
        -(-(prompt + output) // config.block_size) - whole for output in outputs
    )


@pytest.mark.long
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_iteration_equals_the_oracle(system):
    config = small_config(**SYSTEMS[system])
    rng = random.Random(system)
    preemptions = swapped = lost = 0
    for _ in range(60):
        lengths = _random_lengths(rng, config)
        log, state = run_schedule(config, lengths)
        oracle, requests = _oracle(config, lengths)
        expected = oracle.run()
        for name in expected[0]:
            want = [row[name] for row in expected]
            np.testing.assert_array_equal(log[name], want, err_msg=f"{name} {lengths}")
        timeline = np.asarray(state.requests.timeline)[: len(requests)]
        np.testing.assert_array_equal(timeline, [r.timeline for r in requests])
        assert (
            np.asarray(state.requests.status)[: len(requests)]
            == RequestStatus.FINISHED_LENGTH
        ).all()
        preemptions += log["PREEMPTED"].sum()
        swapped += log["SWAPPED_IN_BLOCKS"].sum()
        lost += log["RECOMPUTED"].sum()
    if system.startswith("paged continuous"):
        assert preemptions > 20, "the workloads are too light to test preemption"
        assert (swapped > 20) == (config.step_config().host_blocks > 0)
        assert lost > 0 or config.preemption == "swap"
    else:
        assert preemptions == swapped == 0


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_an_overload_of_five_times_the_memory_ends(batching):
    config = small_config(batching=batching)
    lengths = [(8, 24)] * config.max_requests  # 8 blocks each, 20 in all
    _, state = run_schedule(config, lengths)
    assert (np.asarray(state.requests.length)[: len(lengths)] == 32).all()
    assert int(state.pool.num_free) == 20


@SAME_KIND
def test_a_long_prompt_does_not_stall_decoding():
    config = small_config(max_model_len=128, num_blocks=60)
    _, state = run_schedule(config, [(2, 30), (100, 4), (3, 5)])
    first, long, _ = np.asarray(state.requests.timeline)[:3]
    assert first[2] - first[1] == 29, "one token in every iteration"
    assert long[1] - long[0] >= 6, "its prompt took many iterations"


@SAME_KIND
def test_without_chunks_a_prompt_is_computed_in_one_iteration():
    config = small_config(chunked_prefill=False, token_budget=24)
    _, state = run_schedule(config, [(20, 3), (20, 3), (4, 3)])
    timeline = np.asarray(state.requests.timeline)[:3]
    # The second prompt has no room beside the first, and nobody overtakes it.
    np.testing.assert_array_equal(timeline[:, 0], timeline[:, 1])
    assert timeline[0, 0] < timeline[1, 0] <= timeline[2, 0]


@SAME_KIND
def test_first_come_first_served():
    config = small_config(num_blocks=9)
    _, state = run_schedule(config, [(20, 4), (28, 2), (1, 1), (2, 2)])
    admitted = np.asarray(state.requests.timeline)[:4, 0]
    assert (np.diff(admitted) >= 0).all(), "a request overtook another"


@SAME_KIND
def test_a_static_batch_starts_when_the_last_one_is_over():
    config = small_config(batching="static", max_seqs=3)
    _, state = run_schedule(config, [(4, 2), (4, 9), (4, 3), (4, 1), (4, 1)])
    timeline = np.asarray(state.requests.timeline)[:5]
    assert len(set(timeline[:3, 0])) == 1 and len(set(timeline[3:, 0])) == 1
    assert timeline[3, 0] == timeline[:3, 2].max() + 1


@SAME_KIND
def test_finished_rows_of_a_static_batch_keep_their_memory():
    config = small_config(batching="static", max_seqs=3)
    log, _ = run_schedule(config, [(8, 1), (8, 8)])
    running_alone = log["RUNNING"] == 1
    assert running_alone.any()
    granted = 20 - log["FREE_BLOCKS"][running_alone]
    assert (granted > log["LIVE"][running_alone] // 4).all()
    assert (log["TOKENS"][running_alone] == 1).all(), "ended rows are not computed"


def test_the_state_at_the_end_is_as_at_the_start():
    config = small_config()
    _, state = run_schedule(config, [(5, 9), (20, 3), (1, 12)])
    chex.assert_trees_all_equal(
        state.sequences.num_blocks, np.zeros(config.max_seqs, np.int32)
    )
    assert int(state.queue.count) == 0
    np.testing.assert_array_equal(np.sort(state.pool.free_stack)[1:], range(1, 21))
