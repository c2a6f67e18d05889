"""The fuzzer: honest inputs, changed at random, against everything that reads what strangers give.

python tests/fuzz/fuzzer.py --seconds 20 [--targets update sums] [--seed 1] [--inputs 1000000]
"""

import argparse
import gc
import hashlib
import resource
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

import file_targets
import message_targets
import settings_targets
from fuzz_target import Target

CORPUS = Path(__file__).parent / "corpus"
TARGETS: dict[str, type[Target]] = {
    each.name: each
    for each in (
        message_targets.UpdateTarget,
        message_targets.SumsTarget,
        message_targets.IntroductionTarget,
        message_targets.ReadingsTarget,
        message_targets.BroadcastTarget,
        file_targets.RecordsTarget,
        file_targets.JsonFilesTarget,
        file_targets.CheckpointTarget,
        file_targets.NpzTarget,
        *settings_targets.TARGETS,
    )
}


@dataclass
class Outcome:
    """What came of fuzzing a target."""

    tried: int = 0
    taken: int = 0
    """Inputs that were not refused."""
    seconds: float = 0.0
    faults: dict[str, str] = field(default_factory=dict)
    """The last line of each kind of fault, by where it happened."""


def fuzz(
    target: Target, seed: int, seconds: float, most: int | None, *, keep: bool = True
) -> Outcome:
    """Try inputs until the time or their number is up; `keep` those that fail in the corpus."""
    outcome, begun = Outcome(), time.monotonic()
    while outcome.seconds < seconds and (most is None or outcome.tried < most):
        # Each input by itself, so that any can be made again from its number.
        made = target.make(Random(f"{target.name}/{seed}/{outcome.tried}"))
        outcome.tried += 1
        try:
            outcome.taken += target.runs(made)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
            if kind not in outcome.faults:
                outcome.faults[kind] = str(error)[:100]
                if keep:
                    save(target, made)
        outcome.seconds = time.monotonic() - begun
    return outcome


def save(target: Target, made: object) -> None:
    """Keep an input that once failed: the tests try it again."""
    content = target.to_bytes(made)
    name = hashlib.sha256(content).hexdigest()[:12]
    folder = CORPUS / target.name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def main(words: Sequence[str] | None = None) -> int:
    """Fuzz the targets one after the other and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20, help="for each target")
    parser.add_argument("--inputs", type=int, help="for each target, if that is less")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=list(TARGETS))
    arguments = parser.parse_args(words)
    print(f"seed {arguments.seed}\n")
    print(f"{'target':<14}{'inputs':>10}{'taken':>10}{'per second':>12}{'faults':>8}{'peak MB':>9}")
    failed = False
    for name in arguments.targets:
        target = TARGETS[name]()
        outcome = fuzz(target, arguments.seed, arguments.seconds, arguments.inputs)
        rate = outcome.tried / outcome.seconds
        print(
            f"{name:<14}{outcome.tried:>10,}{outcome.taken:>10,}{rate:>12,.0f}"
            f"{len(outcome.faults):>8}{peak_megabytes():>9,.0f}",
            flush=True,
        )
        for kind, text in outcome.faults.items():
            failed = True
            print(f"    {kind}: {text}")
        del target
        gc.collect()
    return 1 if failed else 0


def peak_megabytes() -> float:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
