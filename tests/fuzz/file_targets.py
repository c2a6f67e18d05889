"""Files that somebody gives you: read, or refused in one sentence."""

import io
import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import numpy
import torch
from fuzz_target import Target
from mutations import change_bytes, change_numbers, change_value, choose, to_text

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import FileContent, parse_json
from mpfedcl.data.npz_archive import open_archive, open_unlabeled_samples
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.data_folder import holds_arrays
from mpfedcl.methods import PREDICTORS, TESTS, Server, find_method
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.record import Attendance, RoundRecord
from mpfedcl.rounds.state import RoundState
from mpfedcl.runs.checkpoint import Checkpoint, _sign, load_checkpoint, save_checkpoint
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.file_schemas import SCHEMAS, summarize_run, versions


def make_record(number: int) -> dict[str, Any]:
    """Return the record of a round, with all that may be in one."""
    table = {test: dict.fromkeys(PREDICTORS, 50.0) for test in TESTS}
    return RoundRecord(
        round=number,
        loss=1.5,
        accuracy=table,
        accuracy_per_client={"client-0": 50.0, "client-1": None},
        loss_per_client={"client-0": 1.5},
        seconds={"train": 0.5},
        bytes={"up": 100, "down": 50},
        clients=Attendance(answered=["client-0"], missing=["client-1"], rejected={"x": "loss"}),
        sent={"parameters": 5, "prototype_floats": 3},
        remarks={"training": {"factored": 3}},
    ).to_json()


class FolderTarget(Target):
    """Something that reads files of a folder, which is in memory where there is such a place."""

    refusals = (InvalidInput,)

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        place = memory if memory.is_dir() else None
        self._temporary = tempfile.TemporaryDirectory(prefix="mpfedcl-fuzz-", dir=place)
        self.folder = Path(self._temporary.name)


class RecordsTarget(FolderTarget):
    """rounds.jsonl: what is left of it can be summed up and written again."""

    name = "records"

    def __init__(self) -> None:
        super().__init__()
        self._records = [make_record(number) for number in (1, 2, 3)]
        self._method = find_method("mp-fedcl")(Experiment(), 10)

    def make(self, random: Random) -> Any:
        """Return a file with a line or two changed."""
        lines = [json.dumps(record) for record in self._records]
        for _ in range(random.choice((1, 1, 2))):
            place = random.randrange(3)
            lines[place] = to_text(random, change_value(random, self._records[place]))
        if random.random() < 0.1:
            random.shuffle(lines)
        content = "\n".join(lines).encode("utf-8", "surrogatepass")
        return change_bytes(random, content) if random.random() < 0.2 else content

    def check(self, made: Any) -> None:
        """Read it, and go on with it as a resumed run does."""
        (self.folder / "rounds.jsonl").write_bytes(made)
        directory = RunDirectory(self.folder)
        found = directory.read_records()
        numbers = [record["round"] for record in found]
        assert numbers == sorted(set(numbers))
        json.dumps(found, allow_nan=False)
        for record in found:
            RoundRecord.model_validate(record)
        if found and found[-1]["accuracy"] and _is_complete(found[-1]):
            json.dumps(summarize_run(self._method, found).to_json(), allow_nan=False)


def _is_complete(record: dict[str, Any]) -> bool:
    # What the last round lacks is taken from the checkpoint, which must be whole.
    tables = record["accuracy"]
    own = all(set(PREDICTORS) <= set(tables.get(test, ())) for test in TESTS)
    return own and {"parameters", "prototype_floats"} <= record.get("sent", {}).keys()


PARTITION = {
    "classes": ["a", "b"],
    "clients": {"client-0": {"train": [3, 4], "test": 2}, "ü": {"train": [0, 1], "test": 0}},
    "input_shape": [28, 28],
    "input_means": {"client-0": 0.5},
}
SUMMARY = {
    "format": 2,
    "method": "mp-fedcl",
    "predictor": "global_classifier",
    "accuracy": 50.0,
    "bytes": {"up": 5},
    "versions": versions(),
}
FILES = {
    "partition.json": PARTITION,
    "summary.json": SUMMARY,
    "federation.json": {"run": "ab", "input_size": 784, "encoder": "", "image_shape": [28, 28]},
    "confusion.json": {
        "round": 3,
        "predictor": "global_classifier",
        "classes": ["a", "b"],
        "clients": {"client-0": [[1, 2], [3, 4]]},
    },
}


