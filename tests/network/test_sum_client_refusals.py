"""What a client answers to messages of a secure sum that make no sense: one sentence each."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from mpfedcl.experiment import Experiment
from mpfedcl.network.client.secure_aggregation import SecureAggregation, SumRefusal
from mpfedcl.network.message import Message, MessageError
from mpfedcl.privacy.secure_aggregation.fixed_point import encode

RUN = "0" * 32


def part(folder: Path, **values: Any) -> SecureAggregation:
    message = Message({"run": RUN, "round": 1, **values})
    return SecureAggregation("ana", folder, None, Experiment(secure_aggregation=True), message)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"run": "../../etc"}, "32 hexadecimal digits"),
        ({"round": "1"}, "round is '1'"),
        ({"stage": "open"}, "stage is 'open'; it must be one of advertise, share, reveal"),
        ({"stage": 3}, "stage is 3"),
    ],
)
def test_messages_that_make_no_sense(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageError, match=words):
        part(tmp_path, **{"stage": "advertise", **values}).answer()


def test_stages_out_of_order(tmp_path: Path) -> None:
    with pytest.raises(SumRefusal, match="it has not begun a sum of round 1"):
        part(tmp_path, stage="share", adverts={}).answer()
    part(tmp_path, stage="advertise").answer()
    with pytest.raises(SumRefusal, match="the next stage here is share"):
        part(tmp_path, sealed={}).mask(lambda _: numpy.zeros(1, dtype=numpy.uint64))
    with pytest.raises(SumRefusal, match="0 clients take part"):
        part(tmp_path, stage="share", adverts={}).answer()
    with pytest.raises(SumRefusal, match="it has not begun a sum of round 2"):
        part(tmp_path, stage="reveal", survivors=[], round=2).answer()


def test_damaged_file_is_not_taken_for_none(tmp_path: Path) -> None:
    part(tmp_path, stage="advertise").answer()
    file = tmp_path / RUN / "secure-sum.json"
    assert (file.parent.stat().st_mode & 0o077) == 0
    file.write_text("{")
    with pytest.raises(SumRefusal, match="its file of secure aggregation is damaged"):
        part(tmp_path, stage="advertise").answer()


def test_number_out_of_range_is_named(tmp_path: Path) -> None:
    members = {name: part(tmp_path / name, stage="advertise") for name in ("bo", "cy")}
    adverts = {name: each.answer().values["advert"] for name, each in members.items()}
    adverts["ana"] = part(tmp_path, stage="advertise").answer().values["advert"]
    sealed = part(tmp_path, stage="share", adverts=adverts).answer().values["sealed"]
    assert set(sealed) == {"bo", "cy"}
    with pytest.raises(
        SumRefusal, match=r"weight holds 1e\+30; with secure aggregation of 3 clients"
    ):
        part(tmp_path, sealed={}).mask(lambda count: encode("weight", numpy.array([1e30]), count))
