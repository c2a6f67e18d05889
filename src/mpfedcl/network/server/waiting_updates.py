"""Updates that wait to be folded, in files and not in memory.

Updates are folded in the order of names, whatever their arrival, and in the first round no bound is
known before all have come. So any number may wait at a time.
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile

from safetensors.torch import load_file

from mpfedcl.core.tensors import pack_tensors
from mpfedcl.methods.messages import StackMember, Update

LEAST_BYTES = 2**20
"""Of the tensors of an update that is worth a file."""


def keep_in_file(update: Update, folder: Path | None) -> Update:
    """Return an update whose averaged tensors are pages of a file; without a folder, as it is.

    The file has no name any more when this returns, and is gone with the tensors.
    """
    tensors = update.averaged
    assert not isinstance(tensors, StackMember)
    if folder is None or tensors is None or any(each.is_cuda for each in tensors.values()):
        return update
    if sum(each.nbytes for each in tensors.values()) < LEAST_BYTES:
        return update
    # Where the disk is full there is still memory.
    with contextlib.suppress(OSError), NamedTemporaryFile(dir=folder, prefix=".update-") as file:
        file.write(pack_tensors(tensors))
        file.flush()
        return replace(update, averaged=load_file(file.name))
    return update
