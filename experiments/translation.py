"""Sentences to translate behind worked examples: the shared-prefix workloads.

The texts (`data/translation.json`) were written for this project: news sentences, as in
the WMT sets that the paper's section 6.4 draws on, with translations into German.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

from experiments.errors import UserError

_FILE = Path(__file__).parent / "data" / "translation.json"

# Examples before the sentence, by the name of the workload.
SHOTS = {"one_shot": 1, "few_shot": 5}


class Translation(NamedTuple):
    """One request's text.

    Attributes:
      id: names it in results.
      prompt: instruction, examples and the sentence, up to where the answer begins.
      answer: a translation, whose length is the request's output length.
    """

    id: str
    prompt: str
    answer: str


def translations(shots: int, count: int, scale: float = 1.0) -> list[Translation]:
    """Returns prompts that differ only behind the examples.

    Beyond the number of sentences in the file, a request has two of them, so that with
    a scale of 1 no two requests are the same.

    Args:
      shots: examples in each prompt.
      count: how many.
      scale: the words of each text are divided by this; 1 or less keeps all.

    Raises:
      UserError: there are no texts for so many requests.
    """
    texts = json.loads(_FILE.read_text("utf-8"))
    examples, sentences = texts["examples"], texts["sentences"]
    if count > len(sentences) ** 2:
        raise UserError(
            f"workload.num_requests is {count}, and there are sentences to translate "
            f"for {len(sentences) ** 2}; ask for no more"
        )

    def kept(text: str) -> str:
        words = text.split()
        return " ".join(words[: math.ceil(len(words) / max(scale, 1.0))])

    def pair(english: str, german: str) -> str:
        return f"English: {english}\nGerman:{german}"

    intro = kept(texts["instruction"]) + "\n\n"
    for one in examples[:shots]:
        intro += pair(kept(one["english"]), f" {kept(one['german'])}\n\n")
    found = []
    for number in range(count):
        further, place = divmod(number, len(sentences))
        chosen = [sentences[place]]
        if further:
            chosen.append(sentences[(place + further) % len(sentences)])
        english, german = (
            " ".join(kept(one[language]) for one in chosen)
            for language in ("english", "german")
        )
        name = f"translation-{number:04d}"
        found.append(Translation(name, intro + pair(english, ""), f" {german}"))
    return found
