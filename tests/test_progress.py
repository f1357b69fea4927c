"""Progress: silent about what is quick, one line for what is not."""

from __future__ import annotations

from io import StringIO

import pytest

from autopar.progress import Terminal


class Screen(StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _search(progress: Terminal, clock: Clock, seconds: float) -> None:
    with progress:
        progress.phase("capture")
        clock.now += 0.5
        progress.phase("search")
        clock.now += seconds
        progress.update(best_s=0.25, gap=0.031, done=3, total=12)


def test_quick_phases_say_nothing(clock: Clock):
    stream = Screen()

    _search(Terminal(stream, clock), clock, 0.9)

    assert stream.getvalue() == ""


def test_without_a_terminal_a_slow_phase_is_one_line(clock: Clock):
    stream = StringIO()

    _search(Terminal(stream, clock), clock, 2.0)

    assert stream.getvalue() == "autopar: search 2.0 s  3/12, best 250 ms a step, gap 3.1%\n"


def test_on_a_terminal_the_line_is_redrawn(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Screen()

    _search(Terminal(stream, clock), clock, 2.0)

    assert stream.getvalue().startswith("\r\x1b[K\x1b[2mautopar: search 2.0 s  3/12")
    assert stream.getvalue().endswith(
        "\r\x1b[K\x1b[2mautopar: search 2.0 s  3/12, best 250 ms a step, gap 3.1%\x1b[0m\n"
    )


def test_no_color_is_honoured(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Screen()

    _search(Terminal(stream, clock), clock, 2.0)

    assert "\x1b[2m" not in stream.getvalue()


def test_an_error_leaves_the_phase_it_came_from(clock: Clock):
    stream = StringIO()

    def stopped() -> None:
        with Terminal(stream, clock) as progress:
            progress.phase("search")
            clock.now += 5
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()

    assert stream.getvalue() == "autopar: search 5.0 s\n"
