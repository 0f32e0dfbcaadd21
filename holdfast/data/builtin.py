"""Data that need no download: scikit-learn's, and synthetic problems with heterogeneous nodes."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from holdfast.core.errors import HoldfastError
from holdfast.core.memory import require_memory
from holdfast.core.validation import Count, NonNegative, Positive, Seed, check_arguments
from holdfast.data.dataset import DATASETS, Dataset
from holdfast.data.samples import as_owners, as_samples, as_targets

# --- real data that come with scikit-learn. Their test split (20 %, stratified) is always the same ------


@DATASETS.register("digits")
def digits() -> Dataset:
    """Handwritten digits of scikit-learn: 1,797 images 8 x 8, 10 classes; no download."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return _split((x / 16).reshape(-1, 1, 8, 8), y, classes=10, standardise=False)


@DATASETS.register("breast-cancer")
def breast_cancer() -> Dataset:
    """Breast cancer diagnoses of scikit-learn: 569 samples, 30 features, 2 classes; no download."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return _split(x, y, classes=2, standardise=True)


def _split(x: np.ndarray, y: np.ndarray, *, classes: int, standardise: bool) -> Dataset:
    from sklearn.model_selection import train_test_split

    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    if standardise:
        mean, std = x_train.mean(axis=0), x_train.std(axis=0)
        x_train, x_test = (x_train - mean) / std, (x_test - mean) / std
    return Dataset(
        x_train=as_samples("x_train", x_train.astype(np.float32)),
        y_train=as_targets("y_train", y_train),
        x_test=as_samples("x_test", x_test.astype(np.float32)),
        y_test=as_targets("y_test", y_test),
        classes=classes,
    )


# --- synthetic problems with heterogeneous nodes: group i is the data of node i ------------------------


AtLeastTwo = Annotated[int, Field(ge=2)]


@DATASETS.register("quadratics")
def quadratics(
    nodes: Count,
    seed: Seed = 0,
    dim: AtLeastTwo = 6,
    mu: Positive = 0.5,
    L: Positive = 5.0,
    spread: NonNegative = 3.0,
) -> Dataset:
    """Strongly convex quadratics as least squares: another optimum and other axes at every node.

    Node i has f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i) with b_i ~ spread * N(0, I), A_i = Q_i diag(e_i) Q_i^T,
    Q_i uniform over rotations and reflections, e_i log-uniform in [mu, L] with both ends present. It owns
    ``dim`` samples (a, y), and the mean of 1/2 (a^T x - y)^2 over them is exactly f_i.
    """
    check_arguments("dataset 'quadratics'", quadratics, locals())
    if mu > L:
        raise HoldfastError(f"dataset 'quadratics': L should be at least mu = {mu}, got {L}")
    require_memory(f"dataset 'quadratics' with {nodes} nodes and dim = {dim}", 6 * 8 * nodes * dim**2)
    rng = np.random.default_rng(seed)
    gauss = rng.standard_normal((nodes, dim, dim))
    Q, R = np.linalg.qr(gauss)
    Q = Q * np.sign(np.diagonal(R, axis1=1, axis2=2))[:, None, :]  # without the signs Q is not uniform
    inner = np.exp(rng.uniform(np.log(mu), np.log(L), (nodes, dim - 2)))
    e = np.concatenate([np.full((nodes, 1), mu), inner, np.full((nodes, 1), L)], axis=1)
    b = spread * rng.standard_normal((nodes, dim))
    # rows sqrt(dim * e_k) q_k: X^T X / dim = sum_k e_k q_k q_k^T = A
    X = np.sqrt(dim * e)[:, :, None] * Q.transpose(0, 2, 1)
    y = np.einsum("nkd,nd->nk", X, b)
    return _one_group_per_node(X, y)


@DATASETS.register("penalised-logistic")
def penalised_logistic(
    nodes: Count,
    seed: Seed = 0,
    samples: Count = 400,
    dim: AtLeastTwo = 20,
    heterogeneity: Literal["weak", "strong"] = "strong",
) -> Dataset:
    """Binary labels -1/+1 on Gaussian features, as in FedPD's experiments; weak or strong heterogeneity.

    Features are a = (N(0, I), 1) with ``dim`` entries. Weak: labels are fair coins; nodes differ by chance.
    Strong: node i labels by its own model x_i ~ U[-10, 10]^dim, as sign(a^T x_i + N(0, 1)).
    """
    check_arguments("dataset 'penalised-logistic'", penalised_logistic, locals())
    require_memory(
        f"dataset 'penalised-logistic' with {nodes} nodes, samples = {samples} and dim = {dim}",
        3 * 8 * nodes * samples * dim,
    )
    rng = np.random.default_rng(seed)
    a = np.concatenate([rng.standard_normal((nodes, samples, dim - 1)), np.ones((nodes, samples, 1))], axis=2)
    if heterogeneity == "weak":
        score = rng.uniform(-1, 1, (nodes, samples))
    else:
        models = rng.uniform(-10, 10, (nodes, dim))
        score = np.einsum("nsd,nd->ns", a, models) + rng.standard_normal((nodes, samples))
    return _one_group_per_node(a, np.where(score < 0, -1.0, 1.0))


def _one_group_per_node(x: np.ndarray, y: np.ndarray) -> Dataset:
    """x [nodes, samples, dim] and y [nodes, samples] as one float64 data set without test samples."""
    nodes, samples, dim = x.shape
    return Dataset(
        x_train=as_samples("x_train", x.reshape(-1, dim)),
        y_train=as_targets("y_train", y.reshape(-1)),
        x_test=as_samples("x_test", np.empty((0, dim))),
        y_test=as_targets("y_test", np.empty(0)),
        classes=None,
        groups=as_owners("groups", np.repeat(np.arange(nodes), samples)),
    )
