"""The factors of the three techniques, stacked: on a logarithmic axis they add up."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.figures import BLUE, GREEN, ORANGE, to_png
from experiments.studies.seeds import Estimate
from experiments.studies.variant_quantities import QUANTITIES

_COLORS = (BLUE, GREEN, ORANGE)


def draw_factors(
    found: Mapping[tuple[str, str], Mapping[str, Estimate]], techniques: Sequence[str]
) -> bytes:
    """Draws a bar for each workload and quantity; PNG.

    Args:
      found: by workload and quantity, the factor of each technique.
      techniques: in the order in which they are stacked.
    """
    names = [f"{workload}\n{QUANTITIES[quantity][0]}" for workload, quantity in found]
    figure = Figure(figsize=(7.2, 1.6 + 0.62 * len(names)), layout="constrained")
    ax = figure.subplots()
    left = np.ones(len(names))
    for technique, color in zip(techniques, _COLORS, strict=True):
        factors = np.array([factors[technique].mean for factors in found.values()])
        ax.barh(
            range(len(names)),
            left * factors - left,
            left=left,
            color=color,
            edgecolor="white",
            label=technique,
        )
        for place, (start, factor) in enumerate(zip(left, factors, strict=True)):
            if abs(np.log(factor)) > 0.12:
                ax.text(
                    start * np.sqrt(factor),
                    place,
                    f"{factor:.2f}x",
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=9,
                )
        left = left * factors
    for place, whole in enumerate(left):
        ax.text(1.02 * whole, place, f" {whole:.1f}x", va="center", fontsize=9)
    ax.set_xscale("log")
    ax.set_xlim(min(1.0, *left), 1.35 * max(2.0, *left))
    ticks = [x for x in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if x <= 1.35 * max(left)]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel("over none of them")
    figure.legend(loc="outside upper center", ncols=len(techniques))
    return to_png(figure)
