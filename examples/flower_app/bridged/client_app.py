"""The clients: they compute the method's local work, and keep its client state in Flower's context."""

from functools import lru_cache

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from bridged.task import METHODS, OPTIONS, net, samples
from holdfast import flower

app = ClientApp()


@lru_cache(1)
def client(method: str) -> flower.Client:
    return flower.Client(METHODS[method], model=net(), data=own, **OPTIONS)


def own(context: Context) -> tuple[Tensor, Tensor]:
    return samples(flower.partition_id(context), context.run_config["nodes"])


@app.train()
def train(message: Message, context: Context) -> Message:
    return client(context.run_config["method"])(message, context)
