"""Real processes of `python run.py`, forked off a server that has imported everything: importing takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["hydra.main", "graphkv.grid", "hydra_plugins.graphkv_grid"])


def _command(arguments: Sequence[str], log: str) -> None:
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit that it is ignored
    sys.argv = ["run.py", *arguments]
    runpy.run_path(str(ROOT / "run.py"), run_name="__main__")


class Command:
    """`python run.py` with `arguments`; what it says goes to the file `log`. Methods as of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._process = _CONTEXT.Process(target=_command, args=(list(arguments), str(log)))
        log.touch()
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def wait(self) -> int:
        """Exit code, once it has ended."""
        self._process.join()
        return self._process.exitcode


def finish(arguments: Sequence[str], log: Path) -> tuple[int, str]:
    """Run the command to its end: exit code, and all that it said."""
    code = Command(arguments, log).wait()
    return code, log.read_text(encoding="utf-8")
