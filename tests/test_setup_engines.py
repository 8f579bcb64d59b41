"""The set-up of other engines, by stand-ins for Python: nothing is downloaded here."""

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.newest(reason="scripts in bash, with stand-ins for Python")

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts/setup_engines"

# Notes what pip is asked for, in the environment that it is asked for, and fails for
# what the file `refused` names. Answers `find_python` as a Python 3.11.
STAND_IN = """#!/usr/bin/env bash
case "$*" in
    *find_spec*) echo "3.11 $0" ;;
    "-m venv "*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
    "-m pip "*)
        echo "$*" >> {log}
        while read -r package; do
            [[ "$*" != *"$package"* ]] || {{
                echo "a line of what pip prints"
                echo "ERROR: no version of $package"
                echo "[notice] something else"
                exit 1
            }}
        done < {refused} ;;
esac
"""


class Tree:
    """Where engines go, and what stands in for Python and pip."""

    def __init__(self, folder: Path):
        self.engines = folder / "engines"
        self.log, self.refused = folder / "pip.log", folder / "refused"
        self.python = folder / "python"
        self.log.touch()
        self.refused.touch()
        self.python.write_text(STAND_IN.format(log=self.log, refused=self.refused))
        self.python.chmod(0o755)

    def run(self, *names):
        done = subprocess.run(
            [SCRIPT, *names],
            env={
                "PATH": "/usr/bin:/bin",
                "ENGINES": str(self.engines),
                "PYTHON": str(self.python),
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout == ""
        return done

    def pip_calls(self):
        return self.log.read_text().splitlines()


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_an_engine_is_installed_once(tree):
    done = tree.run("transformers")
    assert done.returncode == 0, done.stderr
    assert (tree.engines / "transformers/ready").exists()
    calls = tree.pip_calls()
    assert any("torch==" in call and "transformers==" in call for call in calls)
    again = tree.run("transformers")
    assert (again.returncode, again.stderr) == (0, "")
    assert tree.pip_calls() == calls


def test_another_recipe_installs_anew(tree):
    tree.run("transformers")
    (tree.engines / "transformers/ready").write_text("an older one\n")
    calls = len(tree.pip_calls())
    assert tree.run("transformers").returncode == 0
    assert len(tree.pip_calls()) > calls


def test_one_that_fails_leaves_its_reason_and_the_others_go_on(tree):
    tree.refused.write_text("openvino-genai\n")
    done = tree.run("openvino", "transformers")
    assert done.returncode == 1
    reason = "ERROR: no version of openvino-genai"
    assert f"openvino could not be installed: {reason}\n" in done.stderr
    assert (tree.engines / "openvino.failed").read_text() == f"{reason}\n"
    assert not (tree.engines / "openvino/ready").exists()
    assert (tree.engines / "transformers/ready").exists()

    tree.refused.write_text("")
    assert tree.run("openvino").returncode == 0
    assert not (tree.engines / "openvino.failed").exists()


def test_the_exporter_of_openvino_is_apart(tree):
    tree.run("openvino")
    assert (tree.engines / "openvino/export/bin/python").exists()
    serving = [call for call in tree.pip_calls() if "openvino-genai" in call]
    assert serving and not any("torch" in call for call in serving)


def test_an_unknown_engine_is_refused_before_anything_is_done(tree):
    done = tree.run("transformers", "sglang")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "sglang is no engine" in done.stderr
    assert "transformers vllm openvino llamacpp" in done.stderr
    assert not tree.engines.exists()


def test_without_a_python_it_says_which_it_needs(tree):
    tree.python.unlink()
    done = tree.run("transformers")
    assert done.returncode == 2
    assert str(tree.python) in done.stderr
