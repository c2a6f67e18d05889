"""A client's policy against a server that lies: it asks again, for more, or for something else."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from asking_server_messages import RUN, LyingServer
from federations import folder_experiment, plant_secret, save_pictures
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.sample_index import open_own_samples
from mpfedcl.data.secret_split import find_secret, split_by_secret
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian.mechanism import gaussian_multiplier
from mpfedcl.network.client import ClientRefusal
from mpfedcl.network.client.budget import ClientLedger
from mpfedcl.network.client.policy import ClientPolicy
from mpfedcl.network.setup.folders import make_federation
from mpfedcl.network.transport import Message
from mpfedcl.privacy.accounting import spent_epsilon

LOCAL = {"privacy__epsilon": 1.0, "privacy__model": "local"}
DELTA = ClientPolicy().budget.max_delta


@pytest.fixture
def server(tmp_path: Path) -> LyingServer:
    """A server of one-shot runs with a local budget of 1, and a client with 120 images."""
    return lie(tmp_path)


def lie(folder: Path, experiment: Experiment | None = None, **policy: Any) -> LyingServer:
    data = save_pictures(folder / "own", "cat", "dog", count=60)
    plant_secret(folder / "memory")
    asked = experiment or folder_experiment("fedncm", **LOCAL)
    return LyingServer(asked, data, folder / "memory", policy)


def run_id(number: int) -> str:
    return f"{number:032x}"


# Noisy updates


def test_one_release_is_answered_however_often_it_is_asked_for(server: LyingServer) -> None:
    first = server.ask()
    answered = [first]
    for number in range(2, 41):
        with pytest.raises(ClientRefusal, match="this run announced 1 noisy updates"):
            answered.append(server.ask(number=number, rounds=40))
    assert len(answered) == 1
    again = server.ask()
    for name, sent in first.arrays.items():
        assert numpy.array_equal(sent, again.arrays[name])


def test_deleted_run_folder_does_not_reset_the_ledger(server: LyingServer, tmp_path: Path) -> None:
    server.ask()
    shutil.rmtree(tmp_path / "memory" / RUN)
    assert "cannot be drawn again" in server.refusal()
    # The state of old runs is deleted, too; that opens no run again.
    assert "this run announced 1 noisy updates" in server.refusal(number=2)


def test_new_run_ids_are_charged_against_the_total(tmp_path: Path) -> None:
    server = lie(tmp_path, budget={"max_epsilon": 3.0, "max_releases": 1000})
    answered = 0
    for number in range(15):
        reason = ""
        try:
            server.ask(run=run_id(number))
            answered += 1
        except ClientRefusal as error:
            reason = str(error)
    noise = gaussian_multiplier(1.0, DELTA)
    most = max(n for n in range(1, 15) if spent_epsilon({noise: n}, DELTA) <= 3.0)
    assert answered == most < 15
    assert reason.startswith("policy [budget] max_epsilon is 3; the server asked for 3.")
    # Restored in a new process from the file, which is the owner's.
    ledger = tmp_path / "memory" / "released.json"
    assert len(json.loads(ledger.read_text())["releases"]) == most
    assert ledger.stat().st_mode & 0o777 == 0o600


def test_default_number_of_releases_is_limited(tmp_path: Path) -> None:
    server = lie(tmp_path, budget={"max_releases": 2})
    server.ask(run=run_id(1))
    server.ask(run=run_id(2))
    assert "max_releases is 2; the server asked for 1 more after 2" in server.refusal(run=run_id(3))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy__delta": 0.0999}, "[budget] max_delta is 1e-05; the server asked for 0.0999."),
        ({"privacy__epsilon": 3.5}, "[budget] max_epsilon_per_run is 3; the server asked for 3.5"),
        ({"privacy__epsilon": None}, "[budget] required is true; the server asked for a run with"),
        ({"privacy__model": "central"}, "required is true; the server asked for privacy.model 'ce"),
        (
            {"privacy__model": "central", "secure_aggregation": True, "clients": 3},
            "noise of all clients, ",
        ),
    ],
)
def test_runs_beyond_the_budget_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    server = lie(tmp_path, budget={"required": True})
    server.hello()
    with pytest.raises(ClientRefusal) as refused:
        server.hello(**changes)
    assert reason in str(refused.value)
    with pytest.raises(ClientRefusal) as refused:
        server.ask(**changes)
    assert reason in str(refused.value)
    assert not (tmp_path / "memory" / "released.json").exists()


def test_smaller_delta_is_counted_at_the_delta_of_the_policy(tmp_path: Path) -> None:
    # Epsilon 1 at delta 1e-7 costs less at 1e-5.
    policy = {"max_epsilon_per_run": 0.9}
    asked = folder_experiment("fedncm", privacy__delta=1e-7, **LOCAL)
    server = lie(tmp_path, asked, budget=policy)
    server.ask()
    reason = server.refusal(run=run_id(1), privacy__delta=1e-5)
    assert "max_epsilon_per_run is 0.9; the server asked for 1 (at delta 1e-05)" in reason


def test_run_with_a_budget_keeps_it(server: LyingServer) -> None:
    server.ask()
    reason = server.refusal("close", 2, read=True, privacy__epsilon=None)
    assert reason == "this run began with a budget; it must keep it."


def test_classes_cannot_be_left_out_under_a_budget(tmp_path: Path) -> None:
    with pytest.raises(ClientRefusal, match=r"min_class_count is 2; the server asked for a run wi"):
        lie(tmp_path, data={"min_class_count": 2}).hello()


def test_run_for_all_samples_counts_for_one_sample_too(tmp_path: Path) -> None:
    server = lie(tmp_path, budget={"max_epsilon": 3.5})
    server.ask(privacy__unit="client")
    ledger = ClientLedger(tmp_path / "memory", server.settings.policy)
    noise = gaussian_multiplier(1.0, DELTA)
    one, everything, test = ledger.summary().values()
    assert one == pytest.approx(spent_epsilon({noise / 2: 1}, DELTA), rel=1e-6)
    assert everything == pytest.approx(1.0)
    assert test == 0
    asked = {"run": run_id(1), "privacy__epsilon": 3.0}
    assert "asked for 3.86 in total, of which 2.15 is spent" in server.refusal(**asked)


def test_damaged_ledger_does_not_count_as_empty(server: LyingServer, tmp_path: Path) -> None:
    server.ask()
    ledger = tmp_path / "memory" / "released.json"
    ledger.write_bytes(ledger.read_bytes()[:20])
    assert "its own log contains the reason" in server.refusal(run=run_id(1))


def test_crash_between_storing_and_charging_sends_the_stored_noise(
    server: LyingServer, tmp_path: Path
) -> None:
    sent = server.ask()
    (tmp_path / "memory" / "released.json").unlink()
    again = server.ask()
    assert numpy.array_equal(sent.arrays["summed/sums"], again.arrays["summed/sums"])
    ledger = json.loads((tmp_path / "memory" / "released.json").read_text())
    assert len(ledger["releases"]) == 1


# Answers about test samples


def accuracies(message: Message) -> dict[str, float]:
    table = message.value("late", dict)["table"]["local_test"]
    return {name: value for name, value in table.items() if value is not None}


def plain(**changes: Any) -> Experiment:
    return folder_experiment("fedavg", rounds=1, **changes)


def test_exact_counts_are_answered_once_per_round_and_run(tmp_path: Path) -> None:
    server = lie(tmp_path, plain())
    told = [server.ask("close", 2, read=True, seed=seed) for seed in range(1, 10)]
    # rounds + 1
    assert [bool(accuracies(each)) for each in told] == [True, True] + [False] * 7
    assert [each.value("late", dict)["confusion"] is None for each in told] == [
        False, False, *[True] * 7
    ]  # fmt: skip
    # The same question is no further answer.
    assert accuracies(server.ask("close", 2, read=True, seed=1)) == accuracies(told[0])


def test_answers_of_all_runs_are_limited(tmp_path: Path) -> None:
    server = lie(tmp_path, plain(), evaluation={"max_answers": 3})
    told = [server.ask("close", 2, read=True, run=run_id(number)) for number in range(6)]
    assert sum(bool(accuracies(each)) for each in told) == 3


@pytest.mark.parametrize("answers", ["exact", "noisy", "none"])
def test_runs_with_a_budget_get_no_exact_answer(tmp_path: Path, answers: str) -> None:
    server = lie(tmp_path, evaluation={"answers": answers, "epsilon": 1.0})
    late = server.ask("close", 2, read=True).value("late", dict)
    assert late["confusion"] is None
    assert late["metrics"] is None
    table = late["table"]["local_test"]
    assert sum(value is not None for value in table.values()) == (answers != "none")


def test_noisy_answers_are_charged_and_limited(tmp_path: Path) -> None:
    server = lie(
        tmp_path,
        plain(),
        budget={"max_epsilon": 1.3, "max_epsilon_per_run": 1.0},
        evaluation={"answers": "noisy", "epsilon": 0.5},
    )
    told = [
        accuracies(server.ask("close", 2, read=True, run=run_id(run), seed=seed, rounds=50))
        for run in range(2)
        for seed in range(1, 5)
    ]
    # Two per run, and 1.3 in total.
    assert [len(each) for each in told] == [1, 1, 0, 0, 0, 0, 0, 0]
    ledger = json.loads((tmp_path / "memory" / "released.json").read_text())
    assert ledger["noisy"] == {run_id(0): 1.0}


def test_noise_of_answers_has_the_stated_scale(tmp_path: Path) -> None:
    from mpfedcl.gaussian.mechanism import add_exact_counts

    drawn = numpy.array(add_exact_counts([100] * 4000, 0.5)) - 100
    # Discrete Laplace of scale s has the variance 1 / (cosh(1 / s) - 1).
    assert drawn.std() == pytest.approx((1 / (numpy.cosh(0.5) - 1)) ** 0.5, rel=0.08)
    assert abs(drawn.mean()) < 0.25


# The split


def parts(server: LyingServer, **changes: Any) -> set[bytes]:
    """Return the training images of the client in a run."""
    server.hello(**changes)
    assert server.client.loaded is not None
    _, data, _ = server.client.loaded
    return {bytes(row.numpy().tobytes()) for row in data.clients[0].inputs}


def test_server_chooses_neither_the_fraction_nor_the_seed_of_the_split(tmp_path: Path) -> None:
    server = lie(tmp_path, plain())
    first = parts(server)
    assert 80 <= len(first) <= 110
    asked: list[dict[str, Any]] = [{"seed": seed} for seed in range(1, 6)]
    asked += [{"dataset__test_fraction": 0.98}, {"dataset__per_class": 2}]
    asked += [{"partition__kind": "feature", "partition__validation": 0.5}]
    asked += [{"dataset__test_per_class": 1}, {"dataset__train_size": 10}]
    for changes in asked:
        assert parts(server, **changes) == first


def test_split_is_stable_when_samples_come_and_go(tmp_path: Path) -> None:
    server = lie(tmp_path, plain())
    before = parts(server)
    save_pictures(tmp_path / "own", "cow", count=20)
    server.experiment = server.experiment.replace(dataset__classes=("cat", "cow", "dog"))
    for path in sorted((tmp_path / "own" / "dog").iterdir())[:30]:
        path.unlink()
    after = parts(server)
    assert len(after) > len(after & before) > 50
    for path in (tmp_path / "own" / "cow").iterdir():
        path.unlink()
    (tmp_path / "own" / "cow").rmdir()
    # What is left of the first images trains exactly where it did before.
    assert parts(server) == after & before


def test_secret_is_private_and_created_once(tmp_path: Path) -> None:
    secret = find_secret(tmp_path / "memory")
    assert len(secret) == 32
    assert find_secret(tmp_path / "memory") == secret != find_secret(tmp_path / "other")
    path = tmp_path / "memory" / "split.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["split.key"]
    path.chmod(0o644)
    with pytest.raises(InvalidInput, match=r"mode 0644; it must be the file of 32 bytes"):
        find_secret(tmp_path / "memory")
    path.chmod(0o600)
    path.write_bytes(secret[:5])
    with pytest.raises(InvalidInput, match="has 5 bytes and mode 0600"):
        find_secret(tmp_path / "memory")


@settings(max_examples=20)
@given(st.integers(2, 60), st.floats(0.05, 0.95), st.binary(min_size=32, max_size=32))
def test_part_of_a_sample_depends_on_it_alone(count: int, fraction: float, secret: bytes) -> None:
    from tempfile import TemporaryDirectory

    drawn = numpy.random.default_rng(count).integers(0, 255, (60, 4, 4), dtype=numpy.uint8)
    with TemporaryDirectory() as place:
        sides = []
        for rows in (drawn, drawn[:count][::-1]):
            file = Path(place) / f"{len(rows)}.npz"
            numpy.savez(file, x_train=rows, y_train=numpy.zeros(len(rows), dtype=int))
            index = split_by_secret(open_own_samples(file, ("x",)), secret, fraction)
            (domain,) = index.domains
            assert domain.test is not None
            assert len(domain.test.rows) + len(domain.train.rows) == len(rows)
            sides.append({rows[row].tobytes() for row in domain.test.rows})
    shared = {row.tobytes() for row in drawn[:count]}
    assert sides[0] & shared == sides[1]


def test_columns_that_the_server_chooses_do_not_change_the_split(tmp_path: Path) -> None:
    from mpfedcl.data.tables import declare_columns

    file = tmp_path / "own.csv"
    rows = [f"{n},{n * 7 % 13},{'ab'[n % 2]}" for n in range(80)]
    file.write_text("\n".join(["x,z,y", *rows]))
    found = []
    for columns in (("x",), ("x", "z"), ("z",)):
        asked = Experiment().replace(
            **{"dataset__name": "table", "dataset__label": "y", "dataset__columns": columns},
            dataset__classes=("a", "b"),
            dataset__standardize="none",
        )
        index = open_own_samples(file, ("a", "b"), declare_columns(asked.dataset))
        (domain,) = split_by_secret(index, b"s" * 32, 0.3).domains
        assert domain.test is not None
        found.append(domain.test.rows.tolist())
    assert found[0] == found[1] == found[2]
    assert 10 < len(found[0]) < 40


def test_data_with_a_test_set_keep_it(tmp_path: Path) -> None:
    images = numpy.arange(160, dtype=numpy.uint8).reshape(10, 4, 4)
    labels = numpy.zeros(10, dtype=int)
    file = tmp_path / "own.npz"
    numpy.savez(file, x_train=images[:6], y_train=labels[:6], x_test=images[6:], y_test=labels[6:])
    index = open_own_samples(file, ("x",))
    assert split_by_secret(index, b"s" * 32, 0.9) is index


# The file


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[budget]\nmax_epsilon = 0", "budget.max_epsilon is 0"),
        ("[budget]\nmax_epsilon = nan", "budget.max_epsilon is nan"),
        ("[budget]\nmax_epsilon = 2.0", "budget.max_epsilon_per_run is 3; it must be at most"),
        ("[budget]\nmax_epsilon_per_run = 101", "budget.max_epsilon_per_run is 101"),
        ("[budget]\nmax_delta = 0.1", "budget.max_delta is 0.1; it must be less than 0.1"),
        ("[budget]\nmax_releases = -1", "budget.max_releases is -1"),
        ("[budget]\nrequired = 5", "budget.required is 5"),
        ('[evaluation]\nanswers = "all"', "evaluation.answers is 'all'; it must be 'exact', 'n"),
        ("[evaluation]\nepsilon = 0", "evaluation.epsilon is 0"),
        ("[evaluation]\nmax_answers_per_run = -1", "evaluation.max_answers_per_run is -1"),
        ("[evaluation]\nmax_answers = 0.5", "evaluation.max_answers is 0.5"),
        ("[data]\ntest_fraction = 1", "data.test_fraction is 1; it must be less than 1"),
        ("[data]\nmin_class_count = 0", "data.min_class_count is 0"),
        ("[secure_aggregation]\nrequired = 3", "secure_aggregation.required is 3"),
        ("[secure_aggregation]\nmin_verified_peers = 0", "min_verified_peers is 0"),
        ("[secure_aggregation]\nhonest_clients = 0", "secure_aggregation.honest_clients is 0"),
        ("[allow]\nmethods = 3", "allow.methods is 3"),
        ('[allow]\nmodels = [""]', "allow.models.0 is ''"),
        ("[allow]\nencoders = [1]", "allow.encoders.0 is 1"),
        ("[budget]\nmax_epsilons = 1", "budget.max_epsilons is not a setting"),
        ("budget = 3", "budget is 3; it must be a table of settings"),
        ("[budget", "is not valid TOML"),
    ],
)
def test_invalid_policy_is_rejected_in_one_line(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(line)
    with pytest.raises(InvalidInput) as refused:
        ClientPolicy.read(file)
    assert str(refused.value).startswith(str(file))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value).rstrip()


def test_written_policy_is_the_default_and_has_a_comment_per_line(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    ClientPolicy().write(file)
    assert ClientPolicy.read(file) == ClientPolicy()
    assert max(map(len, file.read_text().splitlines())) <= 100
    lines = [line for line in file.read_text().splitlines() if "=" in line]
    assert len(lines) == sum(len(type(section).model_fields) for _, section in ClientPolicy())
    assert all("  # " in line for line in lines)


def test_init_writes_the_policy_once(tmp_path: Path) -> None:
    make_federation(tmp_path / "lab", ["north"], None, 9800)
    file = tmp_path / "lab" / "clients" / "north" / "policy.toml"
    assert ClientPolicy.read(file) == ClientPolicy()
    file.write_text("[budget]\nrequired = true\n")
    make_federation(tmp_path / "lab", ["south"], None, 9800)
    assert ClientPolicy.read(file).budget.required
    assert (tmp_path / "lab" / "clients" / "south" / "policy.toml").is_file()


@pytest.mark.parametrize(
    ("policy", "changes", "reason"),
    [
        (
            {"allow": {"methods": ["fedavg"]}},
            {},
            "[allow] methods is fedavg; the server asked for ",
        ),
        ({"allow": {"models": []}}, {"model__name": "mlp"}, "[allow] models is empty; the server"),
        (
            {"allow": {"encoders": ["none"]}},
            {"encoder__name": "random-filters"},
            "[allow] encoders is none; the server asked for 'random-filters'",
        ),
        (
            {"secure_aggregation": {"required": True}},
            {},
            "policy [secure_aggregation] required is true; the server asked for a run without it.",
        ),
    ],
)
def test_refusals_name_the_rule(
    tmp_path: Path, policy: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ClientRefusal) as refused:
        lie(tmp_path, **policy).hello(**changes)
    assert reason in str(refused.value)


def test_small_classes_stay_at_home(tmp_path: Path) -> None:
    server = lie(tmp_path, plain(), data={"min_class_count": 200})
    assert server.hello().value("train", list) == [0, 0]
