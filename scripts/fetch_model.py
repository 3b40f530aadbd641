"""Fetch the embedded model into the cache folder, unless it is there: `python scripts/fetch_model.py`."""

import sys

from eval.errors import UserError
from graphkv import embedded

if __name__ == "__main__":
    try:
        print(f"embedded model: {embedded.fetch()}")
    except UserError as error:
        sys.exit(f"error: {error}")
