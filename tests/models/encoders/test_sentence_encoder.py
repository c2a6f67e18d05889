"""Sentence transformers: equal to the masked mean of their paper; broken folders are refused."""

import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from mpfedcl.core.errors import InvalidInput
from mpfedcl.models.encoders.sentence_encoder import SentenceEncoder
from sentence_folders import modules, save_settings, save_tokenizer, save_transformer, save_unloaded

TEXTS = ["book a flight to rome", "", "play jazz", "what is my balance", "play some jazz", "hm"]
ALL = {"modules": modules("Transformer", "Pooling", "Normalize")}


def padded_features(
    model: Any, tokenizer: Any, texts: list[str], *, takes_class: bool, normalizes: bool
) -> NDArray[numpy.float32]:
    """Return what sentence-transformers computes: one padded batch, and a mean over its mask."""
    ids = [tokenizer.encode(text).ids for text in texts]
    inputs = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.int64)
    mask = torch.zeros_like(inputs)
    for row, own in enumerate(ids):
        inputs[row, : len(own)], mask[row, : len(own)] = torch.tensor(own), 1
    with torch.no_grad():
        tokens = model(input_ids=inputs, attention_mask=mask).last_hidden_state.numpy()
    weights = mask.numpy()[:, :, None]
    pooled = tokens[:, 0] if takes_class else (tokens * weights).sum(1) / weights.sum(1)
    found: NDArray[numpy.float32] = pooled
    return found / numpy.linalg.norm(found, axis=1, keepdims=True) if normalizes else found


@pytest.mark.parametrize(
    ("files", "takes_class", "normalizes"),
    [
        ({}, False, False),
        (ALL, False, True),
        ({"modules": modules("Transformer", "Pooling")}, False, False),
        (ALL | {"1_Pooling__config": {"pooling_mode_mean_tokens": True}}, False, True),
        (ALL | {"1_Pooling__config": {"pooling_mode_cls_token": True}}, True, True),
        (ALL | {"1_Pooling__config": {"pooling_mode": "cls"}}, True, True),
    ],
)
def test_features_equal_the_padded_and_masked_formula(
    tmp_path: Path, files: dict[str, Any], takes_class: bool, normalizes: bool
) -> None:
    model, tokenizer = save_transformer(tmp_path, **files)
    found = SentenceEncoder(tmp_path).encode(TEXTS)
    wanted = padded_features(
        model, tokenizer, TEXTS, takes_class=takes_class, normalizes=normalizes
    )
    assert found.dtype == numpy.float32
    numpy.testing.assert_allclose(found, wanted, atol=1e-5)
    # Without this, equal rows would prove nothing.
    assert len(numpy.unique(wanted.round(3), axis=0)) == len(TEXTS)


def test_features_of_a_text_do_not_depend_on_the_others(tmp_path: Path) -> None:
    save_transformer(tmp_path)
    encoder, order = SentenceEncoder(tmp_path), numpy.random.default_rng(0).permutation(300)
    texts = [TEXTS[place % len(TEXTS)] for place in order]
    alone = numpy.concatenate([encoder.encode([text]) for text in TEXTS])
    numpy.testing.assert_allclose(encoder.encode(texts), alone[order % len(TEXTS)], atol=1e-5)


def test_long_texts_are_cut_and_counted(tmp_path: Path) -> None:
    save_transformer(tmp_path, sentence_bert_config={"max_seq_length": 6})
    encoder = SentenceEncoder(tmp_path)
    assert encoder.most_tokens == 6
    whole, longer = "pay the bill some", "pay the bill some jazz to rome"
    assert encoder.count_cut([whole, longer, longer]) == 2
    assert (encoder.encode([whole]) == encoder.encode([longer])).all()
    # The longest that the model itself can take.
    (tmp_path / "sentence_bert_config.json").unlink()
    assert SentenceEncoder(tmp_path).most_tokens == 12


def test_default_prompt_and_lower_case_are_applied(tmp_path: Path) -> None:
    save_transformer(
        tmp_path,
        config_sentence_transformers={"prompts": {"q": "What "}, "default_prompt_name": "q"},
        sentence_bert_config={"do_lower_case": True},
    )
    found = SentenceEncoder(tmp_path).encode(["IS my Balance"])
    for name in ("config_sentence_transformers", "sentence_bert_config"):
        (tmp_path / f"{name}.json").unlink()
    assert (found == SentenceEncoder(tmp_path).encode(["what is my balance"])).all()


def test_onnx_model_equals_mean_of_its_token_vectors(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed (mpfedcl[onnx])")
    tokenizer, helper = save_tokenizer(tmp_path), onnx.helper
    vectors = numpy.random.default_rng(0).normal(size=(30, 4)).astype(numpy.float32)
    shape = ["batch", "tokens"]
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"])],
        "tokens",
        [
            helper.make_tensor_value_info(name, onnx.TensorProto.INT64, shape)
            for name in ("input_ids", "attention_mask", "token_type_ids")
        ],
        [helper.make_tensor_value_info("last_hidden_state", onnx.TensorProto.FLOAT, [*shape, 4])],
        [onnx.numpy_helper.from_array(vectors, "table")],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "model.onnx")
    save_settings(tmp_path, config={})
    found = SentenceEncoder(tmp_path).encode(TEXTS)
    wanted = [vectors[tokenizer.encode(text).ids].mean(0) for text in TEXTS]
    numpy.testing.assert_allclose(found, wanted, atol=1e-6)


