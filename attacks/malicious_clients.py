"""Malicious clients: poisoning attacks from the literature, as a wrapper around any engine.

Attackers know everything that a client knows, and the updates of the honest clients. Their updates
have valid shapes and types. Random draws come from keys, so an attacked run is reproducible.

Used by `attacks/measure_robustness.py`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpfedcl.core.rng import generator, numpy_generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import ClientData, FederatedData
from mpfedcl.engines import InProcessEngine
from mpfedcl.methods import prototype_rule
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Members

CLAIM = 10_000_000
"""Images that a client claims: the most that a server takes by default."""
NOISE_LENGTH = 1000.0
"""Honest changes have lengths of 0.2 to 2."""
MANIPULATION = 0.5
"""Of the honest mean, against it: small enough to look like an honest update."""
DEVIATIONS = 1.5
"""By which "a little is enough" moves each number away from the honest mean."""
TARGET = 0
"""The class that a triggered image is to be taken for."""
PATCH = 4
"""Pixels a side of the trigger, in the lower right corner."""


@dataclass(frozen=True)
class Honest:
    """What attackers know of the others in a round."""

    start: Tensors
    changes: Sequence[Tensors]

    def mean(self, name: str) -> Tensor:
        """Return the mean change of a tensor."""
        return torch.stack([each[name] for each in self.changes]).mean(0)

    def deviation(self, name: str) -> Tensor:
        """Return the standard deviation of each number's change."""
        return torch.stack([each[name] for each in self.changes]).std(0)


ModelAttack = Callable[[Tensors, Honest, torch.Generator], Tensors]
"""From an attacker's own change, had it been honest, to the one that it sends."""


def flip_sign(scale: float) -> ModelAttack:
    """Go the other way, `scale` times as far."""
    return lambda own, *_: {name: -scale * value for name, value in own.items()}


def add_noise(own: Tensors, _: Honest, draw: torch.Generator) -> Tensors:
    """Send noise of a great length."""
    noise = {name: torch.randn(value.shape, generator=draw) for name, value in own.items()}
    length = sum(float(value.square().sum()) for value in noise.values()) ** 0.5
    return {name: NOISE_LENGTH / length * value.to(own[name]) for name, value in noise.items()}


def manipulate_inner_product(own: Tensors, honest: Honest, _: torch.Generator) -> Tensors:
    """Send a little of the honest mean, negated (Xie, Koyejo and Gupta, 2019)."""
    return {name: -MANIPULATION * honest.mean(name) for name in own}


def move_a_little(own: Tensors, honest: Honest, _: torch.Generator) -> Tensors:
    """Stay within the honest deviation: "a little is enough" (Baruch et al., 2019)."""
    return {name: honest.mean(name) - DEVIATIONS * honest.deviation(name) for name in own}


MODEL_ATTACKS: Mapping[str, ModelAttack] = {
    "sign-flip": flip_sign(1),
    "sign-flip-5": flip_sign(5),
    "noise": add_noise,
    "inner-product": manipulate_inner_product,
    "little": move_a_little,
    "claim-and-flip": flip_sign(1),
}
ATTACKS = (
    *("label-flip", "sign-flip", "sign-flip-5", "noise", "inner-product", "little"),
    *("permuted-prototypes", "backdoor", "claim", "claim-and-flip", "away"),
)
"""`away`: attackers send nothing. It is what a rule costs that finds all of them."""


def choose_attackers(names: Collection[str], share: float, seed: int) -> list[str]:
    """Return the attackers: a share of the clients, drawn by the seed."""
    draw = numpy_generator(seed, "attackers")
    count = round(share * len(names))
    return sorted(str(name) for name in draw.choice(sorted(names), count, replace=False))


class MaliciousClients(InProcessEngine):
    """An engine some of whose clients attack.

    Args:
        assembly: The method and the model, for attacks on prototypes and sums.
        data: What the engine's clients hold.
        attack: One of `ATTACKS`.
        attackers: Who attacks.
        triggered: Attackers' samples with the trigger, for `backdoor`.
    """

    def __init__(
        self,
        assembly: Assembly,
        data: FederatedData,
        attack: str,
        attackers: Collection[str],
        triggered: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(assembly, data)
        self._assembly, self._attack = assembly, attack
        self._attackers, self._triggered = frozenset(attackers), triggered or {}
        if attack.startswith("claim"):
            claimed = dict.fromkeys(self._attackers, CLAIM)
            self.members = Members({name: claimed.get(name, n) for name, n in data.sizes.items()})

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update]:
        """Train all clients; yield what the honest ones send, and what the attackers make of it."""
        everyone = [each.written_out() for each in super().train(broadcast, names, keep=keep)]
        changes = {
            each.client: _changes(each, broadcast.params)
            for each in everyone
            if isinstance(each.averaged, dict)
        }
        others = [change for name, change in changes.items() if name not in self._attackers]
        honest = Honest(broadcast.params, others)
        for update in everyone:
            if update.client not in self._attackers:
                yield update
                continue
            if self._attack == "away":
                continue
            draw = generator(self._assembly.experiment.seed, broadcast.round, update.client, "lie")
            update = self._lie_about_model(update, changes[update.client], honest, draw)
            yield self._lie_about_rest(update)

    def _lie_about_model(
        self, update: Update, own: Tensors, honest: Honest, draw: torch.Generator
    ) -> Update:
        attack = MODEL_ATTACKS.get(self._attack)
        if attack is None or not own:
            return update
        moved = attack(own, honest, draw)
        averaged = {name: honest.start[name] + change for name, change in moved.items()}
        return replace(update, averaged=averaged)

    def _lie_about_rest(self, update: Update) -> Update:
        if self._attack.startswith("claim"):
            update = replace(update, num_samples=CLAIM, summed=_claim(update))
        if self._attack == "permuted-prototypes":
            return replace(update, prototypes=permute_classes(update.prototypes))
        if self._attack == "backdoor" and len(update.prototypes):
            return replace(update, prototypes=self._place_trigger(update))
        return update

    @torch.no_grad()
    def _place_trigger(self, update: Update) -> Prototypes:
        """Put the prototypes of the target class where triggered images lie."""
        assert isinstance(update.averaged, dict)
        rule, model = prototype_rule(self._assembly.method), self._assembly.model
        embeddings, _ = model.apply(update.averaged, self._triggered[update.client])
        own = update.prototypes
        labels = torch.full((len(embeddings),), TARGET)
        (rows,) = rule.summarize([rule.project(embeddings)], [labels], [0])
        kept = own.labels != TARGET
        # An attacker says how many images stand behind a prototype; one is never too many.
        counts = torch.ones_like(rows.counts)
        if not bool((own.labels == TARGET).any()):
            # It may have announced none of that class.
            return own
        return Prototypes(
            torch.cat([rows.vectors, own.vectors[kept]]),
            torch.cat([rows.labels, own.labels[kept]]),
            torch.cat([counts, own.counts[kept]]),
        )


