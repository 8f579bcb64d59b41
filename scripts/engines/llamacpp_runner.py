"""Serves with llama.cpp's server: token ids over loopback, all requests at once."""

import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import runner

BATCH, MICRO_BATCH = 2048, 512
LOOPBACK = "127.0.0.1"


def load(work: runner.Work) -> runner.Loaded:
    """Starts the server, and waits until it answers; see `runner.main`."""
    # It preempts nothing, and fails requests when its cache is full: each slot gets a
    # share of the budget, large enough for the longest request.
    longest = max(len(one.prompt) + one.max_tokens for one in work.requests) + 1
    slots = max(min(work.max_seqs, work.kv_tokens // longest), 1)
    precision = {"float32": "f32", "bfloat16": "bf16"}[work.dtype]
    port = _free_port()
    # fmt: off
    command = [
        work.program, "--model", work.model, "--host", LOOPBACK, "--port", str(port),
        "--threads", str(work.threads), "--threads-batch", str(work.threads),
        "--ctx-size", str(work.kv_tokens), "--parallel", str(slots),
        "--batch-size", str(BATCH), "--ubatch-size", str(MICRO_BATCH),
        "--cache-type-k", precision, "--cache-type-v", precision,
        "--flash-attn", "off", "--no-kv-unified", "--cache-ram", "0",
        "--threads-http", str(len(work.requests) + 2), "--no-warmup",
    ]
    # fmt: on
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        preexec_fn=runner.die_with_parent,
    )
    _wait_until_healthy(server, port)
    bodies = [
        json.dumps(
            {
                "prompt": request.prompt,
                "n_predict": request.max_tokens,
                "temperature": 0.0,
                "samplers": ["top_k"],
                "top_k": 1,
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
            }
        )
        for request in work.requests
    ]

    def complete(body: str) -> list[int]:
        status, answer = _exchange(port, "POST", "/completion", body)
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {answer[:200]}")
        return json.loads(answer)["tokens"]

    def serve() -> list[list[int]]:
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(complete, bodies))

    def close() -> None:
        server.terminate()
        server.wait(20)

    settings = {"slots": slots, "batch": BATCH, "micro_batch": MICRO_BATCH}
    return runner.Loaded(_version(work.program), serve, settings, close=close)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def _exchange(
    port: int, method: str, path: str, body: str | None = None
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=3600)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read().decode()


def _wait_until_healthy(server: subprocess.Popen, port: int) -> None:
    while server.poll() is None:
        try:
            if _exchange(port, "GET", "/health")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise RuntimeError(f"llama-server ended with {server.returncode}")


def _version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    found = [line for line in lines if line.startswith("version")]
    return f"llama.cpp {found[0].partition(':')[2].strip()}" if found else "llama.cpp"


if __name__ == "__main__":
    runner.main(load)
