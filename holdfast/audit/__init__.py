"""Attacks on the messages and models of an experiment: what others could learn about its samples."""

from holdfast.audit.leakage import Audit, audit
from holdfast.audit.subject import Subject

__all__ = ["Audit", "Subject", "audit"]
