"""What methods declare: one record, completed by hyperparameters, and what a subclass has of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import pytest

import holdfast as hf
from holdfast.contract import Capabilities
from holdfast.contract.method import BEFORE
from tests.support.contract_keepers import Right, RightServer


def test_a_class_without_a_record_promises_nothing():
    assert Right.declared == Capabilities()
    assert Right().capabilities is Right.declared


def test_a_subclass_keeps_what_its_base_needs_and_promises_again_what_it_may_break():
    class Heir(hf.FedDyn):
        pass

    base = hf.FedDyn.declared
    assert (base.uses_solver, base.late_clients, base.unequal_steps, base.columnwise) == (True,) * 4
    assert Heir.declared == replace(base, late_clients=False, columnwise=False, unequal_steps=HEIRS_STEPS)
    with pytest.raises(hf.HoldfastError, match="one number for all nodes, as it is not known where"):
        Heir(alpha=0.1, lr=0.1, local_steps=[1, 2])


HEIRS_STEPS = "it is not known where the method ends if they differ"


def test_a_subclass_that_declares_is_taken_at_its_word():
    class Heir(hf.FedAvg):
        declared = Capabilities(unequal_steps=True)

    heir = Heir(lr=0.1, local_steps=[1, 2])
    assert heir.capabilities.unequal_steps is True
    assert heir.capabilities.needs_exact_sums
    assert heir.capabilities.clippable, "completed by FedAvg, from its hyperparameters"
    assert not Heir(lr=0.1, normalize=True).capabilities.clippable


def test_hyperparameters_complete_the_record():
    assert not hf.LocalGECL(lr=0.1).capabilities.sends_gradients
    assert hf.LocalGECL(lr=0.1, warm_start_rounds=1).capabilities.sends_gradients
    assert hf.LED(lr=0.1, share=0.5).capabilities.integrates_twice == 0.5
    why = hf.FedProx(lr=0.1, reduced=True).capabilities.unequal_steps
    assert why == "SARAH's steps are not counted by node"


@pytest.mark.parametrize("name", BEFORE)
def test_a_class_with_an_attribute_of_before_is_refused_with_what_to_write(name: str):
    with pytest.raises(
        hf.HoldfastError, match=rf"^Own\.{name}: .* write declared = Capabilities\("
    ) as raised:
        type("Own", (hf.Algorithm,), {name: True})
    written = str(raised.value).rsplit("write ", 1)[1]
    namespace: dict[str, Any] = {"Capabilities": Capabilities}
    exec(written, namespace)  # what it says to write works
    assert namespace["declared"] != Capabilities()


def test_a_property_of_before_is_refused_with_what_to_write():
    with pytest.raises(hf.HoldfastError, match=r"Own.sends_gradients: .* replace\(self.declared, sends"):

        class Own(Right):
            @property
            def sends_gradients(self) -> bool:
                return True


def test_annotations_of_before_are_refused_and_hyperparameters_may_have_these_names():
    with pytest.raises(hf.HoldfastError, match=r"Own.columnwise: .* Capabilities\(columnwise=True\)"):

        class Own(Right):
            columnwise: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Other(Right):
        answers: int = 3

    assert Other(answers=4).answers == 4


def test_functions_of_before_are_refused_by_their_new_names():
    with pytest.raises(hf.HoldfastError, match=r"Own\.settle: .* called `finish` now; rename it"):
        type("Own", (RightServer,), {"settle": lambda self, s, sent, answer, oracle: s})
    with pytest.raises(hf.HoldfastError, match=r"Own.allows_cohorts: .* leave it out"):
        type("Own", (RightServer,), {"allows_cohorts": True})


def test_unequal_steps_that_are_neither_true_nor_a_reason():
    with pytest.raises(hf.HoldfastError, match="expected True, or a text that says why not, got False"):
        Capabilities(unequal_steps=False)


def test_every_field_had_a_name_before():
    today = {field.name for field in fields(Capabilities)}
    assert {written.split("=")[0] for written in BEFORE.values()} == today
