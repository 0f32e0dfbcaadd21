"""The columns of ``metrics.csv`` beside the metrics: what a run has cost so far."""

COST_COLUMNS = [
    "payload_bytes",
    "payload_bytes_per_link",
    "gradient_evaluations",
    "sample_gradients",
    "seconds",
]
MEMBER_COLUMNS = ["wire_bytes_sent", "wire_bytes_received", "waiting_seconds"]  # in a deployed federation
DELAY_COLUMNS = ["tau_proc", "tau_trans", "tau_total"]  # where nodes or links are sporadic
SOLVER_COLUMNS = ["value_evaluations", "unfinished_solves"]  # for methods with a local solver
