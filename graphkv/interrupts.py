"""Ctrl-C that is not lost: C code of libraries may drop any exception, a KeyboardInterrupt among them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_pressed = threading.Event()


@contextmanager
def noticed() -> Iterator[None]:
    """Remember Ctrl-C, which raises KeyboardInterrupt as ever; where another handler is set, that one stays."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _pressed.clear()
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def check() -> None:
    """Raise the KeyboardInterrupt that was pressed since `noticed`, if it got lost."""
    if _pressed.is_set():
        _pressed.clear()
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    _pressed.set()
    raise KeyboardInterrupt
