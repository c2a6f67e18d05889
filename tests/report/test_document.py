"""The document inside a report says what the records say."""

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from report_documents import cell_texts, details_in, document_of, groups_in

from handwritten_runs import accuracy_of, write_json, write_run
from mpfedcl.core.tensors import pack_tensors
from mpfedcl.methods import PREDICTORS
from mpfedcl.rounds.metrics import list_accuracies
from mpfedcl.runs.directory import RunDirectory


def write_comparison(path: Path, methods: tuple[str, ...], seeds: tuple[int, ...]) -> Path:
    path.mkdir()
    runs = {m: [f"{m}-seed{s}" for s in seeds] for m in methods}
    for method, names in runs.items():
        for seed, name in zip(seeds, names, strict=True):
            # A seed more is a round more, so that seeds differ.
            write_run(path / name, method=method, seed=seed, rounds=3)
            shift = 10 * methods.index(method) + seed
            raise_accuracies(path / name, shift)
    content = {"rounds": 3, "seeds": list(seeds), "methods": {m: {"runs": runs[m]} for m in runs}}
    write_json(path / "comparison.json", content)
    return path


def raise_accuracies(path: Path, shift: float) -> None:
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        for table in line["accuracy"].values():
            for predictor in table:
                table[predictor] += shift
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


# A run


def test_a_run_is_told_by_its_last_round(tmp_path: Path) -> None:
    document = document_of(write_run(tmp_path / "run", rounds=4))
    (section,) = document["sections"]
    last = fmean(accuracy_of(4, client) for client in range(3))
    expected = [[f"{last - 10 * i - j:.1f}" for i in range(2)] for j, _ in enumerate(PREDICTORS)]
    assert [row[1:] for row in cell_texts(section["tables"][0])] == expected
    strong = [row for row in section["tables"][0]["rows"] if row[1]["strong"] or row[2]["strong"]]
    assert [row[0]["text"] for row in strong] == ["personal, prototype"]
    assert all(cell["strong"] for cell in strong[0][1:])
    assert section["title"] == "mp-fedcl on mnist-sample"


def test_curves_hold_every_round(tmp_path: Path) -> None:
    document = document_of(write_run(tmp_path / "run", rounds=4))
    curves = groups_in(document)[0]["curves"]
    means = [fmean(accuracy_of(number, client) for client in range(3)) for number in range(1, 5)]
    curve = curves["accuracy"]["global_test"]["global_prototype"]
    assert curve["x"] == [1, 2, 3, 4]
    assert curve["mean"] == pytest.approx([mean - 13 for mean in means], abs=0.01)
    assert "std" not in curve
    assert curves["loss"]["mean"] == pytest.approx([2 / 1, 2 / 2, 2 / 3, 2 / 4])


def test_costs_are_totals_of_all_rounds(tmp_path: Path) -> None:
    (group,) = groups_in(document_of(write_run(tmp_path / "run", rounds=4)))
    assert group["seconds"] == {"train": 2.0, "cluster": 1.0, "evaluate": 4.0}
    assert group["bytes"] == {"up": 4000.0, "down": 2000.0}


def test_curves_can_be_drawn_over_what_they_cost(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "both", ("fedavg", "fedasync"), (0, 1))
    for place, run in enumerate(sorted(path.glob("fedasync-*"))):
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        clocked = [{**line, "virtual_seconds": (place + 1) * line["round"]} for line in lines]
        (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in clocked))
    without, clocked = (group["curves"] for group in groups_in(document_of(path)))
    for curves in (without, clocked):
        assert curves["megabytes"]["x"] == [1, 2, 3]
        assert curves["megabytes"]["mean"] == pytest.approx([0.0015, 0.003, 0.0045])
    assert without["virtual_seconds"] is None
    assert clocked["virtual_seconds"]["mean"] == [1.5, 3.0, 4.5]
    # The seconds of one seed alone would be the mean of something else.
    file = path / "fedasync-seed1" / "rounds.jsonl"
    file.write_text(file.read_text().replace('"virtual_seconds": 4', '"virtual_minutes": 4'))
    assert groups_in(document_of(path))[1]["curves"]["virtual_seconds"]["x"] == [1, 3]


