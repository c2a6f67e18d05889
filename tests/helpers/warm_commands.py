"""Loaded by the process that tests fork commands from: a command has run here already.

What Python, torch, the parser and matplotlib do at their first time is then done for all.
"""

import contextlib
import gc
import io
import os
import tempfile
from pathlib import Path

import torch

from mpfedcl.cli.main import main
from small_experiments import flags, save_images
from unrendered_figures import render

torch.set_num_threads(1)
# Processes are killed here, machines are not.
os.fsync = lambda _: None  # type: ignore[assignment]
with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
    place = Path(folder)
    save_images(place / "images" / "stripes.npz")
    words = ["run", *flags(place / "images", method="dp-fedcl"), "--out", str(place / "run")]
    with contextlib.suppress(SystemExit):
        main(words)
render(pixels=False)
# Loaded modules stay shared between processes: garbage collection would copy their pages.
gc.collect()
gc.freeze()
