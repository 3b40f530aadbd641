"""Batched against solo decoding of 24 cells on the embedded model, and both against reading the weights once.

    python scripts/bench_decode.py [--model smollm2] [--prompt 2000] [--tokens 64] [--repeat 3]

Prints milliseconds per token, the ratio of solo to batch, and the time to read the weights once from memory, which no
decode step of any batch size can beat. Repeats take turns, so that a busy machine slows both; medians are shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

import graphkv
from graphkv.prefill import synchronize

ESSAYS = Path(__file__).resolve().parents[1] / "eval/data/haystack"


def cells_of(engine: graphkv.Engine, prompt: graphkv.Prefill) -> list[graphkv.Cell]:
    """24 cells: 2 scorers x 6 budgets x graph off and on."""
    return [
        engine.compress(prompt, scorer, budget, graph)
        for scorer in ("snapkv", "pyramidkv")
        for budget in (64, 96, 128, 192, 256, 512)
        for graph in (None, {"rounds": 1})
    ]


def weight_read_seconds(model: torch.nn.Module, repeat: int) -> tuple[float, int]:
    """Median wall time to read every parameter once (a sum over each), and their bytes."""
    weights = [parameter.data for parameter in model.parameters()]
    times = []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        for weight in weights:
            weight.sum()
        synchronize(weights[0].device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]), sum(weight.nbytes for weight in weights)


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", help="in half precision batch and solo may part ways at a tie")
    parser.add_argument("--prompt", type=int, default=2000, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a cell, stop tokens off")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()

    engine = graphkv.Engine.from_pretrained(options.model, dtype=options.dtype)
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in sorted(ESSAYS.glob("*.txt")))
    prompt = engine.prefill(engine.tokenizer(text)["input_ids"][: options.prompt])
    cells = cells_of(engine, prompt)
    select = sum(cell.seconds for cell in cells)
    model = f"{options.model}, {options.dtype}"
    print(f"{model}: {prompt.n} prompt tokens, {len(cells)} cells, {options.tokens} new tokens each")
    print(f"prefill {prompt.seconds:.2f} s; scoring, graph and selection of all cells {select:.2f} s")

    times: dict[str, list[float]] = {"batch": [], "solo": []}
    answers = {}
    for _ in range(options.repeat):
        for mode in times:
            begin = time.perf_counter()
            answers[mode] = engine.decode(prompt, cells, max_new_tokens=options.tokens, stop_ids=(), mode=mode)
            times[mode].append(time.perf_counter() - begin)
    batch, solo = (statistics.median(times[mode]) for mode in ("batch", "solo"))
    read, size = weight_read_seconds(engine.model, options.repeat)
    steps = options.tokens - 1
    kept = sum(cell.bytes for cell in cells)
    same = sum(a.ids == b.ids for a, b in zip(answers["batch"], answers["solo"], strict=True))

    milliseconds = {"batch": batch / steps * 1e3, "solo": solo / steps / len(cells) * 1e3}
    print(f"{'':8}{'total s':>9}{'ms/step':>9}{'ms/token':>10}{'x weight read':>15}")
    for mode, total, rows in (("batch", batch, len(cells)), ("solo", solo, 1)):
        step = milliseconds[mode]
        print(f"{mode:8}{total:9.2f}{step:9.1f}{step / rows:10.2f}{step / read / 1e3:15.1f}")
    print(f"weights: {size / 1e6:.0f} MB, read once in {read * 1e3:.1f} ms ({size / read / 1e9:.1f} GB/s)")
    print(f"kept keys and values of all cells: {kept / 1e6:.0f} MB")
    print(f"same tokens in {same}/{len(cells)} cells")
    print(f"ratio_solo_to_batch={solo / batch:.2f}")


if __name__ == "__main__":
    main()
