"""Methods of holdfast in apps of Flower: a ``Strategy`` for the server, a ``Client`` for the clients.

Needs the extra ``flower``: pip install 'holdfast[flower]'.
"""

from holdfast.core.errors import HoldfastError

try:
    import flwr.serverapp.strategy  # noqa: F401
except ImportError as error:
    raise HoldfastError(
        f"holdfast.flower needs flwr 1.21 or newer ({error}): pip install 'holdfast[flower]'"
    ) from None

from holdfast.flower.client import Client, partition_id
from holdfast.flower.strategy import Strategy

__all__ = ["Client", "Strategy", "partition_id"]
