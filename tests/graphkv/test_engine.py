"""Prefill, cells and decoding: one prefill serves all cells, batch equals solo, and nothing leaks."""

from __future__ import annotations

import hashlib
import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

import graphkv
import scorers
from eval.errors import UserError
from graphkv import attention, decode
from graphkv.cache import RaggedCache
from graphkv.groups import similar
from graphkv.prefill import Recorder, prefill
from scorers import ALL_QUERIES, Needs

GRAPH = {"rounds": 1, "neighbors": 3}
EVERYTHING = Needs(queries=ALL_QUERIES, mass=True)


def mixed_cells(engine, prompt):
    """Cells of all scorers, several budgets, with and without graph; pyramid layers have different lengths."""
    made = [engine.compress(prompt, "full")]
    for scorer, budget, graph in [
        ("snapkv", 64, None),
        ("snapkv", 64, GRAPH),
        ("snapkv", 0.5, {"rounds": 2}),
        ("pyramidkv", 64, None),
        ("pyramidkv", 96, GRAPH),
        ("knorm", 48, None),
        ("knorm", 200, GRAPH),
    ]:
        made.append(engine.compress(prompt, scorer, budget, graph))
    return made


def fingerprint(prompt) -> str:
    """sha256 over every tensor of a prefill."""
    digest = hashlib.sha256()
    for view in prompt.layers:
        for tensor in (view.keys, view.values, view.queries):
            digest.update(tensor.contiguous().numpy().tobytes())
    digest.update(prompt.logits.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def smol_sdpa(smol):
    """The real model as transformers runs it, without our attention."""
    return AutoModelForCausalLM.from_pretrained(smol.info.folder, dtype=torch.float32, attn_implementation="sdpa")


def test_prefill_equals_the_models_own_forward(smol, smol_sdpa, smol_prompt):
    with torch.inference_mode():
        cache = DynamicCache()
        out = smol_sdpa(torch.tensor([smol_prompt.ids]), cache=cache, logits_to_keep=1)
    torch.testing.assert_close(smol_prompt.logits, out.logits[0, -1])
    for view, layer in zip(smol_prompt.layers, cache.layers, strict=True):
        torch.testing.assert_close(view.keys, layer.keys[0])
        torch.testing.assert_close(view.values, layer.values[0])


def test_full_cell_writes_what_transformers_generates(smol, smol_sdpa, smol_prompt):
    ids = torch.tensor([smol_prompt.ids])
    expected = smol_sdpa.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    cell = smol.compress(smol_prompt, "full")
    (answer,) = smol.decode(smol_prompt, [cell], max_new_tokens=24)
    assert answer.ids == expected[0, smol_prompt.n :].tolist()


@pytest.mark.parametrize(("scorer", "graph"), [("snapkv", None), ("pyramidkv", GRAPH)])
def test_compressed_cell_equals_a_transformers_cache_cut_by_hand(smol, smol_sdpa, smol_prompt, scorer, graph):
    # Case C1 against an independent path: kept keys in a DynamicCache, true positions passed by hand.
    cell = smol.compress(smol_prompt, scorer, 80, graph)
    (answer,) = smol.decode(smol_prompt, [cell], max_new_tokens=16, stop_ids=())
    cache = DynamicCache()
    for layer, (view, kept) in enumerate(zip(smol_prompt.layers, cell.kept, strict=True)):
        index = kept[..., None].expand(-1, -1, view.keys.shape[-1])
        cache.update(view.keys.gather(1, index)[None], view.values.gather(1, index)[None], layer)
    tokens = [int(smol_prompt.logits.argmax())]
    with torch.inference_mode():
        for position in range(smol_prompt.n, smol_prompt.n + 15):
            out = smol_sdpa(torch.tensor([tokens[-1:]]), cache=cache, position_ids=torch.tensor([[position]]))
            tokens.append(int(out.logits[0, -1].argmax()))
    assert answer.ids == tokens


def test_first_generated_token_sits_at_the_prompts_length(tiny, tiny_prompt, monkeypatch):
    # Case C1.
    seen = []
    forward = attention.forward

    def spy(model, ids, start, state, last=1):
        seen.append(start)
        return forward(model, ids, start, state, last)

    monkeypatch.setattr(decode, "forward", spy)
    cell = tiny.compress(tiny_prompt, "snapkv", 40)
    tiny.decode(tiny_prompt, [cell], max_new_tokens=4, stop_ids=())
    assert seen == [300, 301, 302]


def test_token_zero_is_the_full_caches_for_every_cell(smol, smol_prompt):
    # Case C9.
    cells = mixed_cells(smol, smol_prompt)
    answers = smol.decode(smol_prompt, cells, max_new_tokens=1)
    assert {answer.ids[0] for answer in answers} == {int(smol_prompt.logits.argmax())}


def test_batch_equals_solo_on_the_real_model(smol, smol_prompt):
    cells = mixed_cells(smol, smol_prompt)
    batch = smol.decode(smol_prompt, cells, max_new_tokens=32)
    solo = smol.decode(smol_prompt, cells, max_new_tokens=32, mode="solo")
    assert [answer.ids for answer in batch] == [answer.ids for answer in solo]
    assert [answer.finish for answer in batch] == [answer.finish for answer in solo]
    assert len({tuple(answer.ids) for answer in batch}) > 3  # or the test would not tell cells apart
    assert [answer.batch for answer in batch] == [8] * 8 and [answer.batch for answer in solo] == [1] * 8


def test_rows_leave_at_their_stop_token(smol, smol_prompt):
    cells = mixed_cells(smol, smol_prompt)
    free = smol.decode(smol_prompt, cells, max_new_tokens=24, stop_ids=())
    stop = {free[1].ids[5], free[4].ids[9]}
    stopped = smol.decode(smol_prompt, cells, max_new_tokens=24, stop_ids=stop)
    for answer, whole in zip(stopped, free, strict=True):
        end = next((i + 1 for i, token in enumerate(whole.ids) if token in stop), 24)
        assert answer.ids == whole.ids[:end]
        assert answer.finish == ("stop" if whole.ids[end - 1] in stop else "length")
    assert len({len(answer.ids) for answer in stopped}) > 1


def test_minimum_length_forbids_stop_tokens(tiny, tiny_prompt):
    first = int(tiny_prompt.logits.argmax())
    cell = tiny.compress(tiny_prompt, "full")
    (answer,) = tiny.decode(tiny_prompt, [cell], max_new_tokens=3, stop_ids=[first])
    assert answer.ids == [first] and answer.finish == "stop"
    (answer,) = tiny.decode(tiny_prompt, [cell], max_new_tokens=3, stop_ids=[first], min_new_tokens=1)
    assert answer.ids[0] == int(tiny_prompt.logits.argsort()[-2])


@pytest.mark.parametrize("name", scorers.names())
@pytest.mark.parametrize("graph", [None, GRAPH])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 47, 48, 49])
def test_a_prompt_within_the_budget_gives_the_full_caches_tokens(tiny, name, graph, n):
    # Case S11.
    prompt = tiny.look_ahead(tiny.prefill(list(range(60, 60 + n)), needs=EVERYTHING), 6)
    full, cell = tiny.compress(prompt, "full"), tiny.compress(prompt, name, 48, graph)
    answers = [tiny.decode(prompt, [c], max_new_tokens=6)[0].ids for c in (full, cell)]
    if n <= 48:
        assert answers[0] == answers[1]
        assert cell.kept_per_layer == [n, n]
    elif name != "full":
        assert min(cell.kept_per_layer) < n


