"""What methods and optimisers are made of: numbers, checked when given, that may change between rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from holdfast.contract.schedules import NamedSchedule
from holdfast.core.validation import check, check_fields, hints


@dataclass(frozen=True)
class Hyperparameters:
    """Fields are checked when they are given. A ``Rate``, ``Weight`` or ``Chance`` may be a schedule.

    A field may have hyperparameters of its own, as a method's optimiser does: its schedules count, too.
    """

    columnwise: ClassVar[bool] = False  # True: no number depends on how many columns d a row has

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Not inherited: a subclass that overrides a round or an update has to declare it anew.
        cls.columnwise = vars(cls).get("columnwise", False)

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)
        for name, value in vars(self).items():
            if isinstance(value, NamedSchedule):
                for round in value.extremes:  # now, and not in the middle of a run
                    where = f"{type(self).__name__}.{name}: {value!r} at round {round}"
                    check(where, hints(type(self))[name], value(round))

    @property
    def may_be_padded(self) -> bool:
        """Whether zeros may follow the columns of a row: this and all of its parts declare ``columnwise``."""
        parts = [part for part in vars(self).values() if isinstance(part, Hyperparameters)]
        return self.columnwise and all(part.may_be_padded for part in parts)

    def at(self, round: int) -> Self:
        """The same with every schedule evaluated at ``round``."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Hyperparameters):
                if (part := value.at(round)) is not value:
                    changed[name] = part
            elif callable(value):
                where = f"{type(self).__name__}.{name} at round {round}"
                changed[name] = check(where, hints(type(self))[name], value(round))
        if not changed:
            return self
        now = object.__new__(type(self))
        now.__dict__.update(vars(self) | changed)
        return now
