"""What others learn about the samples of an experiment: attacks on its own messages and models."""

from holdfast.audit.leakage import Audit, audit
from holdfast.audit.subject import Subject

__all__ = ["Audit", "Subject", "audit"]
