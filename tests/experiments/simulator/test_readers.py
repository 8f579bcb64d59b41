"""Recorded traces: what is read, what is counted as malformed, what is refused."""

import json

import numpy as np
import pytest

from experiments.errors import UserError
from experiments.simulator import readers
from experiments.simulator.arrivals import gamma_arrivals, poisson_arrivals
from experiments.simulator.readers import FORMATS, Malformed, Row, read_trace

FILES = {
    "lengths": "start_offset_s,input_tokens,output_tokens\n1.5,20,3\n2.75,7,100\n",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,20,3\n2023-11-16 18:15:47.9305900,7,100\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,20,3,23,API log\n6.25,GPT-4,7,100,107,API log\n",
    "mooncake": '{"timestamp": 3000, "input_length": 20, "output_length": 3, '
    '"hash_ids": [1]}\n\n{"timestamp": 4250, "input_length": 7, "output_length": 100, '
    '"hash_ids": [1, 9]}\n',
    "sharegpt": json.dumps(
        [
            {"conversations": [turn("human", 20), turn("gpt", 3), turn("human", 9)]}
            for turn in [lambda who, n: {"from": who, "value": "x " * n}]
        ]
        + [
            {
                "conversations": [
                    {"from": "human", "value": "x " * 7},
                    {"from": "gpt", "value": "x " * 100},
                ]
            }
        ],
        indent=1,
    ),
    "alpaca": json.dumps(
        [
            {"instruction": "x " * 15, "input": "x " * 5, "output": "x " * 3},
            {"instruction": "x " * 7, "input": "", "output": "x " * 100},
        ]
    ),
}


def count_words(text):
    return len(text.split())


def read(tmp_path, format, text, **options):
    path = tmp_path / "trace"
    path.write_text(text)
    return list(read_trace(path, format, count_tokens=count_words, **options))


@pytest.mark.parametrize("format", FORMATS)
def test_lengths_and_times_are_read(tmp_path, format):
    first, second = read(tmp_path, format, FILES[format], strict=True)
    assert (first.prompt_len, first.output_len) == (20, 3)
    assert (second.prompt_len, second.output_len) == (7, 100)
    if format in ("sharegpt", "alpaca"):
        assert first.arrival is second.arrival is None
    else:
        assert first.arrival == 0
        assert second.arrival == pytest.approx(1.25)
    assert second.hash_ids == ((1, 9) if format == "mooncake" else ())


BAD_LINES = {
    "lengths": ("1,2\n", "x,20,3\n", "1.5,0,3\n", "1.5,2.5,3\n", "nan,2,3\n"),
    "azure": ("yesterday,20,3\n", "2023-11-16 18:15:46.68,,3\n"),
    "burstgpt": ("5,GPT-4,20,0,20,API log\n",),
    "mooncake": ("{\n", "[]\n", '{"timestamp": 1}\n', "17\n"),
}


@pytest.mark.parametrize(
    "format, line", [(f, line) for f, lines in BAD_LINES.items() for line in lines]
)
def test_malformed_lines_are_counted_and_named(tmp_path, format, line):
    malformed = Malformed()
    rows = read(tmp_path, format, FILES[format] + line, malformed=malformed)
    assert len(rows) == 2
    assert malformed.count == 1 and "line" in malformed.named[0]
    assert str(malformed).startswith("1 malformed (")
    with pytest.raises(UserError, match="trace, line"):
        read(tmp_path, format, FILES[format] + line, strict=True)


@pytest.mark.parametrize(
    "format, item",
    [
        ("sharegpt", {"conversations": [{"from": "human", "value": "x"}]}),
        ("sharegpt", {"id": 3}),
        ("alpaca", {"instruction": "x"}),
        ("alpaca", "x"),
    ],
)
def test_malformed_records_are_counted_and_named(tmp_path, format, item):
    malformed = Malformed()
    text = json.dumps([*json.loads(FILES[format]), item])
    assert len(read(tmp_path, format, text, malformed=malformed)) == 2
    assert malformed.count == 1 and "record 2" in malformed.named[0]


def test_many_malformed_lines_are_counted_and_few_named(tmp_path):
    malformed = Malformed()
    read(tmp_path, "lengths", FILES["lengths"] + "x,1,1\n" * 50, malformed=malformed)
    assert malformed.count == 50 and len(malformed.named) == 5


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_an_array_is_read_in_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(readers, "_CHUNK", chunk)
    whole = [Row(None, 20, 3), Row(None, 7, 100)]
    assert read(tmp_path, "sharegpt", FILES["sharegpt"]) == whole


@pytest.mark.parametrize(
    "format, text, message",
    [
        ("csv", "", "format 'csv' is not known"),
        ("lengths", "a,b\n1,2\n", "no column 'start_offset_s'"),
        ("azure", "", "no column 'TIMESTAMP'"),
        ("alpaca", "{}", "not a JSON array"),
        ("alpaca", '[{"instruction": "x", "output"', "ends inside record 0"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, format, text, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, format, text)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(UserError, match="nowhere.csv cannot be read"):
        list(read_trace(tmp_path / "nowhere.csv", "lengths"))


def test_texts_need_a_tokenizer(tmp_path):
    path = tmp_path / "trace"
    path.write_text(FILES["alpaca"])
    with pytest.raises(UserError, match="tokenizer"):
        list(read_trace(path, "alpaca"))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_bursts_have_the_rate_and_the_variation(cv):
    arrivals = gamma_arrivals(np.random.default_rng(0), 50_000, 4.0, cv)
    distances = np.diff(arrivals)
    assert (distances >= 0).all()
    assert 1 / distances.mean() == pytest.approx(4.0, rel=0.05)
    assert distances.std() / distances.mean() == pytest.approx(cv, rel=0.05)


def test_a_poisson_process_has_no_memory():
    distances = np.diff(poisson_arrivals(np.random.default_rng(1), 50_000, 4.0))
    # Of an exponential distribution, a share of exp(-x) is above x means.
    for means in (0.5, 1.0, 3.0):
        share = (distances > means / 4.0).mean()
        assert share == pytest.approx(np.exp(-means), abs=0.006)
    assert abs(np.corrcoef(distances[1:], distances[:-1])[0, 1]) < 0.02


@pytest.mark.parametrize("rate, cv", [(0, 1), (-1, 1), (1, 0), (float("inf"), 1)])
def test_a_rate_of_nothing_is_refused(rate, cv):
    with pytest.raises(UserError, match="must be above 0"):
        gamma_arrivals(np.random.default_rng(0), 3, rate, cv)
