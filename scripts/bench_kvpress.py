"""One cell with kvpress, as its evaluation does it: load the model, then a prefill and a decode a prompt.

`scripts/bench_grid.py` runs this in kvpress' own environment. A JSON object on standard input says what:

    {"model": folder, "press": "SnapKVPress", "budget": 256, "tokens": 64, "prompts": [[token ids], …]}

and one on standard output what came of it: the seconds of each prompt (`prompts`), and the tokens that each layer
kept of the last one (`kept`).
"""

from __future__ import annotations

import json
import sys
import time

import kvpress
import torch
from transformers import DynamicCache, pipeline


def main() -> None:
    """Do the cell."""
    asked = json.load(sys.stdin)
    run = pipeline("kv-press-text-generation", model=asked["model"], device="cpu", dtype=torch.float32)
    run.model.generation_config.eos_token_id = -1  # no token: answers have their full length
    seconds = []
    for ids in asked["prompts"]:
        begin = time.perf_counter()
        # The press sees the prompt but for its last token, which kvpress then reads as the question.
        inputs = {"context_ids": torch.tensor([ids[:-1]]), "questions_ids": [torch.tensor([ids[-1:]])]}
        ratio = 1 - (asked["budget"] + 0.25) / (len(ids) - 1)  # kvpress rounds down, in floats
        press = getattr(kvpress, asked["press"])(compression_ratio=ratio, window_size=32, kernel_size=7)
        cache = DynamicCache()
        run.forward(inputs, press=press, max_new_tokens=asked["tokens"], cache=cache)
        seconds.append(time.perf_counter() - begin)
    kept = [cache.get_seq_length(layer) for layer in range(len(cache))]
    json.dump({"prompts": seconds, "kept": kept}, sys.stdout)


if __name__ == "__main__":
    main()
