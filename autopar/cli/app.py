"""The commands, put together."""

from __future__ import annotations

import sys

import typer

from autopar.cli.calibrate import calibrate
from autopar.cli.check import check
from autopar.cli.cluster import app as cluster
from autopar.cli.diff import diff
from autopar.cli.explain import explain
from autopar.cli.plan import plan
from autopar.cli.run import run
from autopar.cli.schema import schema
from autopar.cli.show import show
from autopar.cli.simulate import simulate
from autopar.cli.validate import validate
from autopar.cli.verify import verify
from autopar.errors import UsageError
from autopar.version import __version__

COMPLAINTS: type[Exception] = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")
"""What typer raises about arguments that it cannot read, wherever this version of it keeps that class."""

app = typer.Typer(
    name="autopar",
    help="Plan and run a PyTorch model on a described cluster.",
    epilog="Exit codes: 0 success, 1 findings, 2 usage or file format, 3 infeasible, 4 model cannot be captured, "
    "5 stale, 70 internal error, 130 interrupted.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    _need_command(context)


@cluster.callback(invoke_without_command=True)
def _cluster(context: typer.Context) -> None:
    _need_command(context)


def _need_command(context: typer.Context) -> None:
    """Print the help and end with the status of a wrong usage, where no command is named."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(UsageError.exit_code)


for _command in (plan, show, explain, diff, check, verify, simulate, validate, calibrate, run, schema):
    app.command(name=_command.__name__)(_command)
app.add_typer(cluster, name="cluster")

_parser = typer.main.get_command(app)


def invoke(argv: list[str]) -> int:
    """Run one command and return its exit status.

    Raises:
        AutoparError: what the user can put right.
        COMPLAINTS: arguments that cannot be read.
    """
    try:
        with _parser.make_context("autopar", argv) as context:
            status = _parser.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return int(status or 0)
