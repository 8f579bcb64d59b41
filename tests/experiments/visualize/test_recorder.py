"""What the recorder sees is what the engine does, and seeing it changes nothing."""

import collections
import itertools

import numpy as np
import pytest

from experiments.visualize import scenes
from experiments.visualize.recorder import LOGGED, Activity, record
from paged_jax import Engine, Field

RUNS = [*scenes.SYSTEMS, "parallel", "beam"]


@pytest.fixture(params=RUNS)
def recorded(request, tiny_page):
    return tiny_page.recorded[request.param]


def test_tokens_are_those_of_an_engine_that_nobody_watches(tiny_page, tiny_model):
    for name in ("parallel", "beam"):
        seen = tiny_page.recorded[name]
        one = seen.asked[0]
        engine = Engine(tiny_model, seen.config)
        (output,) = engine.generate([one.tokens], [one.params])
        alone = sorted(tuple(c.token_ids) for c in output.outputs)
        assert sorted(seen.final_tokens) == alone


def test_all_systems_generate_the_same_watched_or_not(tiny_page):
    for timed in tiny_page.data["timed"].values():
        assert timed["same"] == len(tiny_page.data["runs"]["paged"]["requests"])


def test_reference_counts_are_the_entries_of_the_tables(recorded):
    for moment in recorded.moments:
        named = collections.Counter()
        for row in np.flatnonzero(~moment.on_host):
            named.update(moment.table[row, : moment.num_blocks[row]].tolist())
        counts = {b: int(moment.ref_count[b]) for b in np.flatnonzero(moment.ref_count)}
        assert counts == dict(named)
        assert moment.num_free == recorded.config.total_blocks - len(named)


def test_rows_belong_to_sequences_that_are_there(recorded):
    for moment in recorded.moments:
        owners = moment.owner[moment.owner >= 0]
        assert len(set(owners.tolist())) == len(owners)
        elsewhere = {Activity.ABSENT, Activity.DONE, Activity.PREEMPTED}
        assert not elsewhere & set(moment.activity[owners].tolist())
        lengths = moment.length[moment.owner >= 0]
        for owner, length in zip(owners, lengths):
            prompt = len(recorded.asked[recorded.sequences[owner].request].tokens)
            assert length <= prompt + len(moment.output[owner])


def test_all_sequences_come_to_their_ends(recorded):
    last = recorded.moments[-1]
    assert set(last.activity.tolist()) == {Activity.DONE}
    for sequence, output in zip(recorded.sequences, last.output):
        params = recorded.asked[sequence.request].params
        assert len(output) == params.max_tokens


def test_the_end_is_seen_and_is_no_iteration(recorded):
    before, last = recorded.moments[-2:]
    assert before.log[LOGGED.index(Field.SAMPLED)] > 0
    assert last.log[LOGGED.index(Field.TOKENS)] == 0
    assert not last.ref_count.any() and (last.owner == -1).all()
    assert last.num_free == recorded.config.total_blocks
    assert recorded.iterations == len(recorded.moments) - 1


def test_copies_are_of_shared_blocks_to_free_ones(tiny_page):
    for name in ("parallel", "beam"):
        moments = tiny_page.recorded[name].moments
        copies = 0
        for before, now in itertools.pairwise(moments):
            for copy in now.copies:
                copies += 1
                assert before.ref_count[copy.source] > 1
                assert before.ref_count[copy.target] == 0
            logged = now.log[LOGGED.index(Field.COPIED_BLOCKS)]
            assert len(now.copies) == logged
        assert copies >= 3


def test_four_sharers_of_a_block_make_three_copies(tiny_page):
    moments = tiny_page.recorded["parallel"].moments
    first = next(m for m in moments if m.copies)
    assert len(first.copies) == 3
    assert len({copy.source for copy in first.copies}) == 1
    assert len({copy.sequence for copy in first.copies}) == 3


@pytest.mark.parametrize(
    "name, activity",
    [("paged", Activity.PREEMPTED), ("paged_swap", Activity.SWAPPED)],
)
def test_who_gives_way_is_seen(tiny_page, name, activity):
    moments = tiny_page.recorded[name].moments
    assert any((m.activity == activity).any() for m in moments)
    preempted = sum(m.log[LOGGED.index(Field.PREEMPTED)] for m in moments)
    assert preempted > 0


@pytest.mark.parametrize("name", RUNS)
def test_only_beams_give_back_at_once_what_they_were_granted(tiny_page, name):
    moments = tiny_page.recorded[name].moments
    for moment in moments:
        assert not moment.ref_count[moment.dropped].any()
        unnamed = {c.target for c in moment.copies if not moment.ref_count[c.target]}
        assert unnamed <= {*moment.dropped}
    assert any(moment.dropped for moment in moments) == (name == "beam")


def test_ended_members_of_a_static_batch_keep_their_blocks(tiny_page):
    held = [
        (moment, row)
        for moment in tiny_page.recorded["paged_static"].moments
        for row in np.flatnonzero(moment.owner >= 0)
        if moment.activity[moment.owner[row]] == Activity.HELD
    ]
    assert held
    assert all(moment.num_blocks[row] > 0 for moment, row in held)
    for moment in tiny_page.recorded["paged"].moments:
        assert not (moment.activity == Activity.HELD).any()


def test_a_recording_that_disagrees_with_the_log_is_refused(tiny_page, tiny_model):
    seen = tiny_page.recorded["parallel"]
    engine = Engine(tiny_model, seen.config)
    real = engine.step

    def takes_another_step(max_steps=None):
        out = real(max_steps)
        if max_steps:
            out += real(max_steps)
        return out

    engine.step = takes_another_step
    with pytest.raises(RuntimeError, match="did not do what its scheduler had said"):
        record(engine, seen.asked)
