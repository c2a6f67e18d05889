"""Sentence transformers as frozen encoders: texts in, one vector for each."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput, explain_faults
from mpfedcl.core.progress import WaitingBar
from mpfedcl.models.encoders.encoder import Features
from mpfedcl.models.encoders.onnx_encoder import open_session

PREFIX = "sentence:"
"""The beginning of an encoder's name; the path of its folder follows."""
_TEXTS_AT_ONCE = 64
_TEXTS_TOKENIZED_AT_ONCE = 1000
_VERSION = 1
"""To be raised whenever the same folder gives other features."""
_POOLINGS = {"mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls"}
_MODULES = ("Transformer", "Pooling", "Normalize")
_WITHOUT_LIMIT = 10**9
"""Tokenizers without a limit name 1e30 tokens."""

_TokenVectors = Callable[[Tensor], Tensor]
"""Turns token ids [texts, tokens] into the vectors of the tokens [texts, tokens, features]."""


class SentenceEncoder:
    """A transformer whose token vectors are averaged, or whose class token is taken.

    The folder is laid out as on Hugging Face: `tokenizer.json`, `config.json`, and the weights as
    `*.safetensors`, which transformers runs, or else as `model.onnx`, for onnxruntime. The files of
    sentence-transformers (`modules.json` and those it names) decide on pooling, on the length at
    which texts are cut, and on normalization to length 1; without them tokens are averaged. The
    model is loaded on first use, so cached features do not need it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = f"sentence {folder.name}"
        with explain_faults(f"'{PREFIX}{folder}'", "a folder of sentence-transformers"):
            self._read_settings()

    def _read_settings(self) -> None:
        folder, read = self._folder, self._read_json
        modules = read("modules.json", [])
        paths = {str(each["type"]).rpartition(".")[2]: folder / each["path"] for each in modules}
        if unknown := [kind for kind in paths if kind not in _MODULES]:
            raise self._refuse(
                f"has the module {unknown[0]}", f"have no others than {', '.join(_MODULES)}"
            )
        self._normalizes = "Normalize" in paths
        pooling = paths.get("Pooling", folder / "1_Pooling")
        self._pooling = self._choose_pooling(read(pooling / "config.json", {}))
        place = self._place = paths.get("Transformer", folder)
        needed = [place / name for name in ("tokenizer.json", "config.json")]
        onnx = [place / "model.onnx", place / "onnx" / "model.onnx"]
        self._weights = sorted(place.glob("*.safetensors")) or [
            path for path in onnx if path.is_file()
        ]
        lacking = [path.name for path in needed if not path.is_file()]
        if lacking or not self._weights:
            fault = f"has no {lacking[0] if lacking else '*.safetensors or model.onnx'}"
            raise self._refuse(
                fault if folder.is_dir() else "does not exist, and nothing is downloaded",
                "have tokenizer.json, config.json and weights (pytorch_model.bin is a pickle, and "
                "pickles are never read)",
            )
        prompts = read("config_sentence_transformers.json", {})
        self._prompt: str = (prompts.get("prompts") or {}).get(
            prompts.get("default_prompt_name"), ""
        )
        sentence = read(place / "sentence_bert_config.json", {})
        self._lowers = bool(sentence.get("do_lower_case"))
        limits = (
            sentence.get("max_seq_length"),
            read(place / "tokenizer_config.json", {}).get("model_max_length"),
            read(place / "config.json", {}).get("max_position_embeddings"),
        )
        self.most_tokens = min(
            (int(each) for each in limits if each and 0 < each < _WITHOUT_LIMIT), default=None
        )
        """The number of tokens at which texts are cut; None for no limit."""
        settings = [*folder.glob("*.json"), *folder.glob("*/config.json"), *needed]
        sha = hashlib.sha256(f"{PREFIX}{_VERSION}".encode())
        for path in [*sorted(set(settings)), *self._weights]:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            sha.update(f"{path.relative_to(folder)} {digest}".encode())
        self.fingerprint = sha.hexdigest()

    def count_cut(self, texts: Sequence[str]) -> int:
        """Return how many texts have more tokens than the encoder takes."""
        return sum(is_cut for _, is_cut in self._tokenize(texts))

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> Features:
        """Return the features [texts, feature_size]."""
        if isinstance(texts, str) or not len(texts):
            raise InvalidInput(f"texts is {texts!r}; it must be a list of at least one text.")
        tokens = [ids for ids, _ in self._tokenize(texts)]
        if [] in tokens:
            raise self._refuse(f"makes no token of {texts[tokens.index([])]!r}", "make one")
        run, parts, rows = self._token_vectors, [], []

        def length(row: int) -> int:
            return len(tokens[row])

        with WaitingBar(f"Encoding texts, {self.name}", len(texts)) as bar:
            # Texts of equal length need no padding, which costs time and changes the last bits.
            for _, group in groupby(sorted(range(len(tokens)), key=length), key=length):
                alike = list(group)
                for first in range(0, len(alike), _TEXTS_AT_ONCE):
                    batch = alike[first : first + _TEXTS_AT_ONCE]
                    with explain_faults(self._place, "a text model that runs here"):
                        vectors = run(torch.tensor([tokens[row] for row in batch]))
                    pooled = vectors[:, 0] if self._pooling == "cls" else vectors.mean(dim=1)
                    if self._normalizes:
                        pooled = torch.nn.functional.normalize(pooled, dim=1)
                    parts.append(pooled.float().numpy())
                    rows += batch
                    bar.advance(len(batch))
        features: Features = numpy.concatenate(parts)[numpy.argsort(rows)]
        if not numpy.isfinite(features).all():
            raise self._refuse("gives numbers that are not finite", "have sound weights")
        return features

    def _tokenize(self, texts: Sequence[str]) -> list[tuple[list[int], bool]]:
        """Return the token ids of each text, and whether it was cut."""
        found: list[tuple[list[int], bool]] = []
        with WaitingBar(f"Reading texts, {self.name}", len(texts)) as bar:
            for first in range(0, len(texts), _TEXTS_TOKENIZED_AT_ONCE):
                with explain_faults("a text", "a str of valid Unicode"):
                    some = texts[first : first + _TEXTS_TOKENIZED_AT_ONCE]
                    whole = [self._prompt + text for text in some]
                    if self._lowers:
                        whole = [text.lower() for text in whole]
                    tokenized = self._tokenizer.encode_batch(whole)
                found += [(each.ids, bool(each.overflowing)) for each in tokenized]
                bar.advance(len(whole))
        return found

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizers = self._import("tokenizers", "text")
        path = self._place / "tokenizer.json"
        with explain_faults(path, "a tokenizer of the package tokenizers"):
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # Files also store the padding and the length with which they were last used.
        tokenizer.no_padding()
        if self.most_tokens is None:
            tokenizer.no_truncation()
        else:
            tokenizer.enable_truncation(self.most_tokens)
        return tokenizer

    @cached_property
    def _token_vectors(self) -> _TokenVectors:
        if self._weights[0].suffix == ".onnx":
            return self._load_onnx()
        transformers = self._import("transformers", "text")
        with (
            _quiet(transformers.utils.logging),
            explain_faults(self._place, "a folder of a text model, safe to load"),
        ):
            model, loaded = transformers.AutoModel.from_pretrained(
                str(self._place),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        # Weights that are missing are drawn at random; only a pooler's do not matter.
        missing = sorted(name for name in loaded["missing_keys"] if not name.startswith("pooler."))
        if missing:
            raise self._refuse(f"lacks the weights {missing[0]}", "have all that its model needs")
        model = model.float().eval()

        def run(ids: Tensor) -> Tensor:
            found: Tensor = model(
                input_ids=ids, attention_mask=torch.ones_like(ids)
            ).last_hidden_state
            return found

        return run

    def _load_onnx(self) -> _TokenVectors:
        path, runtime = self._weights[0], self._import("onnxruntime", "onnx")
        with explain_faults(path, "one whole ONNX file"):
            session = open_session(runtime, path.read_bytes())
        outputs = [each.name for each in session.get_outputs() if len(each.shape) == 3]
        known = {"input_ids": 1, "attention_mask": 1, "token_type_ids": 0}
        inputs = [each.name for each in session.get_inputs()]
        if not outputs or not set(inputs) <= known.keys():
            raise self._refuse(
                f"has a model.onnx from {', '.join(inputs)} to {len(outputs)} outputs of tokens",
                f"have one from {', '.join(known)} to [batch, tokens, features]",
            )

        def run(ids: Tensor) -> Tensor:
            given = {name: torch.full_like(ids, known[name]).numpy() for name in inputs}
            (found,) = session.run(outputs[:1], {**given, "input_ids": ids.numpy()})
            return torch.from_numpy(found).float()

        return run

    def _choose_pooling(self, told: dict[str, Any]) -> str:
        # Older files have a flag for each kind, newer ones a name.
        flag = "pooling_mode_"
        flags = [name.removeprefix(flag) for name, on in told.items() if flag in name and on]
        found = told.get("pooling_mode") or (flags[0] if len(flags) == 1 else flags) or "mean"
        if isinstance(found, str) and found in _POOLINGS:
            return _POOLINGS[found]
        raise self._refuse(f"pools tokens by {found}", "pool them by mean or cls")

    def _read_json(self, name: str | Path, otherwise: Any) -> Any:
        """Return the content of a JSON file, or `otherwise`, of the same type, without one."""
        path = self._folder / name
        if not path.is_file():
            return otherwise
        with explain_faults(path, "JSON as sentence-transformers writes it"):
            found = json.loads(path.read_bytes())
            if not isinstance(found, type(otherwise)):
                raise ValueError(f"it holds a {type(found).__name__}")
        return found

    def _import(self, package: str, extra: str) -> Any:
        try:
            return import_module(package)
        except ImportError:
            raise InvalidInput(
                f"encoder is '{PREFIX}{self._folder}', but {package} is not installed; "
                f"`pip install 'mpfedcl[{extra}]'` brings it."
            ) from None

    def _refuse(self, fault: str, wanted: str) -> InvalidInput:
        return InvalidInput(
            f"encoder is '{PREFIX}{self._folder}': the folder {fault}; it must {wanted}."
        )


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Silence what transformers prints while it loads: a bar, and weights it does not need."""
    shows, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows:
            logging.enable_progress_bar()
