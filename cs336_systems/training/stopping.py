"""How training ends before its last step: by a signal, or by numbers that are none."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

SAME_WITHIN = 5.0
"""Seconds in which signals to one of several processes are the same one: a terminal and torchrun both send it."""


class NotFiniteError(ArithmeticError):
    """The loss, the gradient or the parameters are infinite or no numbers: they are of no use from there on."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: training cannot go on. A lower --learning-rate, a longer --warmup-steps or a smaller --grad-clip "
            "may help"
        )


@dataclass(frozen=True)
class Ending:
    """How training ended: at which step, and by which signal, if by one."""

    step: int
    signal: int | None


class StopRequest:
    """Ctrl-C and SIGTERM, noted, so that the step under way can end; a second one interrupts at once.

    Args:
        same_within: seconds after the first signal in which others are the same one.
    """

    def __init__(self, same_within: float = 0.0) -> None:
        self.signal: int | None = None
        self._same_within = same_within
        self._since = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Until the block ends. Python lets only the main thread listen; elsewhere signals do what they did."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self.signal is not None and now - self._since >= self._same_within:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal, self._since = number, now
