"""A federated loop as one writes it by hand in PyTorch: FedAvg, or MP-FedCL with scikit-learn."""

import copy
import os
from collections.abc import Iterable

import numpy
import torch
from measure import Stopwatch, TreeMemory, parser, report
from sklearn.cluster import KMeans  # type: ignore[import-untyped, unused-ignore]
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, normalize
from torch.utils.data import DataLoader, TensorDataset
from work import (
    BATCH_SIZE,
    CLASSES,
    EMBEDDING,
    LEARNING_RATE,
    MOMENTUM,
    SEED,
    Mlp,
    accuracy,
    load_data,
    new_model,
)

K = 2
TEMPERATURE = 0.07

Batches = Iterable[list[Tensor]]
Weights = dict[str, Tensor]
Prototypes = dict[int, Tensor]
"""Of one client: class -> [up to K, d]."""


def contrast(z: Tensor, labels: Tensor, grid: Tensor, present: Tensor) -> Tensor:
    """Pull z [B, d] to the prototypes of its class, slot by slot of grid [N, K, C, d]."""
    logits = torch.einsum("bd,nkcd->bnkc", z, grid) / TEMPERATURE
    logits = logits.masked_fill(~present, float("-inf"))
    log_shares = log_softmax(logits, dim=-1)
    index = labels.view(-1, 1, 1, 1).expand(-1, *grid.shape[:2], 1)
    losses = -log_shares.gather(-1, index).mean(dim=(1, 2, 3))
    known = present[labels]
    return losses[known].mean() if known.any() else z.sum() * 0


def train(model: Mlp, batches: Batches, grid: Tensor | None, present: Tensor) -> None:
    """Train one client's copy for an epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        v = model.body(images)
        loss = cross_entropy(model.head(v), labels)
        if grid is not None:
            loss = loss + contrast(normalize(v), labels, grid, present)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()


def average(states: list[Weights], sizes: list[int]) -> Weights:
    """Average the clients' weights by their numbers of images."""
    shares = torch.tensor(sizes) / sum(sizes)
    averaged = {name: torch.zeros_like(value) for name, value in states[0].items()}
    for state, share in zip(states, shares, strict=True):
        for name in averaged:
            averaged[name] += share * state[name]
    return averaged


@torch.no_grad()
def make_prototypes(model: Mlp, images: Tensor, labels: Tensor) -> Prototypes:
    """Cluster one client's embeddings, class by class."""
    model.eval()
    z = normalize(model.body(images)).numpy()
    prototypes = {}
    for label in range(CLASSES):
        members = z[labels.numpy() == label]
        if len(members):
            clusters = min(K, len(numpy.unique(members, axis=0)))
            fitted = KMeans(n_clusters=clusters, n_init=1, random_state=SEED).fit(members)
            prototypes[label] = torch.from_numpy(fitted.cluster_centers_)
    return prototypes


def pad(pool: list[Prototypes]) -> tuple[Tensor, Tensor]:
    """Return the grid [N, K, C, d], class means where a client has fewer than K, and who is in."""
    grid = torch.zeros(len(pool), K, CLASSES, EMBEDDING)
    present = torch.zeros(CLASSES, dtype=torch.bool)
    for label in range(CLASSES):
        held = [client[label] for client in pool if label in client]
        if not held:
            continue
        present[label] = True
        grid[:, :, label] = torch.cat(held).mean(0)
        for number, client in enumerate(pool):
            if len(client.get(label, ())) == K:
                grid[number, :, label] = client[label]
    return grid, present


def main() -> None:
    """Run the rounds and report."""
    flags = parser(__doc__)
    flags.add_argument("--method", choices=["fedavg", "mp-fedcl"], default="fedavg")
    flags.add_argument("--threads", type=int, default=1)
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    threadpool_limits(options.threads)
    memory = TreeMemory(os.getpid())
    data = load_data(options.data)
    server = new_model()
    loaders = [
        DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=True)
        for x, y in zip(data.x, data.y, strict=True)
    ]
    sizes = [len(y) for y in data.y]
    grid: Tensor | None = None
    present = torch.zeros(CLASSES, dtype=torch.bool)
    watch = Stopwatch(os.getpid())
    for _ in range(1 + options.rounds):
        states: list[Weights] = []
        pool: list[Prototypes] = []
        for loader, x, y in zip(loaders, data.x, data.y, strict=True):
            model = copy.deepcopy(server)
            train(model, loader, grid, present)
            states.append(model.state_dict())
            if options.method == "mp-fedcl":
                pool.append(make_prototypes(model, x, y))
        server.load_state_dict(average(states, sizes))
        if pool:
            grid, present = pad(pool)
        watch.lap((lambda: accuracy(server, data)) if options.read else None)
    peak = memory.stop()
    report(
        "handwritten",
        torch.__version__,
        watch,
        peak,
        accuracy(server, data),
        method=options.method,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
