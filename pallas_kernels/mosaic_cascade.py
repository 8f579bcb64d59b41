"""Queries to passes over shared prefixes and back, around the decode kernel.

The kernel takes a pass as it takes a token: with the query heads of all its tokens, on
each KV head, for the heads of one.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.cascade import Cascade
from pallas_kernels.mosaic_softmax import MASKED

Partials = tuple[jax.Array, jax.Array, jax.Array]


def pack_queries(queries: jax.Array, cascade: Cascade) -> jax.Array:
    """Returns the queries of each pass, in the order of its tokens.

    Args:
        queries: dtype[N, K, heads, D], of all tokens.
        cascade: the passes.

    Returns:
        dtype[G, K, M * heads, D], the rows padded to a multiple of 8; those of no token
        are some token's.
    """
    num_tokens, kv_heads, heads, head_dim = queries.shape
    num_passes, members = cascade.tokens.shape
    packed = queries[jnp.minimum(cascade.tokens, num_tokens - 1)]
    packed = packed.swapaxes(1, 2).reshape(num_passes, kv_heads, -1, head_dim)
    return jnp.pad(packed, ((0, 0), (0, 0), (0, -members * heads % 8), (0, 0)))


def join(own: Partials, shared: Partials, cascade: Cascade, heads: int) -> Partials:
    """Puts what passes left for their tokens beside the tokens' own partials.

    Args:
        own: the tokens' partials (see `mosaic_decode`), [N, K, splits, group, ...].
        shared: the passes', [G, K, other splits, M * heads or more, ...].
        cascade: the passes.
        heads: query heads on each KV head, `group` at most.

    Returns:
        Partials [N, K, splits + other splits, group, ...].
    """
    num_tokens, _, _, group = own[1].shape
    members = cascade.tokens.shape[1]
    number, member = cascade.place // members, cascade.place % members

    def of_tokens(x: jax.Array) -> jax.Array:
        x = x[:, :, :, : members * heads]
        x = x.reshape(*x.shape[:3], members, heads, *x.shape[4:])
        x = x[number, :, :, member]
        places = (0, num_tokens - x.shape[0]), (0, 0), (0, 0), (0, group - heads)
        return jnp.pad(x, places + ((0, 0),) * (x.ndim - 4))

    out, top, total = map(of_tokens, shared)
    # Where a token is in no pass, what is at place 0 is another's.
    starts = jnp.pad(cascade.starts, (0, num_tokens - cascade.starts.shape[0]))
    in_pass = starts[:, None, None, None] > 0
    top, total = jnp.where(in_pass, top, MASKED), jnp.where(in_pass, total, 0.0)
    return (
        jnp.concatenate((own[0], out), axis=2),
        jnp.concatenate((own[1], top), axis=2),
        jnp.concatenate((own[2], total), axis=2),
    )
