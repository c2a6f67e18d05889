"""Secure aggregation: the server learns the sum of the clients' values, but no single value.

The protocol is that of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving
Machine Learning" (2017), for a server that may lie. It has five stages, each a message to the
clients and a reply:

1. advertise: each client generates two key pairs and a seed, and sends the public keys;
2. share: it receives the others' keys, splits its secrets and encrypts a share for each client;
3. mask: it adds its values, the stream of its own seed and, with opposite signs for the two
   clients, a stream for each pair of clients; all modulo 2^64;
4. confirm: it signs the list of the clients whose masked values arrived, and no other list;
5. reveal: if enough clients have signed that list, it reveals for these clients a share of the
   seed, for the others a share of the key. Never both of one client: that would open its values.

`protocol.py` has the two parties, independent of the transport.
"""

from importlib.util import find_spec

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import SecureSettings
from mpfedcl.methods import OneShot, built_in_methods, find_method

LEAST_CLIENTS = 3
"""With two clients, each could compute the other's values from the sum."""
LEAST_SHARE = 2 / 3
"""More than this share of the clients must be left, so that no two lists of them are signed."""
_BLINDED = (
    "Secure aggregation: the server sees only totals over clients, so it cannot validate, clip or "
    "reject a single update; it validates the totals."
)


class ProtocolError(Exception):
    """Raised for a message that a party must not answer; the text gives the reason."""


class NothingOpened(Exception):  # noqa: N818  -- it names what happened
    """Raised if too few clients are left to open the sum; the text has their number."""


def least_left(num_clients: int, share: float) -> int:
    """Return the number of clients required to open a sum: more than a share, and more than 2/3.

    With t of n, a server needs 2t - n clients on its side to get two lists signed: over n / 3.

    Example:
        >>> [least_left(count, 2 / 3) for count in (3, 4, 5, 10)]
        [3, 3, 4, 7]
    """
    return max(2 * num_clients // 3, int(share * num_clients)) + 1


def describe_lost_round(round_number: int, error: NothingOpened) -> str:
    """Return the warning about a round whose sum was not opened."""
    return f"Round {round_number}: the secure sum was not opened because {error}."


def check_installed() -> None:
    """Check that the cryptographic libraries are installed."""
    if find_spec("cryptography") is None or find_spec("Crypto") is None:
        raise InvalidInput(
            "secure_aggregation is True; it needs cryptography and pycryptodome, which are not "
            'installed: pip install "mpfedcl[flower]".'
        )


def describe_secure_aggregation(experiment: Experiment) -> list[str]:
    """Return the notes to print at the start of a run; empty without secure aggregation."""
    if not experiment.secure_aggregation:
        return []
    method = find_method(experiment.method)
    lost = method.lost_by_totals if issubclass(method, OneShot) else ""
    return [_BLINDED, lost] if lost else [_BLINDED]


def check_secure_aggregation(experiment: Experiment) -> None:
    """Reject a resolved experiment whose server must see the updates of single clients."""
    if not experiment.secure_aggregation:
        return
    check_installed()
    settings, method = experiment.secure, find_method(experiment.method)
    if settings.threshold < LEAST_SHARE:
        raise InvalidInput(
            f"secure.threshold is {settings.threshold:g}; with secure_aggregation it must be at "
            "least 2/3 (0.6667): below, a server that lies could read the update of one client."
        )
    if not method.totals_suffice:
        able = [name for name, each in built_in_methods().items() if each.totals_suffice]
        raise InvalidInput(
            f"method is {experiment.method!r}; with secure_aggregation it must be one of "
            f"{', '.join(able)}, or a class of your own that sets `totals_suffice = True`: other "
            "methods need the updates of single clients."
        )
    rule = experiment.aggregation.rule
    if rule != "mean":
        raise InvalidInput(
            f"aggregation.rule is {rule!r}; with secure_aggregation it must be 'mean': other rules "
            "compare single clients' updates, which the server does not see."
        )
    if experiment.statistics.keep == "clients":
        raise InvalidInput(
            "statistics.keep is 'clients'; with secure_aggregation it must be auto or pooled: "
            "the server does not see the statistics of single clients."
        )
    if experiment.privacy.has_budget and experiment.privacy.model == "local":
        raise InvalidInput(
            "privacy.model is 'local'; with secure_aggregation it must be central: clients add "
            "shares of the noise, so the server sees no sum without noise."
        )
    if experiment.privacy.has_budget and experiment.fraction < 1:
        raise InvalidInput(
            f"fraction is {experiment.fraction:g}; with secure_aggregation and a privacy budget it "
            "must be 1: the server knows the sampled clients, so sampling does not amplify privacy."
        )
    if experiment.asked_workers > 1:
        raise InvalidInput(
            f"workers is {experiment.workers}; with secure_aggregation it must be 1: the clients "
            "of a run mask their updates for each other."
        )


def check_enough_clients(experiment: Experiment, num_clients: int) -> None:
    """Reject a simulation with too few clients per round."""
    chosen = min(num_clients, max(experiment.min_clients, round(experiment.fraction * num_clients)))
    if chosen < LEAST_CLIENTS:
        raise InvalidInput(
            f"{chosen} clients take part in a round (clients, fraction); with secure_aggregation "
            f"it must be at least {LEAST_CLIENTS}: with two, each could compute the other's update "
            "from the sum."
        )
    if experiment.privacy.has_budget:
        check_honest_clients(experiment.secure, chosen)


def check_honest_clients(settings: SecureSettings, num_clients: int) -> None:
    """Reject an assumption of more honest clients than a sum may have."""
    least = least_left(num_clients, settings.threshold)
    if settings.honest_clients > least:
        raise InvalidInput(
            f"secure.honest_clients is {settings.honest_clients}; it must be at most {least}: a "
            f"sum of {num_clients} clients is opened when {least} are left."
        )
