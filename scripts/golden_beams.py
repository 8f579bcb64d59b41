"""What `transformers`' beam search finds with golden models; for `goldens.py`."""

import itertools
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

# Beams, and new tokens at most.
WIDTHS = {2: 20, 3: 18, 4: 18, 8: 12, 16: 9}
WIDTHS_BETWEEN = {5: 16, 6: 14, 7: 13}
LENGTH_PENALTIES = (0.0, 1.0, -1.0, 2.0)
EARLY_STOPPING = (False, True, "never")


class Search(NamedTuple):
    """Whose continuations are searched.

    Attributes:
        model: folder of a golden model.
        sharpness: multiplies its logits. With those of a random model every token costs
            about as much, so that short texts score best whatever the length penalty.
        prompt: token ids.
        end: a token that ends a text, one that occurs in continuations.
        ends: two such tokens.
    """

    model: str
    sharpness: float
    prompt: list[int]
    end: int
    ends: list[int]


# Prompts and ends were chosen for how many different results the combinations of the
# rules give. With the ends 9 and 90, more beams end in one step than go on.
SHARP = (
    Search("llama", 3.0, [12, 63], 50, [50, 4]),
    Search("llama_tied", 3.0, [74], 24, [24, 89]),
)
FLAT = (
    Search("llama", 1.0, [78, 10, 19, 25, 19, 77, 83], 85, [9, 90]),
    Search("llama_tied", 1.0, [80, 27, 13, 30, 41], 24, [24, 65]),
)


def make_beams(goldens: Path) -> list[dict]:
    """Returns one entry for each search.

    Every width meets every length penalty and every rule of stopping on the sharp
    models, and there also no end of text; on all models every rule of stopping, and two
    ends of text. The widths between meet each of these once, on one sharp model.

    Args:
        goldens: the folder that has the models.
    """
    cases = []
    planned = [(search, WIDTHS, rules_for(search)) for search in (*SHARP, *FLAT)]
    planned.append((SHARP[0], WIDTHS_BETWEEN, few_rules_for(SHARP[0])))
    for search, widths, rules in planned:
        model = load(goldens / search.model, search.sharpness)
        for width, limit in widths.items():
            for penalty, stopping, ends in rules:
                asked = {
                    "num_beams": width,
                    "max_new_tokens": limit,
                    "length_penalty": penalty,
                    "early_stopping": stopping,
                    "eos_token_ids": ends,
                }
                cases.append(
                    {
                        "model": search.model,
                        "sharpness": search.sharpness,
                        "prompt": search.prompt,
                    }
                    | asked
                    | find(model, search.prompt, **asked)
                )
    return cases


Rules = list[tuple[float, bool | str, list[int]]]


def rules_for(search: Search) -> Rules:
    """Returns length penalties, rules of stopping and ends of text to go together."""
    penalties, others = LENGTH_PENALTIES, [search.ends, []]
    if search in FLAT:
        penalties, others = (1.0,), [search.ends]
    return [
        *itertools.product(penalties, EARLY_STOPPING, [[search.end]]),
        *((1.0, False, ends) for ends in others),
    ]


def few_rules_for(search: Search) -> Rules:
    """Returns what has every penalty, every rule of stopping and every end once."""
    stopping = itertools.cycle(EARLY_STOPPING)
    ends = ([search.end], [search.end], search.ends, [])
    return list(zip(LENGTH_PENALTIES, stopping, ends))


def load(folder: Path, sharpness: float) -> transformers.PreTrainedModel:
    """Returns a golden model in float32, with no end of text of its own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        model.model.norm.weight *= sharpness
    return model


def find(
    model: transformers.PreTrainedModel,
    prompt: list[int],
    *,
    num_beams: int,
    eos_token_ids: list[int],
    **rules,
) -> dict:
    """Returns the sequences found, best first, without the prompt and the padding.

    Returns:
        For each sequence its tokens, for each of them the place of the beam that it
        extended among those that ran, and the sequence's score.
    """
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **({"eos_token_id": eos_token_ids} if eos_token_ids else {}),
        **rules,
    )
    parents = [[p for p in row if p >= 0] for row in output.beam_indices.tolist()]
    return {
        "sequences": [
            row[len(prompt) :][: len(places)]
            for row, places in zip(output.sequences.tolist(), parents, strict=True)
        ],
        "parents": parents,
        # What of a float32 does not depend on the number of threads.
        "scores": [float(f"{s:.6g}") for s in output.sequences_scores.tolist()],
    }
