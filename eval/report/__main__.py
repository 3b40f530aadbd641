"""`python -m eval.report [RESULTS_DIR] [--out FILE]`: write the page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.errors import UserError
from eval.records import write_atomically
from eval.report.page import build


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 2 after a user's mistake, which is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.report", description="Write one page that shows everything below a folder of results."
    )
    parser.add_argument("results", type=Path, nargs="?", default=Path("results"), metavar="RESULTS_DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RESULTS_DIR/report/index.html")
    options = parser.parse_args(arguments)
    out = options.out or options.results / "report" / "index.html"
    try:
        page = build(options.results, out)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page.html)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write {out}: {error.strerror}", file=sys.stderr)
        return 2
    for damaged in page.damaged:
        print(f"warning: left out: {damaged.reason}", file=sys.stderr)
    print(f"{out}  {page.summary}, {len(page.html.encode()) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
