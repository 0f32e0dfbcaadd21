"""The Python interface: what ``import holdfast as hf`` offers for running methods and looking at results."""

from holdfast.api.comparing import Comparison as Comparison
from holdfast.api.comparing import compare as compare
from holdfast.api.minimizing import minimize as minimize
from holdfast.api.results import History as History
from holdfast.api.results import MinimizeResult as MinimizeResult
from holdfast.api.results import TrainResult as TrainResult
from holdfast.api.results import load_result as load_result
from holdfast.api.training import train as train
from holdfast.api.tuning import Tuning as Tuning
from holdfast.api.tuning import tune as tune
from holdfast.experiments.choices import as_network as as_network
