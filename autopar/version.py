"""The version of the package, and of the plan file it writes."""

__version__ = "0.1.0"
