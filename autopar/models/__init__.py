"""Which model a reference names: a factory in the user's code, an architecture of ours, a transformers config."""

from autopar.models.reference import ModelRef, resolve

__all__ = ["ModelRef", "resolve"]
