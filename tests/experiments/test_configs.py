"""Every configuration that ships, as far as it goes without a model."""

import pytest

from experiments.base_config import PRESETS
from experiments.claims import check_claims
from experiments.command_line import config_files, parse
from experiments.studies.base_config import scale_of
from experiments.studies.study import load_study
from experiments.sweep import expand, parse_sweeps
from experiments.visualize.settings import size_of


def kinds_of(name):
    config = parse([f"--config={name}"]).config
    return {kind for kind in ("studies", "page") if kind in config} or {"cells"}


STUDIES = [name for name in config_files() if kinds_of(name) == {"studies"}]
RUNS = [name for name in config_files() if kinds_of(name) == {"cells"}]
PAGES = [name for name in config_files() if kinds_of(name) == {"page"}]


def cells_of(name, preset):
    command = parse([f"--config={name}", f"--preset={preset}"])
    return expand(command.config, parse_sweeps(command.config, command.config.sweep))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", RUNS)
def test_its_cells_are_legal_and_told_apart(name, preset):
    cells = cells_of(name, preset)
    assert len({cell.key for cell in cells}) == len(cells) > 1
    workloads = {(cell.workload.name, cell.label) for cell in cells}
    assert len(workloads) == len(cells)
    identities = {str(cell.identity) for cell in cells}
    assert len(identities) == len(cells)


@pytest.mark.parametrize("name", RUNS)
def test_its_claims_have_its_name(name):
    command = parse([f"--config={name}"])
    assert command.config.claims == command.config.name == name
    check_claims(name, [], [])


def test_the_figures_of_the_paper_have_its_sizes():
    parallel = {c.workload.n for c in cells_of("parallel_sampling", "quick")}
    assert parallel == {1, 2, 4, 6}
    beams = {c.workload.beam_width for c in cells_of("beam_search", "quick")}
    assert beams == {1, 2, 4, 6}
    sizes = {c.engine.block_size for c in cells_of("preemption", "full")}
    assert sizes == {2**power for power in range(9)}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", STUDIES)
def test_its_studies_are_there_and_have_tasks(name, preset, tmp_path):
    words = [f"--config={name}", f"--preset={preset}"]
    if name == "recorded":  # of a file that the user brings
        words.append(f"--config.options.recording.path={tmp_path / 'trace.csv'}")
        (tmp_path / "trace.csv").touch()
    config = parse(words).config
    assert config.name == name
    assert len(set(config.studies)) == len(config.studies) > 0
    for study in map(load_study, config.studies):
        assert study.TITLE and study.tasks(scale_of(config))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", PAGES)
def test_its_page_can_be_made(name, preset):
    config = parse([f"--config={name}", f"--preset={preset}"]).config
    assert config.name == name
    size = size_of(config)
    # Contiguous memory serves a few at once, and most wait.
    at_once = (
        size.config.num_blocks * size.config.block_size // size.config.max_model_len
    )
    assert 1 < at_once < size.requests / 2


def test_most_is_run_for_the_full_preset():
    scales = [
        scale_of(parse(["--config=paper", f"--preset={p}"]).config) for p in PRESETS
    ]
    quick, full = scales
    assert len(quick.seeds) >= 3 and len(full.seeds) >= 3
    assert full.time_share == 1 and not full.mark
    assert quick.time_share < 1 and "quick" in quick.mark
