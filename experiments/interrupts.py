"""Ctrl-C, heard wherever it falls."""

import signal


class Interrupts:
    """Notes Ctrl-C while it is entered, beside raising KeyboardInterrupt.

    Python drops an exception in a callback of the garbage collector, and JAX has one
    there: a Ctrl-C that falls into it would be lost. `check` raises it again.
    """

    def __init__(self):
        self._heard = False
        self._installed = False

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed."""
        if self._heard:
            raise KeyboardInterrupt

    def __enter__(self) -> "Interrupts":
        # Where something else handles or ignores the signal, it stays that way.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._note)
                self._installed = True
            except ValueError:
                pass  # not the main thread, which alone gets it
        return self

    def __exit__(self, *error: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, *where: object) -> None:
        del where
        self._heard = True
        raise KeyboardInterrupt
