"""An engine that repeats a prompt's first token; the model's path says what fails."""

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts/engines"))

import runner


def load(work):
    trouble = work.model.rpartition("/")[2]
    if trouble == "no_start":
        raise ValueError("no such\nmodel")
    print("this goes to the log")
    child = subprocess.Popen(["sleep", "600"], preexec_fn=runner.die_with_parent)
    if trouble == "spinning":
        subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def serve():
        time.sleep(0.01)
        if trouble == "no_run":
            raise RuntimeError("out of blocks")
        if trouble == "death":
            runner.os._exit(3)
        lengths = [one.max_tokens - (trouble == "short") for one in work.requests]
        return [one.prompt[:1] * length for one, length in zip(work.requests, lengths)]

    return runner.Loaded(
        "fake 1.0",
        serve,
        {"cores": len(runner.os.sched_getaffinity(0)), "child": child.pid},
        lambda: {"gaps": [[0.5] * one.max_tokens for one in work.requests]},
    )


if __name__ == "__main__":
    runner.main(load)