def test_stored_tokens_are_what_the_cell_reports(smol, smol_prompt):
    # Cases B7, B10 and S14: one copy a KV head, the window inside the budget, bytes of the real tensors.
    for cell in mixed_cells(smol, smol_prompt):
        cache = RaggedCache(smol_prompt, [cell.kept], capacity=0)
        shapes = [group.keys.shape for (group,) in cache.layers]
        assert [shape[1] for shape in shapes] == cell.kept_per_layer
        assert {shape[0] for shape in shapes} == {3}
        stored = sum(g.keys.nbytes + g.values.nbytes for (g,) in cache.layers)
        assert stored == cell.bytes
    assert smol.compress(smol_prompt, "snapkv", 64).kept_per_layer == [64] * 30
    assert smol.compress(smol_prompt, "snapkv", 64).achieved == 64


def test_cache_grows_by_one_a_token(smol, smol_prompt):
    # Case C7: eviction happens once, after the prefill.
    cell = smol.compress(smol_prompt, "snapkv", 64)
    cache = RaggedCache(smol_prompt, [cell.kept], capacity=5)
    before = cache.layers[0][0].keys[:, :64].clone()
    for step in range(1, 4):
        attention.forward(smol.model, torch.tensor([[100]]), cache.position, cache)
        cache.advance(1)
        (group,) = cache.layers[0]
        assert group.start + cache.appended == 64 + step
        assert group.keys.shape == (3, 64 + 5, 64)
        assert torch.equal(group.keys[:, :64], before) and group.keys[:, 64 + step - 1].abs().sum() > 0


def test_cells_leave_the_prefill_as_it_was(smol, smol_prompt):
    # Case T6.
    before = fingerprint(smol_prompt)
    cells = mixed_cells(smol, smol_prompt)
    alone = smol.decode(smol_prompt, cells[4:5], max_new_tokens=8)[0].ids
    smol.decode(smol_prompt, cells, max_new_tokens=8)
    assert fingerprint(smol_prompt) == before
    assert smol.decode(smol_prompt, cells[4:5], max_new_tokens=8)[0].ids == alone


