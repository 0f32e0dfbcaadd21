"""The papers' models: ordinary ``torch.nn.Module``s, chosen by name or made by calling the factory."""

from holdfast.models.base import MODELS
from holdfast.models.cnn import dspodfl_cnn, femnist_cnn, lenet, netfleet_cnn
from holdfast.models.dense import linear, mlp
from holdfast.models.drawing import CountedDropout, may_draw
from holdfast.models.dropout import Dropout, dropout_keys
from holdfast.models.load import import_model, load_model
from holdfast.models.resnet import resnet18

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
