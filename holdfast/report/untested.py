"""What is said where a run had no test data, and so no figures on samples it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.experiments.record import RunRecord

REMEDIES = {  # by data set; those that are not here always have test data, or never
    "csv": "name some with test_file in [problem.dataset]",
    "image-folder": "name some with test_folder in [problem.dataset]",
    "image-folders": "name some with test_folder in [problem.dataset]",
    "npz": "add x_test and y_test to the file",
}


def untested(records: Sequence[RunRecord]) -> str:
    """One sentence with the remedy; empty if there are test data, or if nobody would expect them."""
    remedies = list(dict.fromkeys(filter(None, map(_remedy, records))))
    if not remedies:
        return ""
    missing = "There are no test data, so nothing tells how well the models do on new samples"
    return f"{missing}; {' or '.join(remedies)}."


def _remedy(record: RunRecord) -> str | None:
    config, facts = record.config, record.summary["facts"]
    if record.member is not None or facts.get("test_samples") != 0:
        return None
    if config.get("metrics", "default") != "default":  # whoever chose them knows what is there
        return None
    if record.origin is not None:
        return f"give {record.origin} some with test="
    dataset = config.get("problem", {}).get("dataset")
    name = dataset.get("name") if isinstance(dataset, dict) else dataset
    if not isinstance(name, str):
        return None
    if ":" in name:
        return f"{name} can return hf.TrainTest(train, test)"
    return REMEDIES.get(name)