def test_every_sample_is_compressed_in_any_order(tiny, essay):
    # Cases T1 and T3, and a short sample after a long one.
    texts = [essay[:900], essay[100:1000], essay[200:270], essay[300:800]]

    def answer(text):
        prompt = tiny.prefill(text)
        cell = tiny.compress(prompt, "pyramidkv", 64, GRAPH)
        return cell.kept_per_layer, tiny.generate(prompt, [cell], max_new_tokens=12)

    forward = [answer(text) for text in texts]
    backward = [answer(text) for text in reversed(texts)][::-1]
    assert forward == backward
    assert [sum(kept) for kept, _ in forward] == [128, 128, 128, 128]
    assert all(kept[0] > kept[1] for kept, _ in forward[:2])


def test_chunked_prefill_gives_the_same(smol, smol_prompt):
    for chunk in (1000, 600, 256, 70):
        other = smol.prefill(smol_prompt.ids, window=64, chunk=chunk)
        torch.testing.assert_close(other.logits, smol_prompt.logits, rtol=1e-4, atol=1e-3)
        for a, b in zip(other.layers, smol_prompt.layers, strict=True):
            torch.testing.assert_close(a.keys, b.keys, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(a.values, b.values, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(a.queries, b.queries, rtol=1e-3, atol=1e-3)
    cells = [smol.compress(prompt, "pyramidkv", 64, GRAPH) for prompt in (smol_prompt, other)]
    texts = [smol.generate(p, [c], max_new_tokens=16) for p, c in zip((smol_prompt, other), cells, strict=True)]
    assert texts[0] == texts[1]


def test_recorded_window_spans_chunks(tiny, essay):
    whole = tiny.prefill(essay[:99], window=40)
    parts = tiny.prefill(essay[:99], window=40, chunk=7)
    for a, b in zip(whole.layers, parts.layers, strict=True):
        assert a.queries.shape == (4, 40, 16)
        torch.testing.assert_close(a.queries, b.queries, rtol=1e-4, atol=1e-5)


def test_two_tokens_at_once_over_layers_of_different_length(tiny, tiny_prompt):
    # Case C3: several new tokens in one forward, pyramid lengths, padded rows: as one at a time.
    cells = [tiny.compress(tiny_prompt, "pyramidkv", b).kept for b in (40, 64)]
    cells.append(tiny.compress(tiny_prompt, "full").kept)
    ids = [5, 80, 33, 101]
    together = decode.teacher_force(tiny.model, tiny_prompt, cells, ids)
    for row, kept in enumerate(cells):
        cache = RaggedCache(tiny_prompt, [kept], capacity=len(ids))
        for step, token in enumerate(ids):
            with torch.inference_mode():
                logits = attention.forward(tiny.model, torch.tensor([[token]]), cache.position, cache)
            cache.advance(1)
            torch.testing.assert_close(together[row, step], logits[0, 0], rtol=1e-4, atol=1e-4)


def test_padding_is_never_attended(tiny, tiny_prompt):
    # A row's logits do not depend on the rows beside it, however much padding they bring.
    kept = [tiny.compress(tiny_prompt, "knorm", budget).kept for budget in (50, 60, 99, 300)]
    together = decode.teacher_force(tiny.model, tiny_prompt, kept, [7, 8])
    for row, own in enumerate(kept):
        alone = decode.teacher_force(tiny.model, tiny_prompt, [own], [7, 8])[0]
        torch.testing.assert_close(together[row], alone, rtol=1e-4, atol=1e-5)


def test_groups_hold_rows_of_similar_length():
    assert similar([100, 4000, 60, 40, 3000]) == [[1, 4], [0, 2], [3]]
    assert similar([64, 64, 64]) == [[0, 1, 2]]
    lengths = [7, 900, 450, 449, 3, 64, 100, 7]
    groups = similar(lengths)
    assert sorted(row for group in groups for row in group) == list(range(8))
    assert all(min(lengths[r] for r in g) * 2 >= max(lengths[r] for r in g) for g in groups)


def test_an_exception_leaves_the_model_as_it_was(tiny, tiny_prompt, monkeypatch):
    cell = tiny.compress(tiny_prompt, "snapkv", 64)
    before = tiny.generate(tiny_prompt, [cell], max_new_tokens=8)
    modules = {name: dict(module.__dict__) for name, module in tiny.model.named_modules()}

    def fail(*_, **__):
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "_remember_queries", fail)
        with pytest.raises(MemoryError):
            tiny.prefill("a prompt that fails half way")
        patched.setattr(RaggedCache, "advance", fail)
        with pytest.raises(MemoryError):
            tiny.generate(tiny_prompt, [cell], max_new_tokens=8)
    for name, module in tiny.model.named_modules():
        assert set(module.__dict__) == set(modules[name])
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert tiny.generate(tiny.prefill(tiny_prompt.ids), [cell], max_new_tokens=8) == before


def test_only_names_that_the_pinned_transformers_has():
    # Case C4: the argument is `cache`; our state travels in **kwargs.
    for module in (modeling_llama.LlamaAttention, modeling_mistral.MistralAttention):
        parameters = inspect.signature(module.forward).parameters
        assert {"hidden_states", "position_embeddings", "attention_mask", "cache", "kwargs"} <= set(parameters)
    parameters = inspect.signature(modeling_llama.LlamaForCausalLM.forward).parameters
    assert {"input_ids", "position_ids", "use_cache", "logits_to_keep", "kwargs"} <= set(parameters)


def test_what_crop_means_in_the_pinned_transformers():
    # Case C5: a target length is an error, so resetting a shared cache by cropping would fail loudly; we never do.
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 10, 4), torch.zeros(1, 1, 10, 4), 0)
    with pytest.raises(ValueError):
        cache.crop(3)
    cache.crop(-3)
    assert cache.get_seq_length() == 7


