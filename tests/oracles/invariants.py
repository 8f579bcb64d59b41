"""The invariants of blocks, groups and swapped-out sequences in plain Python.

They are named as in `paged_jax.invariants`, and written apart from it: row by row,
with sets and counters. States of any shape are read as they are, so that nothing is
compiled; what holds of the prefix cache is left to the library.
"""

import collections

from paged_jax.requests import RequestStatus
from paged_jax.sequences import SequenceStatus


def broken_blocks(pool, sequences) -> set[str]:
    """Returns the invariants that a pool and the tables, of numpy, do not keep."""
    here = [row for row in range(len(sequences.status)) if not _away(sequences, row)]
    holds = _pool_holds(pool, [_table(sequences, row) for row in here])
    holds["tables_well_formed"] = all(
        _is_well_formed(pool, sequences, row)
        and len(set(_table(sequences, row))) == sequences.num_blocks[row]
        for row in here
    )
    holds["empty_rows_hold_nothing"] = not any(
        sequences.num_blocks[row] or sequences.length[row]
        for row in range(len(sequences.status))
        if sequences.status[row] == SequenceStatus.EMPTY
    )
    return _broken(holds)


def broken_swap(state) -> set[str]:
    """Returns the invariants that a scheduler's state does not keep on the host."""
    if not state.swap:
        return set()
    pool, sequences, requests = state.swap.pool, state.sequences, state.requests
    there = [row for row in range(len(sequences.status)) if _away(sequences, row)]
    holds = _pool_holds(pool, [_table(sequences, row) for row in there])
    holds = {f"host_{name}": value for name, value in holds.items()}
    holds["host_tables_well_formed"] = all(
        _is_well_formed(pool, sequences, row) for row in there
    )
    swapped = _requests_of(sequences, SequenceStatus.SWAPPED)
    going = _requests_of(sequences, SequenceStatus.RUNNING, SequenceStatus.UNFORKED)
    holds["swapped_requests_run"] = all(
        requests.status[slot] == RequestStatus.RUNNING for slot in swapped
    )
    leaders = (requests.leader(slots).tolist() for slots in (swapped, going))
    holds["swapped_whole"] = set(next(leaders)).isdisjoint(next(leaders))
    return _broken(holds)


def broken_groups(state) -> set[str]:
    """Returns the invariants that the groups of a scheduler's state do not keep."""
    sequences, requests, queue = state.sequences, state.requests, state.queue
    if not requests.grouped:
        return set()
    group_of = requests.group.tolist()
    expecting = {group_of[s] for s in _requests_of(sequences, SequenceStatus.UNFORKED)}
    running = _requests_of(sequences, SequenceStatus.RUNNING)
    carriers = collections.Counter(group_of[slot] for slot in running)
    rows = range(len(sequences.status))
    waiting, runs = (
        {group_of[slot] for slot in range(len(group_of)) if requests.status[slot] == s}
        for s in (RequestStatus.WAITING, RequestStatus.RUNNING)
    )
    places = (int(queue.head) + i for i in range(int(queue.count)))
    queued = [int(queue.slots[place % len(queue.slots)]) for place in places]
    holds = {
        "unforked_rows_hold_nothing": not any(
            sequences.num_blocks[row]
            for row in rows
            if sequences.status[row] == SequenceStatus.UNFORKED
        ),
        "unforked_rows_have_a_carrier": all(carriers[one] == 1 for one in expecting),
        "carriers_stay_in_the_prompt": not any(
            sequences.length[row] > requests.prompt_len[sequences.request[row]]
            for row in rows
            if sequences.status[row] == SequenceStatus.RUNNING
            and group_of[sequences.request[row]] in expecting
        ),
        "groups_are_whole": waiting.isdisjoint(runs),
        "queue_names_what_waits": sorted(queued) == sorted(waiting),
    }
    if state.beams:
        holds |= _beams_hold(state)
    return _broken(holds)


def _beams_hold(state) -> dict[str, bool]:
    requests, beams = state.requests, state.beams
    searches = collections.defaultdict(list)
    for slot, status in enumerate(requests.status):
        alive = status in (RequestStatus.WAITING, RequestStatus.RUNNING)
        if alive and beams.width[slot] > 0:
            searches[int(requests.group[slot])].append(slot)
    return {
        "beams_are_all_there": all(
            sorted(int(beams.number[slot]) for slot in slots)
            == list(range(beams.width[slots[0]]))
            for slots in searches.values()
        ),
        "beams_are_in_step": all(
            len({int(requests.length[slot]) for slot in slots}) == 1
            for slots in searches.values()
        ),
    }


def _pool_holds(pool, tables: list[list[int]]) -> dict[str, bool]:
    count = pool.ref_count.tolist()
    blocks = range(1, len(count))
    free = pool.free_stack[:-1].tolist()[: max(int(pool.num_free), 0)]
    idle = int(pool.prefix_cache.idle.count) if pool.prefix_cache else 0
    named = collections.Counter(block for table in tables for block in table)
    in_use = sum(references > 0 for references in count)
    return {
        "blocks_accounted": int(pool.num_free) + idle + in_use == len(blocks),
        "ref_counts_match": count == [named[block] for block in range(len(count))],
        "free_blocks_distinct": int(pool.num_free) >= 0
        and len(set(free)) == len(free)
        and all(block in blocks for block in free),
        "free_blocks_unreferenced": not any(
            count[block] for block in free if block in blocks
        ),
    }


def _table(sequences, row: int) -> list[int]:
    return sequences.block_table[row, : sequences.num_blocks[row]].tolist()


def _is_well_formed(pool, sequences, row: int) -> bool:
    blocks = range(1, len(pool.ref_count))
    tail = sequences.block_table[row, sequences.num_blocks[row] :]
    return all(block in blocks for block in _table(sequences, row)) and not tail.any()


def _away(sequences, row: int) -> bool:
    return sequences.status[row] in (SequenceStatus.SWAPPED, SequenceStatus.DROPPED)


def _requests_of(sequences, *statuses: SequenceStatus):
    """Returns i32[N], the slots of the requests whose rows have one of the statuses."""
    wanted = [status in statuses for status in sequences.status]
    return sequences.request[wanted]


def _broken(holds: dict[str, bool]) -> set[str]:
    return {name for name, value in holds.items() if not value}
