"""`scripts/soak`: it runs, finds what is broken, and says how to repeat it."""

import all_operations
import pytest
import random_service
import soak

pytestmark = pytest.mark.newest(
    reason="what the script prints; what it runs is tested by itself"
)


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_it_runs_for_as_long_as_it_is_told(capsys):
    assert soak.main(["--seconds", "3", "--seed", "1", "--only", "memory"]) == 0
    first, *operations, last = lines(capsys)
    assert first == "seed 1, 3 s"
    done = {name: int(count) for name, count in map(str.split, operations)}
    assert {op.name.lower() for op in all_operations.WEIGHTS} == set(done)
    assert f"{sum(done.values())} operations, 0 violations" in last
    assert sum(done.values()) % soak.LENGTH == 0


def test_both_parts_take_turns(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(soak, "PROGRAMS", 2)
    monkeypatch.setattr(soak.Soak, "run", lambda self, case: ran.append(case))
    monkeypatch.setattr(soak, "_run_until", lambda soak, end, cases: take(soak, cases))

    def take(soak, cases):
        for case, _ in zip(cases, range(9)):
            soak.run(case)

    assert soak.main(["--seed", "5"]) == 0
    assert list(map(str, ran[:6])) == [
        "memory:cached:5",
        "memory:cached:6",
        "service:continuous:5",
        "memory:uncached:7",
        "memory:uncached:8",
        "service:beams, recompute:6",
    ]


def test_a_violation_is_printed_and_can_be_repeated(monkeypatch, capsys):
    check = all_operations.check

    def broken(program, shape):
        check(program, shape)
        assert program.statuses.count("OK") % 2, "an even number of OKs"

    monkeypatch.setattr(all_operations, "check", broken)
    assert soak.main(["--seconds", "2", "--seed", "0", "--only", "memory"]) == 1
    printed = lines(capsys)
    found = [line for line in printed if line.startswith("VIOLATION in memory:cached:")]
    assert found and found[0].endswith(": AssertionError: an even number of OKs")
    case = found[0].split()[2].rstrip(":")
    assert f"  to repeat it: ./scripts/soak --replay '{case}'" in printed
    assert not printed[-1].endswith(" 0 violations")
    assert soak.main(["--replay", case]) == 1
    again = lines(capsys)
    assert found[0] in again
    operations = [line for line in again if line[:6].strip().isdecimal()]
    assert len(operations) == soak.LENGTH


def test_a_service_is_a_case_and_its_violation_is_printed(monkeypatch, capsys):
    def serve(kind, rng, log):
        log += ["submit 0 [3]", "step 5"]
        raise RuntimeError(f"{kind} {rng.random()}")

    monkeypatch.setattr(random_service, "serve_at_random", serve)
    printed = []
    for _ in range(2):
        assert soak.main(["--replay", "service:prefix cache, static:12"]) == 1
        printed.append(lines(capsys)[:-1])
    assert printed[0] == printed[1], "a seed says everything"
    assert printed[0][:2] == ["     0 submit 0 [3]", "     1 step 5"]
    assert printed[0][2].startswith("VIOLATION in service:prefix cache, static:12: Run")


def test_ctrl_c_ends_it_with_the_counts(monkeypatch, capsys):
    def interrupt(soak, case):
        raise KeyboardInterrupt

    monkeypatch.setattr(soak.Soak, "run", interrupt)
    assert soak.main([]) == 130
    *_, counts, last = lines(capsys)
    assert counts.endswith("0 operations, 0 violations") and last == "interrupted"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--seconds", "0"], "--seconds is 0; it must be above 0"),
        (["--seed", "-1"], "--seed is -1; it must be 0 or more"),
        (["--replay", "x:y:1"], "it must be memory:KIND:SEED or service:KIND:SEED"),
        (["--replay", "memory:y:1"], "with KIND one of cached, uncached, single"),
        (["--replay", "service:static:x"], "and SEED a number"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        soak.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
