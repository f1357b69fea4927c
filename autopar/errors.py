"""What a user can cause to go wrong, by kind; each kind has one exit code.

Messages say what is wrong with the numbers, where, and what to do about it.
They are built by small functions that *return* the exception, so that their
text is tested without running what raises them.
"""

from __future__ import annotations


class AutoparError(Exception):
    """Base of every error that a user can cause; `exit_code` is the command line's."""

    exit_code = 2


class UsageError(AutoparError):
    """A flag, option, model reference, cluster file or plan file is wrong."""


class InfeasibleError(AutoparError):
    """No plan satisfies the memory budget and the constraints."""

    exit_code = 3


class CaptureError(AutoparError):
    """The model cannot be captured as one static graph."""

    exit_code = 4


class UnknownOperatorError(AutoparError):
    """`--strict` met operators that have no sharding rule."""

    exit_code = 4


class StalePlanError(AutoparError):
    """A plan was made for another model, cluster, torch or world size."""

    exit_code = 5


class InputMismatchError(AutoparError):
    """A call of the compiled module does not match what was planned."""


class ArgumentsDifferError(InputMismatchError):
    """A call has arguments that the planned one lacks, or lacks some that it has."""


class NotFiniteError(AutoparError):
    """Values that forward asks about are not finite, and the branch for those is no part of the captured program."""


class RanksDisagreeError(AutoparError):
    """Ranks hold different plans or programs; all of them stop."""

    exit_code = 5


class ScheduleError(AutoparError):
    """A pipeline schedule cannot run: actions missing or doubled, ranks waiting for one another, too little memory."""
