"""`python -m autopar`."""

from autopar.cli import run

run()
