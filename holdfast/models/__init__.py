"""The papers' models: ordinary ``torch.nn.Module``s, chosen by name or made by calling the factory."""

from holdfast.models.base import MODELS, import_model, load_model
from holdfast.models.dropout import CountedDropout, Dropout, dropout_keys, may_draw
from holdfast.models.networks import dspodfl_cnn, femnist_cnn, lenet, linear, mlp, netfleet_cnn, resnet18

__all__ = [
    "MODELS",
    "CountedDropout",
    "Dropout",
    "dropout_keys",
    "dspodfl_cnn",
    "femnist_cnn",
    "import_model",
    "lenet",
    "linear",
    "load_model",
    "may_draw",
    "mlp",
    "netfleet_cnn",
    "resnet18",
]
