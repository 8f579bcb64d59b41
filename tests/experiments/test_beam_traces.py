import json

import numpy as np
import pytest

from experiments.beam_traces import SHIPPED, load_traces, main, write_traces

PARENTS = [[0, 0], [1, 0], [1, 1]]


@pytest.fixture
def folder(tmp_path):
    """A run of one search by two beams, and of one request without beams."""
    (tmp_path / "outputs").mkdir()
    search = {
        "prompt_token_ids": [5] * 7,
        "token_ids": [1, 2, 3, 4],
        "further": [[1, 2, 3, 5]],
        "beam_parents": PARENTS,
    }
    plain = {"prompt_token_ids": [5], "token_ids": [1], "further": [[2]]}
    for name, output in (("beams", search), ("plain", plain)):
        (tmp_path / f"outputs/{name}.jsonl").write_text(json.dumps(output) + "\n")
    summary = {
        "rows": [{"key": "plain"}, {"key": "beams"}],
        "config": {"model": "some-model", "seed": 3, "workload": {"lengths": "alpaca"}},
        "environment": {"packages": {"jax": "1"}},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_searches_are_read_as_they_were_written(folder, tmp_path):
    path = tmp_path / "traces.json"
    assert write_traces(folder, path) == 1
    ((width, (trace,)),) = load_traces(path).items()
    assert (width, trace.prompt_len, trace.output_len) == (2, 7, 4)
    np.testing.assert_array_equal(trace.parents, PARENTS)
    made = json.loads(path.read_text())
    assert made["model"] == "some-model" and made["seed"] == 3


def test_the_command_says_what_it_wrote(folder, tmp_path, capsys):
    assert main([str(folder), str(tmp_path / "t.json")]) == 0
    assert capsys.readouterr().out.startswith("1 searches")


@pytest.mark.parametrize("damage", ["summary", "beams", "words"])
def test_a_run_without_searches_is_refused(folder, tmp_path, capsys, damage):
    words = [str(folder), str(tmp_path / "t.json")]
    if damage == "summary":
        (folder / "summary.json").unlink()
    if damage == "beams":
        (folder / "outputs/beams.jsonl").write_text("")
    if damage == "words":
        words = []
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and len(error.splitlines()) == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"traces": {"2": [[1, 2, "09"]]}}'])
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="bad.json: no beam traces"):
        load_traces(path)


def test_the_searches_that_ship_have_the_paper_s_widths_and_are_beams():
    traces = load_traces()
    assert set(traces) == {2, 4, 6} and SHIPPED.stat().st_size < 200_000
    for width, some in traces.items():
        assert len(some) >= 20
        for trace in some:
            assert trace.parents.shape == (trace.output_len - 1, width)
            if trace.output_len > 1:  # all beams begin as one
                assert (trace.parents[0] == 0).all()
    # Ancestry is a model's: beams drop out, and most of those that go on are the best.
    first = np.concatenate([t.parents for t in traces[4]])
    assert 0.3 < (first == 0).mean() < 0.9
