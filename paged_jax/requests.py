"""Requests: what was asked for, how far it is, and the queue of those that wait."""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.new_arrays import full, on_device, zeros


class RequestStatus(enum.IntEnum):
    """Where a request stands. Values from FINISHED_LENGTH up are ends."""

    EMPTY = 0  # the slot is free
    WAITING = 1
    RUNNING = 2  # its sequences are in the batch, or swapped out
    HELD = 3  # a registered prefix, computed and kept
    FINISHED_LENGTH = 4  # max_tokens or the model length reached
    FINISHED_STOP = 5  # a stop id or a stop string
    REJECTED = 6  # could not fit even with nothing else running
    ABORTED = 7  # cancelled


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """How each request's tokens are chosen; one row a request, the last one unused.

    Attributes:
      temperature: f32[R + 1]. 0 is greedy.
      top_p: f32[R + 1]. 1 keeps all.
      min_p: f32[R + 1]. 0 keeps all.
      top_k: i32[R + 1]. 0 keeps all.
      key: u32[R + 1, 2]. Base key; the token at position p uses `fold_in(key, p)`.
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    key: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """All requests on the device, one in a slot; slot R is the null request.

    A request for n sequences takes n slots, one for each sequence.

    Writes for padding land in the null request, as those to the cache land in the null
    block.

    Attributes:
      tokens: i32[R + 1, M]. Prompt, then output, up to the model length M.
      length: i32[R + 1]. Tokens known so far, prompt and output.
      prompt_len: i32[R + 1]. Tokens of the prompt.
      max_len: i32[R + 1]. Length at which the request ends; `prompt_len` for a prefix
        to be held.
      reserved_len: i32[R + 1]. Tokens that a contiguous memory manager reserves.
      arrival: i32[R + 1]. Order of arrival; earlier is smaller.
      prefix_row: i32[R + 1]. Sequence row of the prefix the prompt starts with; -1.
      group: i32[R + 1]. Slot of the leader, which names the group of a sequence (see
        `groups`); its own for most. i32[0] where there are no groups.
      status: i32[R + 1]. A `RequestStatus`.
      stop_ids: i32[R + 1, E]. Token ids that end the request; -1 for none.
      timeline: i32[R + 1, 3]. Iteration of the first admission, of the first output
        token and of the end; -1 before.
      logprobs: f32[R + 1, M]. Log-probability of each output token, 0 in the prompt.
      top_ids: i32[R + 1, M, A]. Most likely tokens at each output position; A may be 0.
      top_logprobs: f32[R + 1, M, A]. Their log-probabilities.
      sampling: how tokens are chosen.
    """

    tokens: jax.Array
    length: jax.Array
    prompt_len: jax.Array
    max_len: jax.Array
    reserved_len: jax.Array
    arrival: jax.Array
    prefix_row: jax.Array
    group: jax.Array
    status: jax.Array
    stop_ids: jax.Array
    timeline: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    sampling: SamplingState

    @property
    def null(self) -> int:
        """R, the slot of the null request."""
        return self.status.shape[0] - 1

    @property
    def grouped(self) -> bool:
        """Whether there may be groups of more than one sequence."""
        return self.group.shape[0] > 0

    def leader(self, slots: jax.Array) -> jax.Array:
        """Returns the slots that stand for the groups of slots i32[N], i32[N].

        Each its own where there are no groups.
        """
        return self.group[slots] if self.grouped else slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WaitingQueue:
    """First come, first served: a ring of request slots.

    Attributes:
      slots: i32[R]. The waiting requests are `count` entries from `head` on, wrapping.
      head: i32[]. Where the next request to be admitted stands.
      count: i32[].
    """

    slots: jax.Array
    head: jax.Array
    count: jax.Array

    def first(self) -> jax.Array:
        """Returns the slot of the request that is next in line, i32[]."""
        return self.slots[self.head]


def pop(queue: WaitingQueue) -> WaitingQueue:
    """Takes the first request off the queue."""
    return dataclasses.replace(
        queue,
        head=(queue.head + 1) % queue.slots.shape[0],
        count=queue.count - 1,
    )


def push_front(
    queue: WaitingQueue, slot: jax.Array, ok: jax.Array | bool = True
) -> WaitingQueue:
    """Puts a preempted request back to the head of the queue, if `ok`."""
    count = jnp.asarray(ok, jnp.int32)
    head = (queue.head - count) % queue.slots.shape[0]
    slot = jnp.where(ok, slot, queue.slots[head])
    return WaitingQueue(queue.slots.at[head].set(slot), head, queue.count + count)


def push_back(queue: WaitingQueue, slots: jax.Array, count: jax.Array) -> WaitingQueue:
    """Puts the first `count` of `slots` (i32[W]) at the end of the queue."""
    size = queue.slots.shape[0]
    rank = jnp.arange(slots.shape[0])
    place = (queue.head + queue.count + rank) % size
    values = jnp.where(rank < count, slots, queue.slots[place])
    return dataclasses.replace(
        queue, slots=queue.slots.at[place].set(values), count=queue.count + count
    )


def init_requests(
    num_requests: int,
    max_model_len: int,
    max_stop_ids: int,
    max_logprobs: int,
    groups: bool = False,
) -> Requests:
    """Returns `num_requests` free slots and the null request."""
    rows = num_requests + 1
    return Requests(
        tokens=zeros((rows, max_model_len)),
        length=zeros(rows),
        prompt_len=zeros(rows),
        max_len=zeros(rows),
        reserved_len=zeros(rows),
        arrival=zeros(rows),
        prefix_row=full(rows, -1),
        group=on_device(np.arange(rows if groups else 0, dtype=np.int32)),
        status=zeros(rows),
        stop_ids=full((rows, max_stop_ids), -1),
        timeline=full((rows, 3), -1),
        logprobs=zeros((rows, max_model_len), np.float32),
        top_ids=zeros((rows, max_model_len, max_logprobs)),
        top_logprobs=zeros((rows, max_model_len, max_logprobs), np.float32),
        sampling=SamplingState(
            temperature=zeros(rows, np.float32),
            top_p=full(rows, 1, np.float32),
            min_p=zeros(rows, np.float32),
            top_k=zeros(rows),
            key=zeros((rows, 2), np.uint32),
        ),
    )


def init_queue(num_requests: int) -> WaitingQueue:
    """Returns an empty queue for `num_requests` requests."""
    return WaitingQueue(zeros(num_requests), zeros(()), zeros(()))
