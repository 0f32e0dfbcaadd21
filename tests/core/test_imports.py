"""The modules of ``holdfast`` know one another in one direction only, types and late imports included."""

from pathlib import Path

from test_house import circles

import holdfast


def test_no_module_imports_one_that_imports_it() -> None:
    (folder,) = holdfast.__path__
    assert circles(Path(folder), "holdfast") == []
