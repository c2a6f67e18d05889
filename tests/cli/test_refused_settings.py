"""Bad settings, commands and files of settings: one clear sentence with exit code 2."""

from pathlib import Path

import pytest

from command_results import Refused

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("elsewhere")]

BAD_SETTINGS: list[tuple[str, str]] = [
    ("--method nope", "method is 'nope'; it must be one of "),
    ("--method nowhere.at.all:Mine", "method is 'nowhere.at.all:Mine'"),
    ("--method json:Absent", "method is 'json:Absent'"),
    ("--method json:JSONDecoder", "must name a subclass of mpfedcl.Method"),
    ("--method json:dumps", "must name a subclass of mpfedcl.Method"),
    ("--method :Mine", "method is ':Mine'"),
    ("--method json:", "method is 'json:'"),
    ("--method .relative:Mine", "method is '.relative:Mine'"),
    ("--method fedavg --no-share-model", "share_model is False"),
    ("--method fedprox --no-share-model", "share_model is False"),
    ("--dataset.name nope", "dataset.name is 'nope'; it must be one of mnist-sample, mnist,"),
    ("--dataset.name mnist", "exist; mpfedcl data fetch mnist downloads what is public of it"),
    ("--dataset.name mnist --dataset.root x", "mpfedcl data fetch mnist --root x downloads"),
    ("--dataset.name sixdomain", "does not exist; it must hold"),
    ("--dataset.name folder --encoder.name none", "dataset.root"),
    ("--dataset.train-size 0", "dataset.train_size is 0"),
    ("--dataset.train-size 2001", "dataset.train_size is 2,001; it must be at most 2,000"),
    ("--dataset.domains nope", "dataset.domains has 'nope'"),
    ("--dataset.test-fraction 1", "dataset.test_fraction is 1"),
    ("--metric macro-f", "metric is 'macro-f'; it must be one of accuracy, balanced_accuracy,"),
    ("--metric macro-f", "or package.module:function for your own (did you mean macro_f1?)."),
    ("--metric nowhere.at.all:mine", "it must name an importable package.module:function"),
    ("--metric math:pi", "metric is 'math:pi'; it must name a function."),
    ("--metric math:sqrt", "metric is 'math:sqrt', which failed (TypeError: "),
    ("--rounds 0", "rounds is 0; it must be greater than or equal to 1"),
    ("--rounds -3", "rounds is -3"),
    ("--rounds 1.5", "--rounds is '1.5'; it must be a whole number"),
    ("--rounds many", "--rounds is 'many'; it must be a whole number"),
    ("--clients 0", "clients is 0"),
    ("--clients 2001 --partition.min-size 1", "clients is 2001; it must be at most 2,000"),
    ("--clients 99999999999 --partition.min-size 1", "clients is 99999999999; "),
    ("--partition.min-size 1000", "partition.min_size is 1,000"),
    ("--clients 4 --partition.alpha 0.001 --partition.min-size 499", "min_size is 499"),
    ("--partition.alpha 0", "partition.alpha is 0.0; it must be greater than 0"),
    ("--partition.alpha -1", "partition.alpha is -1.0; it must be greater than 0"),
    ("--partition.alpha nan", "partition.alpha is nan"),
    ("--partition.alpha inf", "partition.alpha is inf"),
    ("--partition.alpha much", "--partition.alpha is 'much'; it must be a number"),
    ("--partition.kind nope", "partition.kind is 'nope'; it must be one of"),
    ("--partition.kind classes --partition.classes-per-client 11", "classes_per_client is 11"),
    ("--partition.kind feature", "mnist-sample has one domain"),
    ("--prototypes.per-class 0", "prototypes.per_class is 0"),
    (
        "--prototypes.per-class some",
        "--prototypes.per-class is 'some'; it must be a whole number or",
    ),
    ("--prototypes.pool-ttl 0", "prototypes.pool_ttl is 0"),
    ("--prototypes.min-cluster-size 0", "prototypes.min_cluster_size is 0"),
    ("--contrast.temperature 0", "contrast.temperature is 0.0"),
    ("--contrast.weight -1", "contrast.weight is -1.0"),
    ("--contrast.form nope", "contrast.form is 'nope'"),
    ("--train.lr 0", "train.lr is 0.0"),
    ("--train.lr nan", "train.lr is nan"),
    ("--train.momentum 1", "train.momentum is 1.0"),
    ("--train.batch-size 0", "train.batch_size is 0"),
    ("--train.epochs 0", "train.epochs is 0"),
    ("--fraction 0", "fraction is 0.0"),
    ("--fraction 1.01", "fraction is 1.01"),
    ("--min-clients 6", "min_clients is 6; it must be at most the number of clients, 5"),
    ("--evaluate-every 0", "evaluate_every is 0"),
    ("--evaluate-every often", "--evaluate-every is 'often'; it must be a whole number or auto"),
    ("--workers many", "--workers is 'many'; it must be a whole number or auto"),
    ("--seed -1", "seed is -1"),
    ("--seed 9223372036854775808", "seed is 9223372036854775808"),
    ("--dtype float16", "dtype is 'float16'"),
    ("--device nope", "device is 'nope'"),
    ("--device meta", "device is 'meta'"),
    ("--validation.max-norm 0", "validation.max_norm is 0.0"),
    ("--fedprox.mu -0.1", "fedprox.mu is -0.1"),
    ("--dbscan.eps 0", "dbscan.eps is 0.0"),
    ("--nope 3", "--nope"),
    ("--xyz 3", "--xyz is not an option; mpfedcl run --help lists them all."),
    ("--lr 3", "--lr is not an option (did you mean --train.lr, "),
    ("--alpha=3", "(did you mean --partition.alpha, "),
    ("--dataset mnist", "(did you mean --dataset.name?)"),
    ("--method fedvag", "(did you mean fedavg?)."),
    ("--dataset.name MNIST", "(did you mean mnist?)."),
    ("--encoder.name resnet", "encoder.name is 'resnet'; it must be none, "),
    ("absent.toml", "absent.toml does not exist"),
    (".", "cannot be read"),
    ("one.toml two.toml", "two.toml"),
    ("--resume absent", "resume is 'absent'"),
    ("--resume .", "resume is '.'"),
    (
        "--resume . --out x",
        "resume allows only --rounds, --engine, --workers, --worker-timeout, --track, --track-to",
    ),
]


