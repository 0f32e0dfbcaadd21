"""Real data that come with scikit-learn. Their test split (20 %, stratified) is always the same."""

from __future__ import annotations

import numpy as np

from holdfast.data.arrays import as_samples, as_targets
from holdfast.data.dataset import DATASETS, Dataset


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
