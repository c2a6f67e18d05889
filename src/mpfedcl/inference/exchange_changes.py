"""How a federation of one exchange is written down once somebody has joined or left it.

Statistics, class means, classifiers and the ledger change by one rename (`mpfedcl.runs.change`).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors, digest, load_tensors, pack_tensors
from mpfedcl.gaussian import ABSENT
from mpfedcl.inference.calibration import FILE as CALIBRATION_FILE
from mpfedcl.inference.calibration import METRIC_FILE
from mpfedcl.inference.exchange import Exchange, Fitted
from mpfedcl.inference.ledger import LOG, extend_ledger, make_event, read_events
from mpfedcl.runs.change import change_files
from mpfedcl.runs.directory import RunDirectory, pack_pool
from mpfedcl.runs.statistics_files import POOLED, client_file, pack_statistics

CHANGES = ("joined", "replaced", "extended", "left")
"""Events after which a federation is another one."""


def write_joined(
    before: Exchange,
    after: Exchange,
    fitted: Fitted,
    *,
    client: str,
    own: Tensors,
    personal: Tensors | None,
    class_names: list[str],
    event: str,
    record: dict[str, Any],
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write the federation with a client that has joined, or has other samples than before.

    `beside`: other files of the run that change at the same moment.
    """
    written = {**_common_files(before, after, fitted), **beside}
    if before.keeps_clients:
        written[client_file(client)] = pack_statistics(own, before.encoder)
        written |= _widened_statistics(before, after, client)
    keeps = before.experiment.personal_models
    models = dict(_other_models(before, after, fitted, client)) if keeps else {}
    if keeps and personal is not None:
        models[client] = personal
    written |= {_model_file(name): pack_tensors(model) for name, model in models.items()}
    partition = _grow_partition(before.partition, class_names, client, own)
    counts = [int(count) for count in own["counts"]]
    _write(before, written, [], partition, event, client, {**record, "counts": counts})


def write_left(
    before: Exchange, after: Exchange, fitted: Fitted, *, client: str, own: Tensors
) -> None:
    """Write the federation without a client; whatever holds something of it goes too."""
    written = {**_common_files(before, after, fitted), **_forget_sums(before.path, client)}
    if before.experiment.personal_models:
        models = _other_models(before, after, fitted, client)
        written |= {_model_file(name): pack_tensors(model) for name, model in models}
    removed = [client_file(client), _model_file(client)]
    # They have its class means; nothing is left to be resumed.
    for folder in ("checkpoint", "trail"):
        removed += [f"{folder}/{file.name}" for file in (before.path / folder).glob("*")]
    partition = dict(before.partition)
    for part in ("clients", "input_means"):
        if client in partition.get(part, {}):
            partition[part] = _without(partition[part], client)
    written |= _calibration_without(before.path, client)
    counts = [int(count) for count in own["counts"]]
    _write(before, written, removed, partition, "left", client, {"counts": counts})


def has_changed(path: Path) -> bool:
    """Tell whether clients have joined or left a run of one exchange since it ended."""
    is_kept = (path / POOLED).is_file()
    return is_kept and any(event.get("event") in CHANGES for event in read_events(path))


def refuse_changed(path: Path) -> None:
    """Refuse to resume a run whose federation is another one by now: it has no round left."""
    if has_changed(path):
        raise InvalidInput(
            f"resume is {str(path)!r}, where clients have joined or left since; it must be a run "
            "with rounds left, and one of a single exchange has none."
        )


def _write(
    before: Exchange,
    written: dict[str, bytes],
    removed: list[str],
    partition: dict[str, Any],
    event: str,
    client: str,
    record: dict[str, Any],
) -> None:
    path = before.path
    hashes = {}
    for name in ("model.safetensors", POOLED, "pool.safetensors"):
        short = name.removesuffix(".safetensors")
        hashes[f"{short}_before"] = digest((path / name).read_bytes())
        hashes[f"{short}_after"] = digest(written[name])
    line = {**make_event(event, client), **record, **hashes}
    written[LOG] = extend_ledger(path, line)
    if partition != before.partition:
        written["partition.json"] = _to_json(partition)
    # What was measured of the federation before.
    change_files(path, written, [*removed, "contribution.json", "contribution.png"])


