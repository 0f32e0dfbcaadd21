from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.core.errors import HoldfastError
from holdfast.data import DATASETS, Dataset, prepare
from holdfast.data.builtin import breast_cancer, digits, penalised_logistic, quadratics

# --- Dataset and prepare


def test_prepare_scales_pixels_and_leaves_plain_floats_alone() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(prepare(pixels, 0.0, 1.0), torch.tensor([0.0, 0.2, 1.0]))
    # exact at both ends: 0/127.5 - 1 and 255/127.5 - 1
    assert prepare(pixels, 0.5, 0.5)[[0, 2]].tolist() == [-1.0, 1.0]
    assert prepare(pixels, 0.5, 0.5, torch.float64)[1].item() == pytest.approx(-0.6, abs=1e-15)
    floats = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert prepare(floats, 1.0, 2.0, torch.float64).tolist() == [0.0, 1.0]
    assert prepare(floats, 0.0, 1.0, torch.float64) is floats


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": torch.tensor([0, 1])}, "x_train has 3, y_train has 2"),
        ({"y_train": torch.tensor([0, 5, 1])}, "y_train: label 5 of sample 1 is out of range; expected 0..1"),
        ({"y_train": torch.tensor([0, -1, 1])}, "class label -1 is negative"),
        ({"y_train": torch.tensor([0.0, 1.0, 1.0])}, "expected integer class labels"),
        ({"classes": None}, "expected float targets"),
        ({"classes": 0}, "classes: should be greater than or equal to 1"),
        (
            {"x_train": torch.tensor([[1.0], [torch.nan], [0.0]])},
            "x_train: sample 1 has a value that is not finite",
        ),
        ({"x_test": torch.tensor([[torch.inf]])}, "x_test: sample 0"),
        ({"x_train": torch.zeros(3, 1, dtype=torch.int32)}, "samples are int32; convert"),
        ({"x_train": torch.zeros(0, 1), "y_train": torch.zeros(0, dtype=torch.int64)}, "no training sample"),
        ({"x_test": torch.zeros(1, 2)}, "x_test: samples are torch.float32 [2]"),
        ({"groups": torch.tensor([0, 1])}, "groups has 2"),
        ({"groups": torch.tensor([0.0, 1.0, 2.0])}, "groups: expected one integer per sample"),
        ({"std": 0.0}, "std: should be greater than 0"),
        ({"mean": float("nan")}, "mean: should be a finite number"),
    ],
)
def test_dataset_rejects_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "x_train": torch.zeros(3, 1),
        "y_train": torch.tensor([0, 1, 1]),
        "x_test": torch.zeros(1, 1),
        "y_test": torch.tensor([0]),
        "classes": 2,
    }
    assert Dataset(**good).input_shape == (1,)
    with pytest.raises(HoldfastError) as caught:
        Dataset(**{**good, **changes})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- embedded


def test_digits_are_small_images_with_a_fixed_stratified_test_split() -> None:
    data = digits()
    assert data.x_train.shape == (1437, 1, 8, 8)
    assert data.x_test.shape == (360, 1, 8, 8)
    assert data.x_train.dtype == torch.float32
    assert (data.x_train.min(), data.x_train.max()) == (0, 1)
    assert torch.equal(data.x_train * 16, (data.x_train * 16).round())  # sixteenths
    share = torch.bincount(data.y_test, minlength=10) / torch.bincount(
        torch.cat([data.y_train, data.y_test]), minlength=10
    )
    assert ((share - 0.2).abs() < 1 / 170).all()  # within one sample of 20 % of each class (>= 174 samples)
    assert torch.equal(data.x_test, digits().x_test)


def test_breast_cancer_is_standardised_with_training_statistics() -> None:
    data = breast_cancer()
    assert data.x_train.shape == (455, 30)
    assert data.x_test.shape == (114, 30)
    assert data.classes == 2
    # float32 rounding of 455 values of order 1
    torch.testing.assert_close(data.x_train.double().mean(0), torch.zeros(30).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        data.x_train.double().std(0, correction=0), torch.ones(30).double(), atol=1e-6, rtol=0
    )
    assert data.x_test.mean(0).abs().max() > 1e-3


def test_scikit_learn_is_imported_only_when_needed() -> None:
    code = "import sys, holdfast.data; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- synthetic


