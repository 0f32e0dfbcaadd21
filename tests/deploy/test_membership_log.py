"""What a member writes down about membership, and what it makes of files that are not as it wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import NodeConfig
from holdfast_deploy.membership.ledger import Ledger, read_decisions
from holdfast_deploy.membership.roster import Roster

# As version 0.1 wrote it, which called rosters epochs.
EPOCHS = (
    '{"incarnation":"00112233445566aa","registered":true,"known":{"b":"00112233445566bb"},"epoch":0,'
    '"vote":{"number":1,"promised":[0,""],"ballot":[0,""],"value":null},"order":null}\n'
)


def test_a_folder_of_an_earlier_version_is_refused_in_a_line_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    path.write_text(EPOCHS)
    for open_folder in (
        read_decisions,
        lambda folder: Ledger(folder, Roster(number=0, first=0, nodes=[NodeConfig(name="a")])),
    ):
        with pytest.raises(HoldfastError, match="was written by an earlier version of holdfast: finish"):
            open_folder(tmp_path)
    assert path.read_text() == EPOCHS