def test_a_model_without_plain_attention_is_refused(tiny, tiny_prompt):
    state = RaggedCache(tiny_prompt, [tiny.compress(tiny_prompt, "full").kept], capacity=1)
    layer = tiny.model.model.layers[0].self_attn
    shaped = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16)
    with pytest.raises(UserError, match="sliding_window=4096"):
        attention.attention(layer, *shaped, None, scaling=1.0, kv_state=state, sliding_window=4096)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_and_keeps_token_zero(dtype, essay):
    engine = graphkv.Engine.from_pretrained("tiny", dtype=str(dtype).split(".")[1])
    prompt = engine.prefill(essay[:200])
    cells = mixed_cells(engine, prompt)
    answers = engine.decode(prompt, cells, max_new_tokens=4, stop_ids=())
    assert len({answer.ids[0] for answer in answers}) == 1
    assert all(cell.kept[0].shape[0] == 2 for cell in cells)


def test_prefill_reads_ids_and_text_alike(tiny):
    ids = tiny.prefill("aé").ids
    assert ids[0] == 256 and len(ids) == 4  # <s>, one byte, two bytes
    assert tiny.tokenizer.decode(ids, skip_special_tokens=True) == "aé"
    again = tiny.prefill(list(ids))
    assert again.ids == ids and torch.equal(again.logits, tiny.prefill("aé").logits)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e, p: e.prefill([]), "no tokens"),
        (lambda e, p: e.prefill([1] * 4096), "4096 positions"),
        (lambda e, p: e.compress(p, "snap"), "unknown scorer 'snap'"),
        (lambda e, p: e.compress(p, "snapkv", -5), "budget must be 1 or more"),
        (lambda e, p: e.compress(p, "snapkv", 31), "below the window of 32"),
        (lambda e, p: e.compress(p, "snapkv", 1.5), r"ratio in \(0, 1\]"),
        (lambda e, p: e.compress(p, "snapkv", True), "budget must be"),
        (lambda e, p: e.compress(p, "snapkv", "64"), "budget must be"),
        (lambda e, p: e.compress(p, "snapkv", 64, {"round": 1}), "graphkv.round .*did you mean rounds"),
        (
            lambda e, p: e.compress(p, "snapkv", 64, {"rounds": "two"}),
            "graphkv.rounds must be a whole number",
        ),
        (lambda e, p: e.compress(p, "snapkv", 64, {"neighbors": "min(x)"}), "autoC"),
        (lambda e, p: e.compress(p, "snapkv", 64, scorer_options={"kernel": 2}), "kernel"),
        (lambda e, p: e.compress(p, "snapkv", 90, scorer_options={"window": 80}), "prefill with window=80"),
        (
            lambda e, p: e.generate(p, [e.compress(p, "full")], max_new_tokens=4000),
            "exceed the 4096 positions",
        ),
        (lambda e, p: graphkv.Engine.from_pretrained("llama9"), "unknown model 'llama9'"),
        (lambda e, p: graphkv.Engine.from_pretrained("tiny", dtype="int8"), "dtype"),
        (lambda e, p: graphkv.Engine.from_pretrained("tiny", path="/nowhere"), "no config.json"),
    ],
)
def test_mistakes_get_one_clear_sentence(tiny, tiny_prompt, call, message):
    with pytest.raises(UserError, match=message) as caught:
        call(tiny, tiny_prompt)
    assert "\n" not in str(caught.value)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        prefill(None, [], Needs())
