"""What the AOT report keeps of one run for the next."""

import pytest

from experiments.aot import kept
from experiments.aot.__main__ import main
from experiments.aot.kept import Kept
from experiments.errors import UserError


def test_results_are_found_by_the_code_that_gave_them(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    first = Kept(file, "kernels")
    assert first.get("decode h100") is None
    first.add("decode h100", dict(registers=240))
    first.add("decode h100", dict(registers=1))  # there is one
    assert Kept(file, "kernels").get("decode h100") == dict(registers=240)
    assert Kept(file, "steps").get("decode h100") is None

    monkeypatch.setattr(kept, "code_of", lambda part: "other")
    other = Kept(file, "kernels")
    assert other.get("decode h100") is None
    other.add("decode h100", dict(registers=248))
    monkeypatch.undo()
    assert Kept(file, "kernels").get("decode h100") == dict(registers=240)


def test_the_code_of_steps_is_more_than_that_of_kernels(tmp_path, monkeypatch):
    for folder in kept.SOURCES["steps"]:
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    before = {part: kept.code_of(part) for part in kept.SOURCES}
    (tmp_path / "paged_jax/step.py").write_text("changed")
    assert kept.code_of("kernels") == before["kernels"]
    assert kept.code_of("steps") != before["steps"]
    (tmp_path / "pallas_kernels/mosaic.py").write_text("changed")
    assert kept.code_of("kernels") != before["kernels"]


def test_without_a_file_nothing_is_kept():
    nothing = Kept(None, "kernels")
    nothing.add("decode h100", dict(registers=240))
    assert nothing.get("decode h100") is None


@pytest.mark.parametrize("text", ["no JSON\n", '["two", "parts"]\n'])
def test_a_file_of_something_else_is_refused_and_not_written_to(tmp_path, capsys, text):
    file = tmp_path / "notes.txt"
    file.write_text(text)
    assert main(["--part", "kernels", "--keep", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"error: {file}, line 1, is no result of this report\n"
    )
    assert file.read_text() == text


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        Kept(tmp_path / "missing/rows.jsonl", "kernels")
    with pytest.raises(UserError, match="directory"):
        Kept(tmp_path, "kernels")
