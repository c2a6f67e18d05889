"""FedAvg in Apple's pfl (pfl-research), one process or several by torchrun."""

import functools
import logging
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from measure import Stopwatch, TreeMemory, parser, report
from torch import Tensor
from torch.nn.functional import cross_entropy
from work import (
    BATCH_SIZE,
    LEARNING_RATE,
    MOMENTUM,
    SEED,
    Mlp,
    accuracy,
    load_data,
    new_model,
)


class PflMlp(Mlp):
    """The model with the two methods that pfl asks for."""

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        self.train()
        return cross_entropy(self(images), labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return the number of images: pfl must have something, and asks in the warm-up."""
        from pfl.metrics import Weighted

        return {"images": Weighted(len(labels), 1)}


def run(data_path: str, rounds: int, threads: int, processes: int, *, read: bool) -> None:
    """Run the rounds in this process (one of several under torchrun); the first one reports."""
    # pfl looks at the environment when it is imported, so only now.
    import numpy
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(threads)
    logging.disable(logging.INFO)
    numpy.random.seed(SEED)
    data = load_data(data_path)

    def client_data(user: int) -> Any:
        # pfl batches in the order given; a fresh order each round is the shuffling of the others.
        order = torch.randperm(len(data.y[user]))
        tensors = (data.x[user][order], data.y[user][order])
        return PyTorchTensorDataset(tensors, user_id=str(user))

    rank = int(os.environ.get("RANK", 0))
    # Under torchrun the launcher is the root of the tree.
    root = os.getppid() if processes > 1 else os.getpid()
    watch = Stopwatch(root)

    class AllUsers(FederatedDataset):  # type: ignore[misc, unused-ignore]
        """Every client once a round; pfl's own samplers drift apart where 2 processes share 5."""

        def get_cohort(self, cohort_size: int) -> Iterator[tuple[Any, int]]:
            """Yield the clients of this process."""
            for user in range(rank, cohort_size, processes):
                yield self.make_dataset_fn(user), user

    class Laps(TrainingProcessCallback):  # type: ignore[misc, type-arg, unused-ignore]
        """Tells the stopwatch of each round's end."""

        def after_central_iteration(self, _: Any, model: Any, **__: Any) -> tuple[bool, Any]:
            """Never stop."""
            watch.lap((lambda: accuracy(model.pytorch_model, data)) if read else None)
            return False, Metrics()

    users = AllUsers(client_data, MinimizeReuseUserSampler(list(range(data.clients))))
    start = PflMlp()
    start.load_state_dict(new_model().state_dict())
    model = PyTorchModel(
        start,
        functools.partial(torch.optim.SGD, momentum=MOMENTUM),
        torch.optim.SGD(start.parameters(), lr=1.0),
    )
    memory = TreeMemory(root) if rank == 0 else None
    watch.begin()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=1 + rounds,
            # Iteration 0, the warm-up, is always evaluated; no other one is.
            evaluation_frequency=1 + rounds,
            train_cohort_size=data.clients,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(users, None, [WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=LEARNING_RATE,
            local_batch_size=BATCH_SIZE,
        ),
        callbacks=[Laps()],
        send_metrics_to_platform=False,
    )
    if memory is not None:
        peak = memory.stop()
        report(
            "pfl",
            version("pfl"),
            watch,
            peak,
            accuracy(model.pytorch_model, data),
            method="fedavg",
            threads=threads * processes,
        )


def main() -> None:
    """Run here, or begin again under torchrun if several processes are asked for."""
    flags = parser(__doc__)
    flags.add_argument("--threads", type=int, default=1, help="of each process")
    flags.add_argument("--processes", type=int, default=1)
    options = flags.parse_args()
    if options.processes > 1 and "RANK" not in os.environ:
        os.environ |= {"OMP_NUM_THREADS": str(options.threads), "GLOO_SOCKET_IFNAME": "lo"}
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(options.processes)]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        here = [*meet, "--local-addr", "127.0.0.1"]
        os.execv(sys.executable, [sys.executable, *launcher, *here, *sys.argv])
    run(options.data, options.rounds, options.threads, options.processes, read=options.read)


if __name__ == "__main__":
    main()
