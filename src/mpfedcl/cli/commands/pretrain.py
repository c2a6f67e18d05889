"""`mpfedcl pretrain`."""

import json
from dataclasses import asdict

from mpfedcl.cli.arguments.experiments import Pretrain
from mpfedcl.cli.progress import progress_bar, stderr_console, stdout_console
from mpfedcl.data.pretraining import load_pretraining_data
from mpfedcl.engines.hardware import cap_threads
from mpfedcl.models.encoders.pretraining import Epoch, PretrainingData, PretrainObserver, pretrain
from mpfedcl.report.tables import percent


def pretrain_command(arguments: Pretrain) -> int:
    """Train an encoder; show progress, then where it is and how to use it."""
    cap_threads()
    console = stderr_console()
    with progress_bar(console, "steps") as bar:
        task = bar.add_task("reading images", total=None, note="")
        last = ""

        def on_start(data: PretrainingData, total: int, done: int) -> None:
            words = f"{len(data.labels):,} images, {len(data.class_names)} classes"
            bar.update(task, description=words, total=total, completed=done)

        def on_step(loss: float) -> None:
            bar.update(task, advance=1, note=f"loss {loss:.3f}  {last}")

        def on_epoch(epoch: Epoch) -> None:
            nonlocal last
            last = f"epoch {epoch.epoch}: held out {percent(epoch.accuracy)} %"
            bar.update(task, note=f"loss {epoch.loss:.3f}  {last}")

        try:
            result = pretrain(
                arguments.settings,
                load_pretraining_data,
                arguments.out,
                resume=arguments.resume,
                observer=PretrainObserver(on_start, on_step, on_epoch),
            )
        except KeyboardInterrupt:
            console.print(
                "Stopped. The same command with --resume resumes after the last complete epoch."
            )
            return 130
    if arguments.json:
        history = [asdict(epoch) for epoch in result.history]
        print(json.dumps({"path": str(result.path), "epochs": history}, indent=2))
        return 0
    final = result.history[-1]
    stdout_console().print(
        f"encoder: {result.path}   loss {final.loss:.3f}, held-out accuracy "
        f"{percent(final.accuracy)} %\n"
        f"use it with: mpfedcl run --encoder.name resnet18 --encoder.weights {result.path}"
    )
    return 0