class JsonFilesTarget(FolderTarget):
    """The other JSON files of a run: what is read can be written again."""

    name = "json files"

    def make(self, random: Random) -> Any:
        """Return a file's name and its content, in one piece."""
        name = random.choice(list(FILES))
        text = to_text(random, change_value(random, FILES[name]))
        content = text.encode("utf-8", "surrogatepass")
        changed = change_bytes(random, content) if random.random() < 0.1 else content
        return name.encode() + b"\n" + changed

    def check(self, made: Any) -> None:
        """Read it in both ways that there are."""
        head, _, content = made.partition(b"\n")
        name = head.decode()
        (self.folder / name).write_bytes(content)
        found = RunDirectory(self.folder).read_json(name)
        json.dumps(found, allow_nan=False)
        schema: type[FileContent] = SCHEMAS[name]
        assert parse_json(content, schema, Path(name))


class CheckpointTarget(FolderTarget):
    """Checkpoints, damaged or signed anew: the newest sound one is found, or the one before."""

    name = "checkpoint"

    def __init__(self) -> None:
        super().__init__()
        rows = Prototypes(torch.ones(2, 4), torch.tensor([0, 2]), torch.tensor([5, 1]))
        server = Server({"a.weight": torch.ones(3, 2)}, {"control": torch.ones(3)})
        for number in (1, 2):
            state = RoundState(number, server, {"client-0": (number, rows), "ü": (1, rows)})
            kept = Checkpoint(state, {"kept/client-0": torch.ones(3)}, make_record(number))
            save_checkpoint(kept, self.folder)
        newest = self.folder / "round-000002.json"
        self._manifest = json.loads(newest.read_bytes())
        del self._manifest["sha256"]
        self._tensors = newest.with_suffix(".safetensors").read_bytes()

    def make(self, random: Random) -> Any:
        """Return a manifest and tensors, in one piece."""
        manifest: Any = self._manifest
        tensors = change_bytes(random, self._tensors) if random.random() < 0.5 else self._tensors
        if random.random() < 0.6:
            manifest = change_value(random, manifest)
        signed = {**manifest} if isinstance(manifest, dict) else {"odd": manifest}
        if random.random() < 0.9:
            # As a stranger does who wants it to be read.
            signed = {"sha256": _sign(json.dumps(signed), tensors), **signed}
        head = to_text(random, signed).encode("utf-8", "surrogatepass").replace(b"\n", b"")
        return head + b"\n" + tensors

    def check(self, made: Any) -> None:
        """Load it: at worst there is the one before."""
        manifest, _, tensors = made.partition(b"\n")
        (self.folder / "round-000002.json").write_bytes(manifest)
        (self.folder / "round-000002.safetensors").write_bytes(tensors)
        found, problems = load_checkpoint(self.folder)
        assert found is not None
        assert found.state.round == 1 or not problems
        json.dumps(found.record, allow_nan=False)
        assert found.record["round"] >= 1


class NpzTarget(FolderTarget):
    """Archives of samples."""

    name = "npz"

    def __init__(self) -> None:
        super().__init__()
        images, labels = numpy.zeros((6, 5, 5), numpy.uint8), numpy.arange(6) % 3
        vectors = numpy.ones((6, 4), numpy.float32)
        names = numpy.array(["a", "b", "c"])
        self._seeds = [
            pack(numpy.savez, x_train=images, y_train=labels, x_test=images, y_test=labels),
            pack(numpy.savez_compressed, x_train=vectors, y_train=labels, classes=names),
        ]

    def make(self, random: Random) -> Any:
        """Return a changed archive, or one of changed arrays."""
        if random.random() < 0.5:
            return change_bytes(random, choose(random, self._seeds))
        with numpy.load(io.BytesIO(choose(random, self._seeds))) as archive:
            arrays = {name: archive[name] for name in archive.files}
        name = random.choice(list(arrays))
        arrays[name] = change_numbers(random, arrays[name])
        if random.random() < 0.1:
            del arrays[name]
        return pack(random.choice((numpy.savez, numpy.savez_compressed)), **arrays)

    def check(self, made: Any) -> None:
        """Open it in the ways that there are, and load two samples."""
        (self.folder / "a.npz").write_bytes(made)
        holds_arrays(self.folder / "a.npz")
        store = open_unlabeled_samples(self.folder / "a.npz")
        rows = numpy.arange(min(2, len(store)))
        (form,) = store.inspect()
        if len(rows):
            store.load(rows, form)
        stores, domains, _ = open_archive(self.folder / "a.npz", None)
        subsets = [part for each in domains for part in (each.train, each.test) if part]
        assert sum(map(len, stores)) == sum(len(each.labels) for each in subsets)


def pack(save: Any, **arrays: Any) -> bytes:
    """Return arrays as an archive."""
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()