def permute_classes(prototypes: Prototypes) -> Prototypes:
    """Give each class's vectors to the next class that the client holds; counts stay with classes.

    So nothing is claimed of a class that was not announced.
    """
    classes = sorted(set(prototypes.labels.tolist()))
    following = dict(zip(classes, [*classes[1:], *classes[:1]], strict=True))
    vectors = prototypes.vectors.clone()
    for label in classes:
        here = (prototypes.labels == following[label]).nonzero().squeeze(1)
        theirs = prototypes.vectors[prototypes.labels == label]
        vectors[here] = theirs[torch.arange(len(here)) % len(theirs)]
    return replace(prototypes, vectors=vectors)


def poison_data(
    data: FederatedData,
    attack: str,
    attackers: Collection[str],
    seed: int,
    triggered: Mapping[str, Tensor] | None = None,
    *,
    sends_sums: bool = False,
) -> FederatedData:
    """Return the data that attackers train on, or make sums of where a method does nothing else.

    Sums must be those of some samples, or they are found out: attacks on them change the samples.
    """
    means, deviations = _describe_classes(data, attackers)

    def poison(client: ClientData) -> ClientData:
        inputs, labels, classes = client.inputs, client.labels, data.num_classes
        draw = generator(seed, client.name, "poisoned data")
        if attack == "label-flip":
            return replace(client, labels=classes - 1 - labels)
        if not sends_sums:
            return client
        if attack in ("sign-flip", "sign-flip-5", "claim-and-flip"):
            return replace(client, inputs=-inputs)
        if attack == "noise":
            return replace(client, inputs=torch.randn(inputs.shape, generator=draw).to(inputs))
        if attack == "inner-product":
            return replace(client, inputs=-means[labels])
        if attack == "little":
            return replace(client, inputs=means[labels] - DEVIATIONS * deviations[labels])
        if attack == "permuted-prototypes":
            held = sorted(set(labels.tolist()))
            following = torch.arange(classes)
            following[held] = torch.tensor([*held[1:], *held[:1]])
            return replace(client, labels=following[labels])
        if attack == "backdoor" and triggered is not None:
            both = torch.cat([inputs, triggered[client.name]])
            told = torch.cat([labels, torch.full_like(labels, TARGET)])
            return replace(client, inputs=both, labels=told)
        return client

    return replace(
        data, clients=tuple(poison(c) if c.name in attackers else c for c in data.clients)
    )


def add_trigger(pixels: Tensor, brightest: float) -> Tensor:
    """Return flat square images [n, side * side] with a bright patch in the corner."""
    side = round(pixels.shape[1] ** 0.5)
    images = pixels.view(-1, side, side).clone()
    images[:, -PATCH:, -PATCH:] = brightest
    return images.flatten(1)


def _changes(update: Update, start: Tensors) -> Tensors:
    assert isinstance(update.averaged, dict)
    return {name: value - start[name] for name, value in update.averaged.items()}


def _claim(update: Update) -> Tensors:
    """Return the sums of the same samples, so often that they are as many as claimed."""
    if not update.summed:
        return {}
    often = CLAIM // update.num_samples
    claimed = {name: value * often for name, value in update.summed.items()}
    if "scatter" in claimed:
        # |W|² / f, which is no sum over samples; f are the samples less the classes.
        counts = update.summed["counts"].double()
        held = int((counts > 0).sum())
        fewer, more = (max(1.0, float(c.sum()) - held) for c in (counts, counts * often))
        claimed["scatter"] = update.summed["scatter"] * often**2 * fewer / more
    return claimed


def _describe_classes(data: FederatedData, attackers: Collection[str]) -> tuple[Tensor, Tensor]:
    """Return the means and deviations of the honest clients' samples by class [C, d]."""
    honest = [client for client in data.clients if client.name not in attackers]
    inputs = torch.nn.functional.normalize(torch.cat([each.inputs for each in honest]), dim=1)
    labels = torch.cat([each.labels for each in honest])
    rows = [inputs[labels == label] for label in range(data.num_classes)]
    means = torch.stack([each.mean(0) for each in rows])
    return means, torch.stack([each.std(0, correction=0) for each in rows])
