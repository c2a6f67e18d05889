"""FedAvg in Flower's simulation (Ray), by the Message API."""

import argparse
import os
import tempfile
from importlib.metadata import version

from measure import Stopwatch, TreeMemory, parser, report


def main() -> None:
    """Run the rounds and report."""
    flags = parser(__doc__)
    flags.add_argument("--cpus", type=int, default=1, help="of each client; 1: two at a time")
    flags.add_argument("--pull-interval", type=float, default=0.1, help="of the server, in seconds")
    options = flags.parse_args()
    with tempfile.TemporaryDirectory(prefix="flower-") as home:
        # Before the import: Flower and Ray look when they are loaded.
        os.environ |= {
            "FLWR_HOME": home,
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PEERS_DATA": os.path.abspath(options.data),  # noqa: PTH100
            "PEERS_THREADS": str(options.cpus),
        }
        simulate(options)


def simulate(options: argparse.Namespace) -> None:
    """Start Ray with two cores, run the rounds, report."""
    from flower_client import app as client_app
    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation
    from work import accuracy, load_data, new_model

    server_app = ServerApp()
    memory = TreeMemory(os.getpid())
    watch = Stopwatch(os.getpid())
    data = load_data(options.data)
    model = new_model()
    peak = 0.0

    def after_round(number: int, arrays: ArrayRecord) -> None:
        def read() -> float:
            model.load_state_dict(arrays.to_torch_state_dict())
            return accuracy(model, data)

        # Flower calls this once before the first round and then at the end of each.
        if number:
            watch.lap(read if options.read else None)
        else:
            watch.begin()

    @server_app.main()  # type: ignore[untyped-decorator, unused-ignore]
    def main(grid: Grid, _: Context) -> None:
        nonlocal peak
        # The simulation's grid asks for replies every 0.1 s unless told otherwise.
        grid.pull_interval = options.pull_interval  # type: ignore[attr-defined, unused-ignore]
        result = FedAvg(
            fraction_evaluate=0.0, min_train_nodes=data.clients, min_available_nodes=data.clients
        ).start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=1 + options.rounds,
            evaluate_fn=after_round,
        )
        peak = memory.stop()
        model.load_state_dict(result.arrays.to_torch_state_dict())

    run_simulation(
        server_app,
        client_app,
        num_supernodes=data.clients,
        backend_config={
            "init_args": {"num_cpus": 2, "log_to_driver": False},
            "client_resources": {"num_cpus": options.cpus, "num_gpus": 0.0},
        },
    )
    report(
        "flower",
        version("flwr"),
        watch,
        peak,
        accuracy(model, data),
        method="fedavg",
        threads=2,
        ray=version("ray"),
    )


if __name__ == "__main__":
    main()
