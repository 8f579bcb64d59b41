"""Recorded traces: what is read, what is counted as malformed, what is refused."""

import json
import re

import numpy as np
import pytest

from experiments.errors import UserError
from experiments.simulator import json_array
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
    path.write_text(text, "utf-8", "surrogateescape", newline="")
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


@pytest.mark.parametrize(
    "dates",
    [
        # As in the public files of 2023 and of 2024, which leave out a fraction of 0.
        ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:47.9305900"),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01.259930+00:00"),
        ("2024-05-10 00:00:00+00:00", "2024-05-10 00:00:01.250000+00:00"),
        ("2024-05-10T00:00:00.5Z", "2024-05-10T00:00:01.75Z"),
        ("2024-05-10 00:00:00.5Z", "2024-05-09 22:30:01.75-01:30"),
        ("2024-05-10 00:00:00.5", "2024-05-10 02:00:01.75+0200"),
    ],
)
def test_the_dates_of_azure_are_read(tmp_path, dates):
    lines = "".join(f"{date},2162,5\n" for date in dates)
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{lines}"
    first, second = read(tmp_path, "azure", text, strict=True)
    assert (first.arrival, first.prompt_len, first.output_len) == (0, 2162, 5)
    assert second.arrival == pytest.approx(1.25, abs=1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_a_mark_of_the_byte_order_is_no_part_of_the_text(tmp_path, format):
    assert len(read(tmp_path, format, "\ufeff" + FILES[format], strict=True)) == 2


def mooncake_line(**changes):
    line = {"timestamp": 5000, "input_length": 2, "output_length": 2, "hash_ids": [1]}
    return json.dumps(line | changes) + "\n"


BAD_LINES = {
    "lengths": (
        "1,2\n",
        "x,20,3\n",
        "3,0,3\n",
        "3,2.5,3\n",
        "nan,2,3\n",
        "3,inf,3\n",
        "3,1e300,3\n",
        "3,3,16777214\n",
        "2.5,2,3\n",  # before the line above it
        f"3,{'1' * 200_000},3\n",
        "3,\udcff,3\n",  # a byte that is no UTF-8
        '"3,2,3\n',
    ),
    "azure": (
        "yesterday,20,3\n",
        "2023-11-16 18:15:48.68,,3\n",
        "2023-11-16 18:15:46.68,2,3\n",
        "2024-05-10 00:00:00.5+,2,3\n",
    ),
    "burstgpt": ("7,GPT-4,20,0,20,API log\n",),
    "mooncake": (
        "{\n",
        "[]\n",
        '{"timestamp": 1}\n',
        "17\n",
        "[" * 200_000 + "\n",
        mooncake_line(input_length=float("inf")),
        mooncake_line(input_length=2.5),
        mooncake_line(timestamp=10**400),
        mooncake_line(timestamp=4000),
        mooncake_line(hash_ids=[-1]),
        mooncake_line(hash_ids=[2**31]),
        mooncake_line(hash_ids=[0.5]),
    ),
}


@pytest.mark.parametrize(
    "format, line",
    [(f, line) for f, lines in BAD_LINES.items() for line in lines],
    ids=lambda value: repr(value[:40]),
)
def test_malformed_lines_are_counted_and_named(tmp_path, format, line):
    malformed = Malformed()
    rows = read(tmp_path, format, FILES[format] + line, malformed=malformed)
    assert len(rows) == 2
    number = FILES[format].count("\n") + 1
    assert malformed.count == 1 and f"trace, line {number}" in malformed.named[0]
    assert len(malformed.named[0]) < 400
    assert str(malformed).startswith("1 malformed (")
    with pytest.raises(UserError, match="trace, line"):
        read(tmp_path, format, FILES[format] + line, strict=True)


def test_a_quote_that_is_not_closed_takes_no_more_than_a_field_along(tmp_path):
    malformed = Malformed()
    text = FILES["lengths"] + '"3,2,2\n' + "4,1,1\n" * 100_000
    rows = read(tmp_path, "lengths", text, malformed=malformed)
    assert 75_000 < len(rows) < 100_000
    assert malformed.count == 1
    assert "line 4: field larger than" in malformed.named[0]
    assert "up to line 2" in malformed.named[0]


def test_times_that_are_not_used_are_in_any_order(tmp_path):
    text = FILES["lengths"] + "1,5,5\n"
    assert len(read(tmp_path, "lengths", text, strict=True, in_order=False)) == 3


BAD_RECORDS = [
    ("sharegpt", '{"conversations": [{"from": "human", "value": "x"}]}'),
    ("sharegpt", '{"id": 3}'),
    ("sharegpt", '{"conversations": [{"from": "human", "value": "x"},]}'),
    ("sharegpt", '{"conversations": [{"from": "human", "value": "x}]}'),
    ("sharegpt", '{"conversations": [{"from": "human", "value": "x"}'),
    ("sharegpt", '{"conversations": [{"from": "human", "value": "\udcff"}, {}]}'),
    ("sharegpt", '{"conversations": [{"from": "human", "value": 3}, {"value": "x"}]}'),
    ("sharegpt", '{"conversations": ' + "[" * 200_000 + "}"),
    ("alpaca", '{"instruction": "x"}'),
    ("alpaca", '{"instruction": x, "output": "x"}'),
    ("alpaca", '{"instruction": "x" "output": "x"}'),
    ("alpaca", '{"instruction": "x\n", "output": "x"}'),
    ("alpaca", '{"instruction": "x \\q", "output": "x"}'),
    ("alpaca", '{"instruction", "x"}'),
    ("alpaca", '"x"'),
    ("alpaca", "x" * 30),
]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("format, item", BAD_RECORDS)
def test_malformed_records_are_counted_and_named(
    tmp_path, monkeypatch, format, item, place, chunk
):
    monkeypatch.setattr(json_array, "CHUNK", max(chunk, len(item) // 100))
    records = [json.dumps(record, indent=1) for record in json.loads(FILES[format])]
    records.insert(place, item)
    text = f"[{', '.join(records)}]"
    malformed = Malformed()
    rows = read(tmp_path, format, text, malformed=malformed)
    assert [row.prompt_len for row in rows] == [20, 7]
    assert malformed.count == 1 and f"record {place}" in malformed.named[0]
    with pytest.raises(UserError, match=f"trace, record {place}: "):
        read(tmp_path, format, text, strict=True)


@pytest.mark.parametrize(
    "record, reason",
    [
        ('{"instruction": "x",}', "Expecting property name|Illegal trailing comma"),
        ('{"instruction": x}', "Expecting value at its character 16"),
        ("{}", "no instruction"),
    ],
)
@pytest.mark.parametrize("more", ["]", ', {"instruction": "x", "output": "y"}]'])
def test_the_reason_is_what_is_wrong_with_the_record(tmp_path, record, more, reason):
    malformed = Malformed()
    read(tmp_path, "alpaca", f"[{record}{more}", malformed=malformed)
    (named,) = malformed.named
    assert re.search(f"record 0: ({reason})", named)


@pytest.mark.parametrize("format", ["sharegpt", "alpaca"])
@pytest.mark.parametrize(
    "end", ["", ",", ", {", ', {"instruction": "x", "outp', ", 17"]
)
def test_an_array_that_does_not_end_is_counted(tmp_path, format, end):
    malformed = Malformed()
    text = FILES[format].rstrip("]\n") + end
    rows = read(tmp_path, format, text, malformed=malformed)
    assert len(rows) == 2 and malformed.count == 1
    assert "record 2: the file ends" in malformed.named[0]
    with pytest.raises(UserError, match="record 2: the file ends"):
        read(tmp_path, format, text, strict=True)


def test_a_record_that_takes_in_the_others_is_given_up_at_a_length(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(json_array, "CHUNK", 100)
    monkeypatch.setattr(json_array, "LONGEST", 1000)
    whole = (
        '{"id": 1, "conversations": [{"from": "human", "value": "x"}, {"value": "x"}]}'
    )
    malformed = Malformed()
    unended = whole.removesuffix("]}")
    text = f"[{unended}, {', '.join([whole] * 500)}]"
    assert len(read(tmp_path, "sharegpt", text, malformed=malformed)) == 500
    assert malformed.count == 1
    assert "record 0: longer than 1000 characters" in malformed.named[0]


def test_many_malformed_lines_are_counted_and_few_named(tmp_path):
    malformed = Malformed()
    read(tmp_path, "lengths", FILES["lengths"] + "x,1,1\n" * 50, malformed=malformed)
    assert malformed.count == 50 and len(malformed.named) == 5


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_an_array_is_read_in_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(json_array, "CHUNK", chunk)
    whole = [Row(None, 20, 3), Row(None, 7, 100)]
    assert read(tmp_path, "sharegpt", FILES["sharegpt"]) == whole


@pytest.mark.parametrize(
    "format, text, message",
    [
        ("csv", "", "format 'csv' is not known"),
        ("lengths", "a,b\n1,2\n", "no column 'start_offset_s'"),
        ("azure", "", "no column 'TIMESTAMP'"),
        ("alpaca", "{}", "not a JSON array"),
        ("lengths", "x" * 200_000 + "\n", "trace, line 1: field larger"),
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
