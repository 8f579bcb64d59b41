"""The speeds of the page: every system gets the same chances."""

from experiments.visualize import scenes
from experiments.visualize.timing import Timed, time_in_turns


def test_systems_take_turns_and_the_faster_run_is_first():
    seconds = iter([5.0, 2.0, 3.0, 4.0, 1.0, 3.5])
    turns = []

    def run(name):
        turns.append(name)
        return Timed(next(seconds), len(turns), [(len(turns),)])

    found = time_in_turns(["paged", "max", "oracle"], run)
    assert turns == ["paged", "max", "oracle"] * 2
    assert {name: [t.seconds for t in runs] for name, runs in found.items()} == {
        "paged": [4.0, 5.0],
        "max": [1.0, 2.0],
        "oracle": [3.0, 3.5],
    }
    assert found["paged"][0].iterations == 4


def test_the_page_has_the_faster_run_of_each_system(tiny_page):
    systems = [*scenes.SYSTEMS.values()]
    assert [system for system, _ in tiny_page.timings] == systems * 2
    for name, system in scenes.SYSTEMS.items():
        first, second = (s for one, s in tiny_page.timings if one == system)
        assert first != second
        kept = tiny_page.data["timed"][name]["seconds"]
        assert kept == round(min(first, second), 3)
