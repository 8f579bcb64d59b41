import pytest

from experiments.errors import UserError
from experiments.settings import WorkloadSettings
from experiments.translation import SHOTS, translations
from experiments.workloads import build_workload


def test_no_two_requests_are_the_same():
    prompts = [one.prompt for one in translations(5, 48 * 3)]
    assert len(set(prompts)) == len(prompts)


def test_a_prompt_has_its_examples_and_ends_before_the_answer():
    (none,), (one,), (five,) = (translations(shots, 1) for shots in (0, 1, 5))
    for shots, translation in ((0, none), (1, one), (5, five)):
        assert translation.prompt.count("German:") == shots + 1
        assert translation.prompt.endswith("\nGerman:")
        assert translation.answer not in translation.prompt
    sentence = none.prompt.partition("\n\n")[2]
    assert one.prompt.endswith(sentence) and five.prompt.endswith(sentence)


def test_requests_beyond_the_sentences_have_two_of_them():
    first, *_, beyond = translations(1, 49)
    sentence = first.prompt.rpartition("English: ")[2].partition("\n")[0]
    assert sentence in beyond.prompt and len(beyond.prompt) > len(first.prompt) + 20


def test_scaled_texts_keep_their_first_words():
    (whole,), (scaled,) = translations(1, 1), translations(1, 1, 1000.0)
    assert scaled.prompt == "Translate\n\nEnglish: The\nGerman: Der\n\n" + (
        "English: Farmers\nGerman:"
    )
    assert scaled.answer == " Die" and whole.answer.startswith(" Die ")


@pytest.mark.parametrize("name", SHOTS)
def test_the_workload_has_the_examples_as_its_prefix(name, tokenizer):
    settings = WorkloadSettings(name, num_requests=12)
    workload = build_workload(settings, 4096, 0, tokenizer)
    text = tokenizer.decode(workload.prefix)
    assert text.count("German: ") == SHOTS[name] and len(workload.prefix) % 2 == 1
    for request, one in zip(workload.requests, translations(SHOTS[name], 12)):
        assert request.tokens[: len(workload.prefix)] == workload.prefix
        assert tokenizer.decode(request.tokens) == one.prompt
        assert request.output_len == len(tokenizer.encode(one.answer))


def test_a_request_that_does_not_fit_is_named(tokenizer):
    settings = WorkloadSettings("few_shot", num_requests=2)
    with pytest.raises(UserError, match=r"translation-0000 of the few_shot .* is 512"):
        build_workload(settings, 512, 0, tokenizer)


def test_more_requests_than_there_are_texts_are_refused():
    with pytest.raises(UserError, match="num_requests is 2305, and .* for 2304"):
        translations(1, 2305)
