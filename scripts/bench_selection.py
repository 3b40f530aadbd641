"""Time and memory of scoring, graph and selection, a layer at a time, beside reading the layer's keys once.

    python scripts/bench_selection.py [--lengths 1000 2000 4000 8000] [--scorers …] [--edges kk vv] [--prefill]

Layers are random: SmolLM2's shape (9 query and 3 KV heads of size 64) at each length, and Llama-3-8B's (32 and 8
of size 128) at 8,000 and 32,000 tokens with --llama. `--prefill` also times the embedded model's prefill at the same
lengths and shows each step of its 30 layers as a share of it. MiB is what a step's first run takes beyond the layer:
the process's peak of resident memory, which Linux lets one reset, over what was resident before it.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import graphkv
import scorers
from graphkv.graph import Graph, rerank_layer
from graphkv.selection import keep
from scorers import ALL_QUERIES, LayerView, Rope

SMOLLM2 = (9, 3, 64)
LLAMA3 = (32, 8, 128)
N_LAYERS = {SMOLLM2: 30, LLAMA3: 32}


def random_layer(n: int, shape: tuple[int, int, int], queries: int) -> LayerView:
    """A layer of `n` tokens with everything that scorers and edges look at."""
    heads, kv_heads, d = shape
    generator = torch.Generator().manual_seed(n)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    angles = torch.arange(n + 512)[:, None] / 10_000 ** (torch.arange(0, d, 2) / d)
    angles = torch.cat([angles, angles], -1)
    return LayerView(
        normal(kv_heads, n, d) + 0.7,
        normal(kv_heads, n, d),
        normal(heads, min(n, queries), d),
        d**-0.5,
        0,
        N_LAYERS[shape],
        rope=Rope(angles.cos(), angles.sin()),
        mass=torch.rand(heads, n, generator=generator),
        answer_queries=normal(heads, 32, d),
    )


def resident(peak: bool) -> float:
    """MiB of resident memory: now, or at most since the peak was reset."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+)", status)[1]) / 1024


def measure(step: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Median seconds of a step, and the MiB of resident memory that its first run took."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but not given back would hide what the step takes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident(peak=False)
    step()
    rise = resident(peak=True) - before
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), rise


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000, 8000])
    parser.add_argument("--scorers", nargs="+", default=[name for name in scorers.names() if name != "full"])
    parser.add_argument("--edges", nargs="+", default=["kk", "qk", "qq", "kv", "vv"])
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--prefill", action="store_true", help="compare with the embedded model's prefill")
    parser.add_argument("--llama", action="store_true", help="also Llama-3-8B's shape at 8,000 and 32,000 tokens")
    options = parser.parse_args()

    engine = graphkv.Engine.from_pretrained("smollm2") if options.prefill else None
    snapkv = scorers.get("snapkv")()
    cases = [(n, SMOLLM2) for n in options.lengths]
    if options.llama:
        cases += [(8000, LLAMA3), (32000, LLAMA3)]
    print(f"budget {options.budget}; milliseconds a layer (median of {options.repeat}); MiB: peak of resident memory")
    print(f"{'shape':8}{'n':>7}  {'step':28}{'ms':>9}{'MiB':>8}{'x key read':>12}{'% of prefill':>14}")
    for n, shape in cases:
        layers = N_LAYERS[shape]
        prefill = None
        if engine is not None and shape == SMOLLM2:
            ids = [(31 * i + i // 7) % 40_000 + 100 for i in range(min(n, engine.info.max_positions - 1))]
            prefill = statistics.median(engine.prefill(ids, window=32).seconds for _ in range(2))
            print(f"{'smollm2':8}{n:7}  {'prefill of all layers':28}{prefill * 1e3:9.1f}")
        view = random_layer(n, shape, ALL_QUERIES)
        read, _ = measure(lambda view=view: view.keys.sum(), options.repeat)

        def show(label: str, step: Callable, n=n, shape=shape, read=read, prefill=prefill, layers=layers) -> None:
            seconds, mib = measure(step, options.repeat)
            share = "" if prefill is None else f"{seconds * layers / prefill:14.2%}"
            name = "smollm2" if shape == SMOLLM2 else "llama3"
            print(f"{name:8}{n:7}  {label:28}{seconds * 1e3:9.2f}{mib:8.1f}{seconds / read:12.1f}{share}", flush=True)

        show("read the keys once", lambda view=view: view.keys.sum())
        scores = snapkv.score(view)
        for name in options.scorers:
            scorer = scorers.get(name)()
            show(f"score {name}", lambda scorer=scorer, view=view: scorer.score(view))
        for edge in options.edges:
            graph = Graph(edge=edge, neighbors=3)
            show(
                f"graph {edge}",
                lambda graph=graph, view=view, scores=scores: rerank_layer(scores, snapkv, view, graph, options.budget),
            )
        show("select", lambda n=n, scores=scores: keep(scores, options.budget, n))


if __name__ == "__main__":
    main()
