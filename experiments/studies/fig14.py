"""Fig 14: latency against request rate, several sequences a request, on Alpaca."""

from experiments.attribution import Row
from experiments.claim import Claim
from experiments.studies.capacity_module import CapacityStudy
from experiments.studies.capacity_study import capacities, mark_of
from experiments.studies.panels import BEAMS_ASSUMED, FIG14, Panel
from experiments.studies.paper import SOURCE
from experiments.studies.seeds import Estimate, compare
from experiments.studies.study import Scale
from experiments.studies.study_claim import compared_claim

TITLE = "Normalized latency against request rate: parallel sampling and beam search"

_study = CapacityStudy(FIG14)
tasks, run, draw = _study.tasks, _study.run, _study.draw


def claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """Returns what is claimed of each panel, then whether more sequences gain more."""
    made = _study.claims(rows, scale)
    panels = {(panel.n, panel.beam_width): panel for panel in FIG14}
    for few, many in (((2, 1), (6, 1)), ((1, 2), (1, 6))):
        panel = panels[many]
        note = "of vLLM's capacity over Orca (Oracle)'s, with 6 sequences and with 2"
        if panel.beam_width > 1:
            note += f"; {BEAMS_ASSUMED}"
        made.append(
            compared_claim(
                f"{panel.name}.trend.vllm_over_oracle.6_over_2",
                _gain(rows, panel),
                _gain(rows, panels[few]),
                paper=None,
                at_least=1.0,
                unit="x, of the two ratios",
                kind="predicted",
                source=f"{SOURCE} Fig 14, more sequences gain more",
                mark=mark_of(panel, scale),
                note=note,
            )
        )
    return made


def _gain(rows: list[Row], panel: Panel) -> Estimate | None:
    """Returns how many times the load of Orca (Oracle) vLLM serves."""
    ours, oracle = (
        capacities(rows, panel=panel.name, system=system)
        for system in ("vllm", "orca_oracle")
    )
    return compare(ours, oracle).ratio
