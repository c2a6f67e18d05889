"""`mpfedcl export`."""

import json
from contextlib import nullcontext

from mpfedcl.cli.arguments.deployment import Export
from mpfedcl.cli.progress import stderr_console, stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.inference.export.exporter import ExportSettings, export_run
from mpfedcl.inference.predictor import load_predictor


def export_command(arguments: Export) -> int:
    """Write the file, then print the result of the check."""
    if arguments.check_images < 1:
        raise InvalidInput(f"check_images is {arguments.check_images}; it must be at least 1.")
    predictor = load_predictor(
        arguments.run,
        arguments.client,
        held_out=arguments.held_out,
        false_alarms=arguments.false_alarms,
        weights=arguments.weights,
    )
    wanted = ExportSettings(
        arguments.format,
        arguments.predictor,
        arguments.encoder == "include",
        arguments.quantize is not None,
        arguments.check_images,
        arguments.held_out,
    )
    console = stderr_console()
    with console.status("exporting") if console.is_terminal else nullcontext():
        # Not into the run that a client has kept: later runs replace it.
        done = export_run(predictor, wanted, arguments.out, arguments.run)
    if arguments.json:
        told = {"path": str(done.path), "bytes": done.num_bytes, **done.note}
        print(json.dumps(told, indent=2))
        return 0
    note = done.note
    shape = " x ".join(str(size) for size in note["input"]["shape"])
    stdout_console().print(
        f"{note['model']} model, by {note['predictor']}: {note['input']['name']} {shape} "
        f"({note['input']['type']}) to {', '.join(note['outputs'])}; "
        f"{len(note['classes'])} classes{', int8' if note['quantized'] else ''}"
    )
    if (checked := note["checked"]) is not None:
        said = (
            f"checked against PyTorch on {checked['images']:,} {checked['from']}: "
            f"{checked['labels_differ']} labels differ, scores by up to "
            f"{checked['largest_difference']:.1e}"
        )
        if checked["accuracy"] is not None:
            said += f"; accuracy {checked['accuracy']:.1f} %, of PyTorch "
            said += f"{checked['accuracy_of_pytorch']:.1f} %"
        stdout_console().print(said)
    stdout_console().print(f"file: {done.path} ({done.num_bytes:,} bytes)")
    return 0
