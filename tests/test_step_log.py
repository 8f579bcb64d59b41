"""The log of small runs, counted by hand."""

import pytest
from engines import greedy, make_engine
from scheduling import run_schedule, small_config

from paged_jax import Field

# Blocks of 4, so that a request of 5 + 6 tokens takes 3 at its end. Its slots are live
# for all tokens but the last, which is never computed.
ONE = [(5, 6)]
LIVE = [5, 6, 7, 8, 9, 10]


def check_sums(log, contiguous=False):
    granted = log["LIVE"] + log["RESERVATION"] + log["INTERNAL"]
    if contiguous:  # the rounding of a chunk beyond its estimate is neither
        assert (granted <= log["RESERVED"]).all()
    else:
        assert (granted == log["RESERVED"]).all()


def test_paged_memory_grows_by_a_block():
    log, _ = run_schedule(small_config(), ONE)
    # The last row retires it; nothing is left.
    assert log["LIVE"].tolist() == [*LIVE, 0]
    assert log["RESERVED"].tolist() == [8, 8, 8, 8, 12, 12, 0]
    # Of the last block, the 11th slot is the last token's, and the 12th is nobody's.
    assert log["RESERVATION"].tolist() == [3, 2, 1, 0, 2, 1, 0]
    assert log["INTERNAL"].tolist() == [0, 0, 0, 0, 1, 1, 0]
    assert log["FREE_BLOCKS"].tolist() == [18, 18, 18, 18, 17, 17, 20]
    assert log["SAMPLED"].tolist() == [1] * 6 + [0]
    assert log["TOKENS"].tolist() == [5, 1, 1, 1, 1, 1, 0]
    assert log["ITERATION"].tolist() == list(range(7))
    assert log["ADMITTED"].tolist() == [1] + [0] * 6
    assert log["RETIRED"].tolist() == [0] * 6 + [1]
    assert log["LOGICAL_BLOCKS"].tolist() == log["PHYSICAL_BLOCKS"].tolist()
    check_sums(log)


@pytest.mark.parametrize(
    ("memory", "chunk", "estimate"),
    [
        ("max", 8, 32),  # the model length
        ("pow2", 4, 5 + 8),  # 6 tokens of output are taken for 8
        ("oracle", 4, 5 + 6),  # 3 blocks, rounded up to a chunk of 4
    ],
)
def test_contiguous_memory_is_reserved_at_once(memory, chunk, estimate):
    log, _ = run_schedule(small_config(memory=memory), ONE)
    assert log["LIVE"].tolist() == [*LIVE, 0]
    assert log["RESERVED"].tolist() == [4 * chunk] * 6 + [0]
    assert log["RESERVATION"].tolist() == [11 - live for live in LIVE] + [0]
    assert log["INTERNAL"].tolist() == [estimate - 11] * 6 + [0]
    assert log["FREE_BLOCKS"].tolist() == [20 - chunk] * 6 + [20]
    check_sums(log, contiguous=True)


@pytest.mark.parametrize("memory", ["paged", "oracle"])
def test_a_static_batch_keeps_what_its_ended_members_have(memory):
    config = small_config(memory=memory, batching="static", max_seqs=2)
    log, _ = run_schedule(config, [(4, 1), (4, 4)])
    # The first ends after one step, with one block (paged) or a chunk of two.
    first = 4 if memory == "paged" else 8
    assert log["RUNNING"].tolist() == [2, 1, 1, 1, 0]
    assert log["LIVE"].tolist() == [8, 5, 6, 7, 0]
    assert log["INTERNAL"].tolist()[1:] == [first] * 3 + [0]
    # The second comes to 8 tokens, two blocks, the last slot never written.
    second = [4, 8, 8, 8] if memory == "paged" else [8] * 4
    assert log["RESERVED"].tolist() == [first + n for n in second] + [0]
    ahead = [0, 3, 2, 1] if memory == "paged" else [4, 3, 2, 1]
    assert log["RESERVATION"].tolist()[1:] == [*ahead[1:], 0]
    check_sums(log, contiguous=memory != "paged")


