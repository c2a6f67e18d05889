"""The client of the Flower peer; a module of its own, so that Ray's actors import it once."""

import os

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from work import BATCH_SIZE, LEARNING_RATE, MOMENTUM, Mlp, load_data

app = ClientApp()
_loaders: dict[int, DataLoader[tuple[torch.Tensor, ...]]] = {}
"""Kept while the actor lives."""


def _loader(client: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return a client's batches, made when first asked for."""
    if client not in _loaders:
        data = load_data(os.environ["PEERS_DATA"])
        images = TensorDataset(data.x[client], data.y[client])
        _loaders[client] = DataLoader(images, batch_size=BATCH_SIZE, shuffle=True)
    return _loaders[client]


@app.train()  # type: ignore[untyped-decorator, unused-ignore]
def train(message: Message, context: Context) -> Message:
    """Train for an epoch from the weights in the message."""
    torch.set_num_threads(int(os.environ["PEERS_THREADS"]))
    model = Mlp()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    loader = _loader(int(context.node_config["partition-id"]))
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
    reply = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(loader.dataset)}),  # type: ignore[arg-type]
        }
    )
    return Message(content=reply, reply_to=message)