def test_quadratics_have_the_spectrum_and_the_optima_they_promise() -> None:
    nodes, dim = 4, 5
    data = quadratics(nodes=nodes, seed=1, dim=dim, mu=0.5, L=5.0, spread=3.0)
    assert data.groups is not None
    assert data.groups.tolist() == [i for i in range(nodes) for _ in range(dim)]
    assert data.x_train.dtype == torch.float64
    assert len(data.x_test) == 0
    hessians, optima = [], []
    for i in range(nodes):
        X, y = (t[data.groups == i].numpy() for t in (data.x_train, data.y_train))
        A = X.T @ X / dim
        eigenvalues = np.linalg.eigvalsh(A)
        assert eigenvalues[0] == pytest.approx(0.5, rel=1e-12)
        assert eigenvalues[-1] == pytest.approx(5.0, rel=1e-12)
        b = np.linalg.solve(X, y)
        x = np.arange(dim) - 1.5
        mean_loss = np.mean((X @ x - y) ** 2) / 2
        assert mean_loss == pytest.approx((x - b) @ A @ (x - b) / 2, rel=1e-12)
        hessians.append(A)
        optima.append(b)
    assert np.linalg.norm(hessians[0] - hessians[1]) > 0.1
    assert 1.5 < np.std(optima) < 5  # 20 draws of 3 N(0, 1)


def test_quadratics_without_spread_share_their_optimum() -> None:
    assert quadratics(nodes=3, seed=0, spread=0).y_train.abs().max() == 0


@pytest.mark.parametrize("heterogeneity", ["weak", "strong"])
def test_penalised_logistic_shapes_and_labels(heterogeneity: Any) -> None:
    data = penalised_logistic(nodes=3, seed=0, heterogeneity=heterogeneity)
    assert data.x_train.shape == (1200, 20)
    assert data.x_train.dtype == torch.float64
    assert (data.x_train[:, -1] == 1).all()
    assert data.x_train[:, :-1].mean().abs() < 0.03  # 22,800 normal draws: 4.5 standard errors
    assert set(data.y_train.tolist()) == {-1.0, 1.0}
    assert data.classes is None


def test_penalised_logistic_labels_follow_a_model_per_node_only_if_strong() -> None:
    def fit_error(heterogeneity: Any, node: int, other: int) -> float:
        """Share of node's labels that the least-squares classifier of ``other`` gets wrong."""
        data = penalised_logistic(nodes=2, seed=3, heterogeneity=heterogeneity)
        X, y = data.x_train.view(2, 400, 20), data.y_train.view(2, 400)
        model = torch.linalg.lstsq(X[other], y[other][:, None]).solution
        return float(((X[node] @ model)[:, 0].sign() != y[node]).double().mean())

    assert fit_error("strong", 0, 0) < 0.1
    assert fit_error("strong", 0, 1) > 0.2
    assert fit_error("weak", 0, 0) > 0.3


def test_synthetic_data_depend_on_the_seed_only() -> None:
    for make in (quadratics, penalised_logistic):
        assert torch.equal(make(nodes=3, seed=5).x_train, make(nodes=3, seed=5).x_train)
        assert not torch.equal(make(nodes=3, seed=5).x_train, make(nodes=3, seed=6).x_train)


def test_synthetic_parameters_are_checked() -> None:
    with pytest.raises(HoldfastError, match="L should be at least mu"):
        quadratics(nodes=3, mu=2.0, L=1.0)
    with pytest.raises(HoldfastError, match=r"'quadratics'\.dim"):
        quadratics(nodes=3, dim=1)
    with pytest.raises(HoldfastError, match="heterogeneity"):
        DATASETS.build("penalised-logistic", {"heterogeneity": "medium"}, nodes=3, seed=0)
    with pytest.raises(HoldfastError, match="unknown key"):
        DATASETS.build("quadratics", {"nodes": 4}, nodes=3, seed=0)


# --- the registry


def test_every_data_set_is_listed_with_a_summary_and_without_the_context() -> None:
    names = (
        "breast-cancer cifar10 csv digits fashion-mnist femnist image-folder image-folders leaf mnist npz "
        "penalised-logistic quadratics"
    )
    assert list(DATASETS) == names.split()
    for name in DATASETS:
        described = DATASETS.describe(name)
        assert described["summary"].endswith(".")
        assert not {"data_dir", "nodes", "seed"} & {option["name"] for option in described["parameters"]}