@pytest.mark.parametrize(("words", "expected"), BAD_SETTINGS, ids=[w for w, _ in BAD_SETTINGS])
def test_invalid_settings_are_rejected(refused: Refused, words: str, expected: str) -> None:
    assert expected in refused("run", *words.split(" "))


BAD_COMMANDS: list[tuple[str, str]] = [
    ("nope", "'nope' is not a command; it must be one of run, compare, "),
    ("comapre", "(did you mean compare?)"),
    ("data fetch mnits", "(did you mean mnist?)"),
    ("tune --methods FedAvg", "(did you mean fedavg?)."),
    ("data nope", "'data nope' is not a command; it must be one of run, compare"),
    ("data show nope", "dataset.name is 'nope'"),
    ("data show mnist", "dataset.name is 'mnist'"),
    ("data show --partition.alpha 0", "partition.alpha is 0"),
    ("data show --out absent/picture.png", "absent/picture.png: No such file"),
    ("data show --out picture.nope", "picture.nope"),
    ("methods --nope", "--nope"),
    ("compare --method fedavg", "it must be left out: compare takes --methods"),
    ("compare --seed 3", "it must be left out: compare takes --seeds"),
    ("compare --methods fedavg fedavg", "methods is ['fedavg', 'fedavg']"),
    ("compare --methods", "methods"),
    ("compare --seeds 1 0 1", "seeds is [1, 0, 1]"),
    ("compare --seeds -1", "seed is -1"),
    ("compare --seeds one", "seeds"),
    ("compare --methods fedavg nope", "method is 'nope'"),
    ("compare --methods fedavg,local", "are separated by spaces: fedavg local"),
    ("compare --tuned absent", "tuned is 'absent'; it must be a folder of mpfedcl tune"),
    ("compare --tuned absent --rounds 3", "other settings must be left out, except engine,"),
    ("compare --tuned absent mine.toml", "other settings must be left out"),
    ("compare --jobs -1", "jobs is -1"),
    ("compare absent.toml", "absent.toml does not exist"),
]


@pytest.mark.parametrize(("words", "expected"), BAD_COMMANDS, ids=[w for w, _ in BAD_COMMANDS])
def test_invalid_commands_are_rejected(refused: Refused, words: str, expected: str) -> None:
    assert expected in refused(*words.split(" "))


BAD_FILES: dict[str, tuple[str, str]] = {
    "no TOML": ("rounds = = 3", "is not valid TOML"),
    "an unknown key": ("round = 3", "round is not a setting"),
    "an unknown key of a section": (
        "[partition]\nalfa = 1",
        "partition.alfa is not a setting; did you mean partition.alpha?",
    ),
    "an unknown section": ("[sorcery]\nlevel = 3", "sorcery is not a setting"),
    "a section that is none": ("partition = 3", "partition is 3"),
    "text for a number": ('rounds = "many"', "rounds is 'many'"),
    "a fraction of a round": ("rounds = 2.5", "rounds is 2.5"),
    "no number": ("[partition]\nalpha = nan", "partition.alpha is nan"),
    "a bad value of a section": ("[prototypes]\nper_class = 0", "prototypes.per_class is 0"),
    "a newer format": ("format = 3", "has format 3; this mpfedcl reads format 2"),
    "a format that is none": ('format = "new"', "has format 'new'"),
    "twice the same": ("rounds = 1\nrounds = 2", "is not valid TOML"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_invalid_settings_files_are_rejected(tmp_path: Path, refused: Refused, kind: str) -> None:
    document, expected = BAD_FILES[kind]
    file = tmp_path / "bad.toml"
    file.write_text(document)
    sentence = refused("run", file)
    assert expected in sentence
    assert "bad.toml" in sentence


def test_settings_file_that_is_not_text_is_rejected(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe\x00")
    assert "bad.toml cannot be read" in refused("run", tmp_path / "bad.toml")
