"""All members of a federation as processes that can be killed and started again."""

from __future__ import annotations

import json
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from chaos_proxy import ChaosProxies
from federation_runs import forked_member, free_ports, write_federation

PATIENCE = 400.0  # seconds; far more than anything in the tests takes


class Members:
    """The members, none of them started; if there are ``proxies``, all connections go through them."""

    def __init__(self, raw: dict[str, Any], folder: Path, proxies: ChaosProxies | None = None) -> None:
        folder.mkdir()
        self.folder = folder
        listeners = raw["node"] if "server" not in raw else [raw["server"]]
        real = dict(zip([m["name"] for m in listeners], free_ports(len(listeners)), strict=True))
        self.listen = {name: f"127.0.0.1:{port}" for name, port in real.items()} if proxies else {}
        if proxies is not None:
            for member in listeners:
                proxies.add(int(member["address"].rpartition(":")[2]), real[member["name"]])
        self.path = write_federation(raw, folder)
        self.nodes = [member["name"] for member in raw["node"]]
        self.names = [*self.nodes, *([raw["server"]["name"]] if "server" in raw else [])]
        self.processes: dict[str, ForkServerProcess] = {}
        self.kills = 0

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()

    def start(self, name: str) -> None:
        self.processes[name] = forked_member(self.path, name, self.listen.get(name))

    def kill(self, name: str) -> None:
        """SIGKILL, in the midst of the run."""
        process = self.processes[name]
        assert process.is_alive(), f"{name} was gone before it could be killed: {self.log(name)[-3:]}"
        process.kill()
        process.join()
        self.kills += 1

    def log(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def rounds(self, name: str) -> int:
        """How far the member called ``name`` has come."""
        return max([entry["round"] for entry in self.log(name) if entry["event"] == "round done"], default=0)

    def wait_for_round(self, number: int) -> None:
        """Until somebody has come so far."""
        until = time.monotonic() + PATIENCE
        while max(map(self.rounds, self.nodes)) < number:
            assert time.monotonic() < until, {name: self.log(name)[-2:] for name in self.names}
            time.sleep(0.02)

    def finish(self) -> None:
        """Waits for all to finish."""
        until = time.monotonic() + PATIENCE
        for name, process in self.processes.items():
            process.join(max(until - time.monotonic(), 0.0))
            assert process.exitcode == 0, (name, process.exitcode, self.log(name)[-3:])
