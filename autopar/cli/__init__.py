"""The command line: parse, call one function, print, exit. One file a command, none of which holds logic."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from autopar.errors import AutoparError

INTERNAL_ERROR = 70
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; texts for people go to stderr, data to stdout.

    0 success; 1 findings; 2 usage, configuration or file format; 3 infeasible; 4 the model cannot be captured;
    5 stale; 70 internal error, with its traceback; 130 interrupted.
    """
    from autopar.cli.app import COMPLAINTS, invoke
    from cost_models.errors import CostModelError

    try:
        status = invoke(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except AutoparError as error:
        return _complain(str(error), error.exit_code)
    except CostModelError as error:
        return _complain(str(error), AutoparError.exit_code)
    except COMPLAINTS as error:
        return _complain(_usage_text(error), AutoparError.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # noqa: BLE001 - whatever it is, the user gets the whole traceback and a status of its own
        traceback.print_exc()
        return _complain(
            "internal error: this is a fault of autopar, and the traceback above shows where", INTERNAL_ERROR
        )
    return status


def run() -> None:
    """Run the command line and exit with its status: the console script."""
    sys.exit(main())


def _complain(text: str, status: int) -> int:
    print(f"autopar: {text}", file=sys.stderr)
    return status


def _usage_text(error: Exception) -> str:
    """Return the complaint of the argument parser in the form of all others."""
    text = str(getattr(error, "format_message", error.__str__)()).strip().rstrip(".")
    text = text[:1].lower() + text[1:]
    context = getattr(error, "ctx", None)
    if context is None:
        return text
    behind = getattr(error, "option_name", None) is not None and context.command_path.endswith(" run")
    more = "; flags of the script go behind --: autopar run PLAN -- SCRIPT ARGS" if behind else ""
    return f"{text}{more} (see {context.command_path} --help)"
