"""A part of a model in a message: only its own numbers, and a bit for each unit that it has."""

from collections.abc import Sequence
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.models.parts import count_bytes, hidden_units, mask_params
from mpfedcl.network.message import Arrays, Message, MessageError


def pack_part(arrays: Arrays, broadcast: Broadcast, client: str, *, is_whole: bool) -> Arrays:
    """Return the arrays of a broadcast as they are sent to a client.

    `is_whole`: it needs the whole model beside, to read what the last round came to.
    """
    units = broadcast.units.get(client)
    if units is None:
        return arrays
    bits = {f"units/{each}": numpy.packbits(mask.cpu().numpy()) for each, mask in units.items()}
    if is_whole:
        return {**arrays, **bits}
    masks = mask_params(broadcast.params, units)
    kept = {n: value[masks[n]].detach().cpu().numpy() for n, value in broadcast.params.items()}
    return {**arrays, **{f"params/{name}": value for name, value in kept.items()}, **bits}


def unpack_part(broadcast: Broadcast, message: Message, client: str, like: Tensors) -> Broadcast:
    """Return a broadcast with a client's part laid out in a model like this, zeros elsewhere."""
    bits = message.tensors("units")
    if not bits:
        return broadcast
    sizes, units = hidden_units(like), dict[str, Tensor]()
    for layer, packed in bits.items():
        size = sizes.get(layer, 0)
        if packed.dtype != torch.uint8 or packed.shape != (-(-size // 8),):
            raise MessageError(f"units of {layer[:80]!r} must be a bit for each of {size}")
        mask = torch.from_numpy(numpy.unpackbits(packed.cpu().numpy(), count=size)).bool()
        units[layer] = mask.to(like[f"{layer}.weight"].device)
    masks = mask_params({name: like[name] for name in broadcast.params if name in like}, units)
    params = {
        name: _lay_out(name, value, masks[name], torch.zeros_like(like[name]))
        if name in masks and value.shape != like[name].shape
        else value
        for name, value in broadcast.params.items()
    }
    return replace(broadcast, params=params, units={client: units})


def count_left_out(broadcast: Broadcast, clients: Sequence[str]) -> int:
    """Return the bytes of what is left out of the parts of these clients."""
    units = sum(count_bytes(broadcast.units.get(client, {})) for client in clients)
    return broadcast.num_bytes * len(clients) + units - broadcast.num_bytes_to(clients)


def pack_part_update(update: Update, broadcast: Broadcast) -> Update:
    """Return an update with the numbers of the client's part alone, laid out flat."""
    masks, averaged = _open_part(update, broadcast)
    if not masks:
        return update
    return replace(
        update, averaged={n: v[masks[n]] if n in masks else v for n, v in averaged.items()}
    )


def unpack_part_update(update: Update, broadcast: Broadcast) -> Update:
    """Return what a client sent of its part with the rest as the server has it."""
    masks, averaged = _open_part(update, broadcast)
    if not masks:
        return update
    sent = {n: value.to(masks[n].device) for n, value in averaged.items() if n in masks}
    filled = {n: _lay_out(n, v, masks[n], broadcast.params[n]) for n, v in sent.items()}
    left_out = sum(int((~masks[name]).sum()) for name in filled)
    return replace(update, averaged={**averaged, **filled}, left_out=left_out)


def _lay_out(name: str, sent: Tensor, mask: Tensor, rest: Tensor) -> Tensor:
    """Return the numbers of a part in their places."""
    wanted = int(mask.sum())
    if sent.shape != (wanted,) or sent.dtype != rest.dtype:
        raise MessageError(
            f"{name[:80]!r} has shape {list(sent.shape)} and type {sent.dtype}; of this part it "
            f"must have {wanted} numbers of {rest.dtype}"
        )
    return rest.masked_scatter(mask, sent)


def _open_part(update: Update, broadcast: Broadcast) -> tuple[Tensors, Tensors]:
    """Return which numbers are the client's and its tensors; nothing where it has no part."""
    units = broadcast.units.get(update.client)
    if units is None or update.averaged is None:
        return {}, {}
    assert not isinstance(update.averaged, StackMember)
    return mask_params(broadcast.params, units), update.averaged