def test_missing_weights_are_not_drawn_at_random(tmp_path: Path) -> None:
    save_transformer(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    pooler = {name for name in tensors if name.startswith("pooler.")}
    whole = SentenceEncoder(tmp_path).encode(TEXTS)
    save_file({n: v for n, v in tensors.items() if n not in pooler}, path, {"format": "pt"})
    assert (SentenceEncoder(tmp_path).encode(TEXTS) == whole).all()
    name = "encoder.layer.1.output.dense.weight"
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InvalidInput, match=f"lacks the weights {name}"):
        SentenceEncoder(tmp_path).encode(TEXTS)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    save_transformer(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["embeddings.LayerNorm.weight"][0] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InvalidInput, match="gives numbers that are not finite"):
        SentenceEncoder(tmp_path).encode(TEXTS)


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    save_transformer(tmp_path)
    for name, part in (("model.safetensors", 100), ("tokenizer.json", 50)):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:part])
        with pytest.raises(InvalidInput, match=r"^[^\n]* cannot be read [^\n]*\.$"):
            SentenceEncoder(tmp_path).encode(TEXTS)


@pytest.mark.parametrize("package", ["tokenizers", "transformers"])
def test_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    if package == "tokenizers":
        save_unloaded(tmp_path)
    else:
        save_transformer(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    sentence = rf"{package} is not installed; `pip install 'mpfedcl\[text\]'` brings it\."
    with pytest.raises(InvalidInput, match=sentence):
        SentenceEncoder(tmp_path).encode(TEXTS)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"modules": modules("Transformer", "Pooling", "Dense")}, "has the module Dense; it must"),
        ({"1_Pooling__config": {"pooling_mode_max_tokens": True}}, "pools tokens by max_tokens;"),
        (
            {"1_Pooling__config": {"pooling_mode_cls_token": 1, "pooling_mode_mean_tokens": 1}},
            r"pools tokens by \['cls_token', 'mean_tokens'\];",
        ),
        ({"1_Pooling__config": {"pooling_mode": ["mean", "max"]}}, "pools tokens by .*; it must"),
        ({"modules": {}}, r"modules\.json cannot be read \(it holds a dict\)"),
        ({"modules": [1]}, "cannot be read"),
        ({"modules": [{"type": "Normalize"}]}, "cannot be read"),
        ({"tokenizer_config": {"model_max_length": "far"}}, "cannot be read"),
        ({"config_sentence_transformers": {"prompts": [1]}}, "cannot be read"),
    ],
)
def test_unknown_settings_are_refused(tmp_path: Path, files: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^[^\n]*{fault}[^\n]*\.$"):
        SentenceEncoder(save_unloaded(tmp_path, **files))


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_incomplete_folder_is_refused(tmp_path: Path, name: str) -> None:
    (save_unloaded(tmp_path) / name).unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InvalidInput, match=rf"has no .*{Path(name).suffix}.* never read\)\.$"):
        SentenceEncoder(tmp_path)
    with pytest.raises(InvalidInput, match="the folder does not exist, and nothing is downloaded"):
        SentenceEncoder(tmp_path / "all-MiniLM-L6-v2")


def test_fingerprint_changes_with_each_file_that_features_depend_on(tmp_path: Path) -> None:
    save_unloaded(tmp_path, **ALL, **{"1_Pooling__config": {"pooling_mode_cls_token": True}})
    found = {SentenceEncoder(tmp_path).fingerprint}
    assert found == {SentenceEncoder(tmp_path).fingerprint}
    changes = {
        "modules": modules("Transformer", "Pooling"),
        "1_Pooling__config": {"pooling_mode_mean_tokens": True},
        "tokenizer": {"version": "1.0"},
        "config": {"hidden_size": 2},
        "sentence_bert_config": {"max_seq_length": 5},
    }
    for number, (name, content) in enumerate(changes.items(), start=2):
        save_settings(tmp_path, **{name: content})
        found.add(SentenceEncoder(tmp_path).fingerprint)
        assert len(found) == number
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert SentenceEncoder(tmp_path).fingerprint not in found


@pytest.mark.parametrize("texts", [[], "one text"])
def test_texts_must_be_a_list(tmp_path: Path, texts: Any) -> None:
    with pytest.raises(InvalidInput, match="it must be a list of at least one text"):
        SentenceEncoder(save_unloaded(tmp_path)).encode(texts)


@pytest.mark.parametrize("text", [None, 3, "\ud800"])
def test_entries_that_are_no_text_are_refused(tmp_path: Path, text: Any) -> None:
    save_tokenizer(tmp_path)
    save_settings(tmp_path, config={})
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"it must be a str of valid Unicode\.$"):
        SentenceEncoder(tmp_path).encode(["play some jazz", text])
