"""Tiny sentence transformers, written as folders."""

import json
from pathlib import Path
from typing import Any

import pytest

_WORDS = """
book a flight to rome play some jazz what is my balance pay the bill
"""
_PREFIX = "sentence_transformers.models."


def save_settings(folder: Path, **files: Any) -> Path:
    """Write JSON files by stem; double underscores separate folders."""
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict[str, str]]:
    """Return the content of modules.json."""
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    return [{"type": _PREFIX + kind, "path": paths.get(kind, kind)} for kind in kinds]


def save_unloaded(folder: Path, **files: Any) -> Path:
    """Write a folder that is whole, but whose tokenizer and model cannot be loaded."""
    save_settings(folder, tokenizer={}, config={})
    (folder / "model.safetensors").write_bytes(b"weights")
    return save_settings(folder, **files)


def save_tokenizer(folder: Path) -> Any:
    """Write and return a tokenizer of words; the file also asks for padding and for cutting."""
    tokenizers = pytest.importorskip("tokenizers", reason="it needs tokenizers (mpfedcl[text])")
    vocabulary = {
        word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_WORDS.split()])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(4)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def save_transformer(folder: Path, **files: Any) -> tuple[Any, Any]:
    """Write a BERT with random weights; return it and its tokenizer."""
    tokenizer = save_tokenizer(folder)
    transformers = pytest.importorskip(
        "transformers", reason="it needs transformers (mpfedcl[text])"
    )
    import torch

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
        initializer_range=0.5,
    )
    model = transformers.BertModel(config).eval()
    model.save_pretrained(str(folder))
    save_settings(folder, **files)
    return model, tokenizer
