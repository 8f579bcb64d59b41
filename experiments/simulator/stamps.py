"""When requests had their first token, and when they ended: steps become times."""

import numpy as np

from experiments.simulator.clock import to_seconds
from experiments.simulator.simulate import SimulatorState


class Stamps:
    """Times of what is in the request slots, read whenever the host looks.

    The device notes the step of an event with the request, and the time with the step:
    so no step has to write to the requests' times.

    Attributes:
      first_token: f64[R]. When each slot's request had its first token; of a free slot
        anything.
      ended: f64[R]. When it ended.
    """

    def __init__(self, slots: int, together: bool):
        """Starts with no times.

        Args:
          slots: R.
          together: see `SimulatorProgram`.
        """
        self.first_token, self.ended = np.zeros((2, slots))
        self._together = together
        self._steps = 0  # taken when the host last looked

    def read(self, state: SimulatorState) -> None:
        """Reads what has happened since the last time, at most K steps ago."""
        requests, ends = state.scheduler.requests, to_seconds(state.ends)
        timeline = np.asarray(requests.timeline)[: len(self.ended)]
        for event, times in ((1, self.first_token), (2, self.ended)):
            step = timeline[:, event]
            new = step >= self._steps
            times[new] = ends[step[new] % len(ends)]
        self._steps = int(state.scheduler.iteration)

    def ends_of(self, state: SimulatorState, slots: np.ndarray) -> np.ndarray:
        """Returns when the requests in i64[N] slots were done, f64[N].

        Args:
          state: that was read last.
          slots: their requests are over; if they end together, those of whole batches.
        """
        ended = self.ended[slots]
        if not self._together:
            return ended
        # All requests of a static batch are admitted in one step.
        admitted = np.asarray(state.scheduler.requests.timeline)[slots, 0]
        _, batch = np.unique(admitted, return_inverse=True)
        latest = np.zeros(len(slots))
        np.maximum.at(latest, batch, ended)
        return latest[batch]
