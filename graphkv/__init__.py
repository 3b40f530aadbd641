"""GraphKV: KV-cache eviction that re-ranks with a similarity graph, and the benchmark for it."""

from graphkv.engine import Cell, Engine
from graphkv.prefill import Prefill

__all__ = ["Cell", "Engine", "Prefill"]
