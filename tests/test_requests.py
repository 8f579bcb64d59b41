"""The queue of waiting requests, against a deque."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax import requests
from paged_jax.requests import init_queue, init_requests

SIZE = 5
pop, push_front, push_back = map(
    jax.jit, (requests.pop, requests.push_front, requests.push_back)
)


def content(queue):
    places = (int(queue.head) + np.arange(int(queue.count))) % queue.slots.shape[0]
    return np.asarray(queue.slots)[places].tolist()


@given(
    st.lists(st.tuples(st.sampled_from(["pop", "front", "back"]), st.integers(0, 3)))
)
def test_any_sequence_of_operations_equals_a_deque(operations):
    queue, expected = init_queue(SIZE), collections.deque()
    for number, (operation, count) in enumerate(operations):
        if operation == "pop" and expected:
            assert int(queue.first()) == expected.popleft()
            queue = pop(queue)
        elif operation == "front" and len(expected) < SIZE:
            expected.appendleft(number)
            queue = push_front(queue, jnp.int32(number))
        elif operation == "back":
            count = min(count, SIZE - len(expected))
            slots = [number + 1000 * i for i in range(3)]
            expected.extend(slots[:count])
            queue = push_back(queue, jnp.array(slots), jnp.int32(count))
        assert content(queue) == list(expected)


def test_a_queue_can_be_filled_in_one_go_and_go_round():
    queue = push_back(init_queue(SIZE), jnp.arange(SIZE), jnp.int32(SIZE))
    assert content(queue) == [0, 1, 2, 3, 4]
    queue = push_front(pop(pop(queue)), jnp.int32(9))
    assert content(queue) == [9, 2, 3, 4]


def test_new_slots_are_free_and_the_last_row_is_the_null_request():
    state = init_requests(4, max_model_len=8, max_stop_ids=2, max_logprobs=0)
    assert state.null == 4
    assert state.group.shape == (0,) and not state.grouped
    rows = {x.shape[0] for x in jax.tree.leaves(state) if x is not state.group}
    assert rows == {5}
    state = init_requests(
        4, max_model_len=8, max_stop_ids=2, max_logprobs=0, groups=True
    )
    assert state.grouped and state.group.tolist() == [0, 1, 2, 3, 4]
    assert not state.status.any() and (state.prefix_row == -1).all()
    assert (state.stop_ids == -1).all() and (state.timeline == -1).all()


@pytest.mark.parametrize("field", ["slots", "head", "count"])
def test_a_queue_is_a_value(field):
    queue = init_queue(SIZE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(queue, field, 0)
