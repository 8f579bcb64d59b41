"""Chats of several rounds: the workload of the paper's section 6.4 (Fig 17).

A request carries the whole chat so far: all earlier questions and answers, and the last
question. Keys and values are not kept from round to round.
"""

import numpy as np

from experiments.lengths import draw_pairs

DATASET = "chat"
# The paper: the prompt is cut to its last 1024 tokens, and the output to 1024.
MOST_PROMPT, MOST_OUTPUT = 1024, 1024
# An assumption, for neither the paper nor its data say how many rounds a chat has: as
# many as it takes until one of four is the last (geometric), so that more than half of
# the chats are longer than what the prompt is cut to.
MEAN_ROUNDS = 4.0


def draw_chats(
    rng: np.random.Generator,
    count: int,
    max_model_len: int,
    mean_rounds: float = MEAN_ROUNDS,
) -> np.ndarray:
    """Draws the lengths of requests that carry chats.

    The number of rounds is geometric, and each round is a question and an answer with
    lengths like ShareGPT's, drawn apart from those of the others.

    Args:
      rng: source of randomness.
      count: N, requests.
      max_model_len: longest round, in tokens.
      mean_rounds: of a chat, the last one included.

    Returns:
      i64[N, 2], prompt and output lengths, 1 to 1024 each.
    """
    rounds = rng.geometric(1.0 / mean_rounds, count)
    lengths = draw_pairs(rng, int(rounds.sum()), "sharegpt", max_model_len)
    last = np.cumsum(rounds) - 1
    chat = np.repeat(np.arange(count), rounds)
    tokens = np.bincount(chat, weights=lengths.sum(axis=1), minlength=count)
    output = lengths[last, 1]
    prompt = tokens.astype(np.int64) - output
    return np.stack(
        [np.minimum(prompt, MOST_PROMPT), np.minimum(output, MOST_OUTPUT)], axis=1
    )