def _common_files(before: Exchange, after: Exchange, fitted: Fitted) -> dict[str, bytes]:
    written = {
        POOLED: pack_statistics(after.pooled, before.encoder),
        "pool.safetensors": pack_pool(after.pool),
        "model.safetensors": pack_tensors(fitted.params),
    }
    # A run over a network has none: thresholds are measured on samples, which stay at home.
    has_metric = (before.path / METRIC_FILE).is_file()
    if has_metric and {"covariance", "fit"} <= fitted.found.keys():
        kept = {name: fitted.found[name] for name in ("covariance", "fit")}
        written[METRIC_FILE] = pack_tensors(kept)
    return written


def _other_models(
    before: Exchange, after: Exchange, fitted: Fitted, client: str
) -> Iterator[tuple[str, Tensors]]:
    """Yield the own classifiers of the other clients, as far as they change.

    A client's own is made anew of its sums. Where they are not kept, or it has samples that it
    never sent, it stays: the client makes it at home. A class that has come since it cannot know.
    """
    sends_all = before.experiment.prototypes.min_cluster_size == 1
    for name in after.pool.names:
        file = before.path / _model_file(name)
        if name == client or not file.is_file():
            continue
        if before.keeps_clients and sends_all:
            personal = after.method.personalize_from(fitted.received, after.own_of(name))
            if personal is not None:
                yield name, personal
                continue
        if after.pool.num_classes > before.pool.num_classes:
            yield name, _widen_model(load_tensors(file), after.pool.num_classes)


def _widen_model(params: Tensors, num_classes: int) -> Tensors:
    """Return a classifier that never answers with the classes that have come since."""
    weight, bias = params["weight"], params["bias"]
    missing = num_classes - len(bias)
    none = bias.new_full((missing, *bias.shape[1:]), ABSENT)
    return {
        "weight": torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])]),
        "bias": torch.cat([bias, none]),
    }


def _widened_statistics(before: Exchange, after: Exchange, client: str) -> dict[str, bytes]:
    """Return the other clients' statistics with room for the classes that have come."""
    if after.pool.num_classes == before.pool.num_classes:
        return {}
    return {
        client_file(name): pack_statistics(after.own_of(name), before.encoder)
        for name in before.pool.names
        if name != client
    }


def _grow_partition(
    partition: dict[str, Any], class_names: list[str], client: str, own: Tensors
) -> dict[str, Any]:
    """Return partition.json with classes that have come, and what an old client has now."""
    missing = len(class_names) - len(partition["classes"])
    clients = {
        name: {**each, "train": [*each["train"], *[0] * missing]}
        for name, each in partition["clients"].items()
    }
    grown = {**partition, "classes": class_names, "clients": clients}
    if client in clients:
        # The samples that it was measured on are no longer all, or no longer the same.
        grown["input_means"] = _without(partition.get("input_means", {}), client)
        clients[client]["train"] = [int(count) for count in own["counts"]]
    return grown


def _calibration_without(path: Path, client: str) -> dict[str, bytes]:
    """Return calibration.json without what was measured on a client's samples, if it is there."""
    found = RunDirectory(path).read_json(CALIBRATION_FILE) or {}
    clients = found.get("clients")
    if not isinstance(clients, dict) or client not in clients:
        return {}
    return {CALIBRATION_FILE: _to_json({**found, "clients": _without(clients, client)})}


def _forget_sums(path: Path, client: str) -> dict[str, bytes]:
    """Return federation.json without the digest of a client's sums, if it is there."""
    found = RunDirectory(path).read_json("federation.json") or {}
    sums = found.get("sums")
    if not isinstance(sums, dict) or client not in sums:
        return {}
    return {"federation.json": _to_json({**found, "sums": _without(sums, client)})}


def _to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2, allow_nan=False).encode() + b"\n"


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _model_file(name: str) -> str:
    return f"models/{name}.safetensors"