def test_chunks_and_waiting_requests():
    log, _ = run_schedule(small_config(max_seqs=1), [(20, 2), (3, 1)])
    assert log["TOKENS"].tolist() == [16, 4, 1, 3, 0]
    assert log["SAMPLED"].tolist() == [0, 1, 1, 1, 0]
    assert log["WAITING"].tolist() == [1, 1, 1, 0, 0]
    assert log["RUNNING"].tolist() == [1, 1, 1, 1, 0]
    # All blocks of a prompt are granted at its admission.
    assert log["RESERVED"].tolist()[:2] == [20, 20]
    assert log["LIVE"].tolist() == [16, 20, 21, 3, 0]
    check_sums(log)


def test_preemption_and_recomputation():
    # Two requests of 8 + 8 tokens come to need 4 blocks each, of 5 (and 20 slots, so a
    # model length of 20).
    config = small_config(num_blocks=5, max_model_len=20, watermark=0.0, max_seqs=2)
    log, _ = run_schedule(config, [(8, 8), (8, 8)])
    first = log["PREEMPTED"].tolist().index(1)
    # Both ask for a third block in the second step, and one is there.
    assert first == 1 and log["RECOMPUTED"][first] == 8
    assert log["PREEMPTED"].sum() == 1
    assert log["TOKENS"].sum() == 2 * (8 + 7) + 8
    assert log["SAMPLED"].sum() == 16
    assert log["ADMITTED"].sum() == 3
    check_sums(log)


def test_shared_slots_count_once():
    engine = make_engine()
    engine.register_prefix(range(10, 20))
    engine.reset_stats()
    prompts = [[*range(10, 20), 30], [*range(10, 20), 31, 32], [50] * 3]
    engine.generate(prompts, greedy(3))
    log = {field.name: engine.log[:, field] for field in Field}
    # Two whole blocks shared by two; a third one each; one of the third request.
    assert log["PHYSICAL_BLOCKS"][0] == 2 + 1 + 1 + 1
    assert log["LOGICAL_BLOCKS"][0] == 3 + 3 + 1
    assert log["LIVE"][0] == 8 + 3 + 4 + 3
    assert log["RESERVED"][0] == 4 * 5
    check_sums(log)


def test_sharing_and_a_static_batch():
    engine = make_engine(batching="static")
    name = engine.register_prefix(range(10, 18))
    engine.reset_stats()
    prompts = [[*range(10, 18), 30 + i] for i in range(3)]
    engine.generate(prompts, [greedy(2), greedy(6), greedy(6)])
    log = {field.name: engine.log[:, field] for field in Field}
    assert (log["PHYSICAL_BLOCKS"][:3] == 2 + 3).all()
    engine.release_prefix(name)


def test_two_sequences_of_one_prompt():
    # The paper's figure 8: a prompt of 7 tokens in blocks of 4, two samples of 3.
    config = small_config(sharing=True, max_prefixes=0, max_n=2)
    log, _ = run_schedule(config, [(7, (3, 3))])
    assert log["RUNNING"].tolist() == [1, 2, 2, 0]
    assert log["TOKENS"].tolist() == [7, 2, 2, 0]
    assert log["SAMPLED"].tolist() == [2, 2, 2, 0]
    assert log["COPIED_BLOCKS"].tolist() == [0, 1, 0, 0]
    assert log["LOGICAL_BLOCKS"].tolist() == [2, 4, 6, 0]
    assert log["PHYSICAL_BLOCKS"].tolist() == [2, 3, 5, 0]
    assert log["FREE_BLOCKS"].tolist() == [18, 17, 15, 20]
    assert log["LIVE"].tolist() == [7, 4 + 8, 4 + 10, 0]
    assert log["RESERVATION"].tolist() == [1, 0, 2, 0]
    assert log["INTERNAL"].tolist() == [0, 0, 4, 0]
    assert log["RETIRED"].tolist() == [0, 0, 0, 2]
    assert log["ADMITTED"].tolist() == [1, 0, 0, 0]
    check_sums(log)


def test_sums_hold_whatever_is_shared():
    config = small_config(sharing=True, max_prefixes=0, max_n=4)
    # Together they come to need more than the 20 blocks there are.
    log, _ = run_schedule(config, [(9, (20, 14)), (6, (20, 20)), (13, (16, 9))])
    assert log["PREEMPTED"].sum() > 0 and log["COPIED_BLOCKS"].sum() > 2
    check_sums(log)
