"""The server: a strategy of Flower's that runs the server's part of the method."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from bridged.task import METHODS, net
from holdfast import flower

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = flower.Strategy(METHODS[config["method"]], model=net(), nodes=config["nodes"], dtype="float64")
    result = strategy.start(grid, num_rounds=config["rounds"])
    save_file(result.arrays.to_torch_state_dict(), config["output"])