def test_clients_classes_and_confusions(tmp_path: Path) -> None:
    (run,) = details_in(document_of(write_run(tmp_path / "run")))
    assert [each["accuracy"] for each in run["clients"]] == [43.0, 36.0, 29.0]
    kept = json.loads((tmp_path / "run" / "confusion.json").read_text())["clients"]
    assert run["confusion"]["all"] == [
        [sum(counts[i][j] for counts in kept.values()) for j in range(2)] for i in range(2)
    ]
    # Unanswered images count as wrong: 24 right of (24 + off the diagonal + 1 unanswered).
    (cat, dog) = run["confusion"]["by_class"]
    off = [sum(counts[i][1 - i] for counts in kept.values()) for i in range(2)]
    assert cat["tested"] == 24 + off[0] + 1
    assert cat["accuracy"] == pytest.approx(100 * 24 / cat["tested"], abs=0.01)
    assert dog["accuracy"] == pytest.approx(100 * 24 / dog["tested"], abs=0.01)


def test_rejections_are_joined_by_client_and_reason(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", rejected={"client-1": "a number is not finite"})
    (run,) = details_in(document_of(path))
    assert run["absences"]["rows"] == [
        {
            "client": "client-1",
            "what": "rejected",
            "why": "a number is not finite",
            "times": 1,
            "first": 3,
            "last": 3,
        }
    ]


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", rounds=5, finished=False)
    lines = (path / "rounds.jsonl").read_text().splitlines(keepends=True)
    (path / "rounds.jsonl").write_text("".join(lines[:2]) + f"{lines[2][:40]}\n")
    document = document_of(path)
    about = " ".join(document["sections"][0]["about"])
    assert "round 2 of 5" in about
    assert "1 damaged" in about
    assert "has not ended" in details_in(document)[0]["confusion"]["missing"]
    assert "has not ended" in details_in(document)[0]["map"]["missing"]


def test_a_method_that_is_gone_is_still_reported(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", method="gone_module:Gone", gone__beta=0.5)
    (run,) = details_in(document_of(path))
    assert run["settings"]["command"] == f"mpfedcl run {path / 'experiment.toml'}"
    assert "[gone]\nbeta = 0.5\n" in run["settings"]["toml"]
    assert "no pool.safetensors" in run["map"]["missing"]


def test_a_run_without_a_confusion_matrix_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "confusion.json").unlink()
    assert "no confusion.json" in details_in(document_of(path))[0]["confusion"]["missing"]


def test_a_confusion_of_an_earlier_end_is_not_shown(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    content = json.loads((path / "confusion.json").read_text())
    write_json(path / "confusion.json", {**content, "round": 2})
    assert "of round 2" in details_in(document_of(path))[0]["confusion"]["missing"]


# A comparison


def test_a_comparison_is_mean_and_deviation_over_seeds(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "both", ("fedavg", "mp-fedcl"), (0, 1, 2))
    document = document_of(path)
    (section,) = document["sections"]
    headline = section["tables"][0]
    base = fmean(accuracy_of(3, client) for client in range(3))
    # Written runs are all evaluated by personal_prototype, one below the first predictor.
    for place, row in enumerate(headline["rows"]):
        values = [base + 10 * place + seed - 1 for seed in range(3)]
        assert row[1]["text"] == f"{fmean(values):.1f}({stdev(values):.1f})"
    # The difference is 10 for every seed: no doubt about it.
    assert [row[1].get("mark") for row in headline["rows"]] == [None, "best"]
    band = groups_in(document)[0]["curves"]["accuracy"]["local_test"]["personal_prototype"]["std"]
    assert band == pytest.approx([stdev((0, 1, 2))] * 3, abs=1e-3)


def test_a_folder_of_runs_without_comparison_json_is_a_comparison(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "both", ("fedavg", "local"), (0, 1))
    (path / "comparison.json").unlink()
    (section,) = document_of(path)["sections"]
    assert section["kind"] == "comparison"
    assert len(section["groups"]) == 2


def test_only_first_seeds_of_a_comparison_have_a_map(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "both", ("mp-fedcl", "fedavg"), (0, 1))
    for seed in (0, 1):
        columns = {name: torch.tensor([0, 1]) for name in ("labels", "owners", "counts")}
        pool = {"vectors": torch.eye(2), **columns}
        content = pack_tensors(pool, note=("names", json.dumps(["client-0", "client-1"])))
        (path / f"mp-fedcl-seed{seed}" / "pool.safetensors").write_bytes(content)
    first, second = (run["map"] for run in details_in(document_of(path)))
    assert len(first["x"]) == 2
    assert "no prototypes" in second["missing"]


# Several


def test_several_folders_have_a_section_each_and_one_together(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", seed=0)
    two = write_run(tmp_path / "two", seed=1)
    other = write_run(tmp_path / "other", method="fedavg", seed=0)
    document = document_of(one, two, other)
    assert [section["kind"] for section in document["sections"]] == ["together"] + 3 * ["run"]
    groups = groups_in(document)
    assert [(group["name"], group["seeds"]) for group in groups] == [
        ("mp-fedcl", [0, 1]),
        ("fedavg", [0]),
    ]
    # Other seeds: the numbers are shown, but none is called best.
    marks = [row[1].get("mark") for row in document["sections"][0]["tables"][0]["rows"]]
    assert marks == [None, None]


def test_runs_on_other_data_are_not_ranked(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    two = write_run(tmp_path / "two", partition__alpha=0.5)
    table = document_of(one, two)["sections"][0]["tables"][0]
    assert not any("mark" in cell for row in table["rows"] for cell in row)
    assert any("None is marked" in note for note in table["notes"])
    assert [row[0]["text"] for row in table["rows"]] == ["mp-fedcl (one)", "mp-fedcl (two)"]


def test_runs_of_other_lengths_are_not_ranked(tmp_path: Path) -> None:
    for method, rounds in (("fedavg", 3), ("local", 5)):
        write_run(tmp_path / method, method=method, rounds=rounds)
    table = document_of(tmp_path)["sections"][0]["tables"][0]
    assert not any("mark" in cell for row in table["rows"] for cell in row)
    said = "the last evaluated rounds differ (fedavg 3, local 5)"
    assert f"None is marked as best: {said}." in table["notes"]


def test_the_last_round_that_was_read_counts(tmp_path: Path) -> None:
    """As many rounds each, but one of them is read every second round and has not ended."""
    for method in ("fedavg", "local"):
        write_run(tmp_path / method, method=method, rounds=5, finished=method == "fedavg")
    file = tmp_path / "local" / "rounds.jsonl"
    *before, last = [json.loads(line) for line in file.read_text().splitlines()]
    last |= {"accuracy": None, "accuracy_per_client": None}
    file.write_text("".join(json.dumps(line) + "\n" for line in (*before, last)))
    notes = document_of(tmp_path)["sections"][0]["tables"][0]["notes"]
    assert any("(fedavg 5, local 4)" in note for note in notes)


def test_runs_of_one_length_are_ranked(tmp_path: Path) -> None:
    for method in ("fedavg", "local"):
        write_run(tmp_path / method, method=method)
    table = document_of(tmp_path)["sections"][0]["tables"][0]
    assert [row[1].get("mark") for row in table["rows"]] == ["best", "best"]


def test_the_same_folder_twice_is_one(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    assert len(document_of(path, path)["sections"]) == 1


def test_a_copy_of_a_run_is_no_second_seed(tmp_path: Path) -> None:
    document = document_of(write_run(tmp_path / "one"), write_run(tmp_path / "two"))
    groups = groups_in(document)
    assert [group["seeds"] for group in groups] == [[0], [0]]


def test_thousands_of_clients_are_some_names_and_their_spread(tmp_path: Path) -> None:
    clients = [f"client-{number:04}" for number in range(1500)]
    path = write_run(tmp_path / "run", clients=clients, rounds=1)
    line = json.loads((path / "rounds.jsonl").read_text())
    rows, spread = list_accuracies(line["accuracy_per_client"], clients[:30])
    assert spread is not None
    line |= {"accuracy_per_client": rows, "accuracy_spread": spread.to_json()}
    (path / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    held = json.loads((path / "partition.json").read_text())
    RunDirectory(path).write_partition(held)
    assert (path / "partition.json").read_text().count("\n") == 1
    assert RunDirectory(path).read_json("partition.json") == held
    document = document_of(path)
    (run,) = details_in(document)
    assert [each["name"] for each in run["clients"]] == clients[:30]
    assert run["fairness"]["quartiles"] == spread.quartiles
    assert run["population"] == 1500
    assert "1,500 clients" in document["sections"][0]["about"][0]
