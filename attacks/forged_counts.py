"""Forged counts: a client claims more images than it has, so that its model dominates the mean.

Of three clients with 20 images each, the third announces ten million but sends an honest update.
The weight of each client is computed from the global model. Expected: at most the weight of a
client of median size.
"""

import torch
from federations import is_training, rewrite
from flwr.app import Message as FlowerMessage
from safetensors.torch import load_file
from torch import Tensor

from attacked_federation import ATTACKER, attacked_federation
from opened_records import from_records
from outcome import Outcome

CLAIM = 9_999_999
MOST_SHARE = 1 / 3
"""As much as each of the others."""


def attack(*, full: bool) -> list[Outcome]:
    """Take part in one round of FedAvg with a false count."""
    with attacked_federation(_claim, rounds=1, method="fedavg") as federation:
        federation.serve()
        models = {
            name: _flatten(
                {n: torch.tensor(a) for n, a in from_records(reply.content).arrays.items()}
            )
            for name, reply in federation.grid.replies
            if str(reply.metadata.message_type) == "train"
        }
        averaged = load_file(federation.path / "model.safetensors")
        final = _flatten({f"averaged/{name}": value for name, value in averaged.items()})
    columns = torch.stack(list(models.values()), 1)
    shares = torch.linalg.lstsq(columns, final.unsqueeze(1)).solution.squeeze(1)
    share = float(shares[list(models).index(ATTACKER)])
    return [
        Outcome(
            f"a claim of {CLAIM:,} images, of three clients with 20",
            f"at most {100 * MOST_SHARE:.0f} % of the model",
            f"{100 * share:.0f} %",
            share <= MOST_SHARE + 0.01,
        )
    ]


def _claim(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
    if client != ATTACKER:
        return reply
    if is_training(request):
        return rewrite(reply, request, lambda said: {**said, "num_samples": CLAIM})
    if str(request.metadata.message_type) == "query":
        train = [CLAIM // 3] * 3
        return rewrite(reply, request, lambda said: {**said, "train": train})
    return reply


def _flatten(tensors: dict[str, Tensor]) -> Tensor:
    """Return the numbers of a model in the order of names."""
    names = sorted(name for name in tensors if name.startswith("averaged/"))
    return torch.cat([tensors[name].flatten().double() for name in names])
