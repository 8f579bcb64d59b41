"""The parts of the other engines' runners that need no other engine."""

import itertools
import sys

import pytest

from experiments.engine_bench import workload
from experiments.engine_bench.engines import RUNNERS
from experiments.engine_bench.runners import Runner, RunnerError

# Answers as llama.cpp's server does, and repeats the first token of a prompt.
SERVER = """#!{python}
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "--version" in sys.argv:
    sys.exit("version: 7 (abc)")
options = dict(zip(sys.argv[1:], sys.argv[2:]))
ready = time.monotonic() + 0.2
slots = int(options["--parallel"])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200 if time.monotonic() > ready else 503, {{}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        share = int(options["--ctx-size"]) // slots
        size = len(asked["prompt"]) + asked["n_predict"]
        if size >= share or not asked["ignore_eos"] or asked["temperature"] != 0:
            return self.reply(400, {{"error": "refused"}})
        tokens = asked["prompt"][:1] * asked["n_predict"]
        self.reply(200, {{"tokens": tokens if asked["return_tokens"] else []}})

    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args):
        pass

if options["--model"] == "none":
    sys.exit(9)
ThreadingHTTPServer.request_queue_size = 128
address = options["--host"], int(options["--port"])
ThreadingHTTPServer(address, Handler).serve_forever()
"""


@pytest.fixture
def llamacpp(tmp_path):
    server = tmp_path / "llama-server"
    server.write_text(SERVER.format(python=sys.executable))
    server.chmod(0o755)
    command = [sys.executable, str(RUNNERS / "llamacpp_runner.py")]
    runner = Runner(command, 1, tmp_path / "log")

    def start(requests, model="model.gguf"):
        return runner.ask(
            "start",
            model=model,
            program=str(server),
            mode="",
            dtype="float32",
            threads=1,
            kv_tokens=workload.KV_TOKENS,
            max_seqs=workload.MAX_SEQS,
            max_model_len=workload.MAX_MODEL_LEN,
            cache="",
            requests=requests,
        )

    yield runner, start
    runner.close()


def test_llamacpp_gets_as_many_slots_as_the_longest_request_fits(llamacpp):
    runner, start = llamacpp
    requests = workload.random_requests(4096)
    answer = start(requests)
    assert answer["version"] == "llama.cpp 7 (abc)"
    assert answer["settings"]["slots"] == 4096 // 302
    tokens = runner.ask("run")["tokens"]
    assert tokens == [request.prompt[:1] * request.max_tokens for request in requests]


def test_a_server_that_does_not_start_is_a_failure(llamacpp):
    _, start = llamacpp
    with pytest.raises(RunnerError, match="llama-server ended with 9"):
        start(workload.random_requests(4096, 2), model="none")


@pytest.fixture
def transformers_runner(monkeypatch):
    monkeypatch.syspath_prepend(str(RUNNERS))
    import transformers_runner

    return transformers_runner


def test_padded_batches_fill_the_budget_and_no_more(transformers_runner):
    runner = transformers_runner.runner
    requests = workload.random_requests(4096)
    asked = [runner.Request(*request) for request in requests]
    work = runner.Work("", "", "", "float32", 1, 4096, 64, 1024, "", asked)
    batches = list(transformers_runner._batches(work))
    assert [one for batch in batches for one in batch] == asked

    def slots(batch):
        width = max(len(one.prompt) for one in batch)
        return len(batch) * (width + max(one.max_tokens for one in batch))

    assert all(slots(batch) <= 4096 for batch in batches)
    for batch, following in itertools.pairwise(batches):
        assert slots([*batch, following[0]]) > 4096


def test_a_request_larger_than_the_budget_is_a_batch_of_its_own(transformers_runner):
    runner = transformers_runner.runner
    asked = [runner.Request([5], 90), runner.Request([5], 5), runner.Request([5], 5)]
    work = runner.Work("", "", "", "float32", 1, 50, 1, 1024, "", asked)
    assert list(transformers_runner._batches(work)) == [[one] for one in asked]
