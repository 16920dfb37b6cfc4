import io
import sys

import pytest

from cli.load_display import load_display

MIB = 2**20
HIDE_CURSOR, SHOW_CURSOR, CLEAR_LINE = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def say(line):
    sys.stdout.write(f"{line}\n")


def use_terminal(monkeypatch):
    """Return what stands for the terminal; a fixture's would be replaced before the test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return stream


def test_a_terminal_has_a_bar_below_what_is_said(monkeypatch):
    terminal = use_terminal(monkeypatch)

    with load_display(say) as show_loaded:
        show_loaded(0, 0)
        assert terminal.getvalue() == "", "nothing loads yet"
        show_loaded(3 * MIB, 12 * MIB)
        assert "loading weights" in terminal.getvalue()
        assert "3.0/12.0 MiB" in terminal.getvalue()
        line = f"prefill-0 is ready{', 1 of 3' * 20}\n"
        say(line[:-1])
        said = terminal.getvalue().rindex(line)
        assert "3.0/12.0 MiB" in terminal.getvalue()[said:]
        assert terminal.getvalue().rindex(SHOW_CURSOR) > terminal.getvalue().rindex(HIDE_CURSOR)
        show_loaded(12 * MIB, 12 * MIB)
        loaded = terminal.getvalue()

    assert loaded.endswith(CLEAR_LINE)
    assert terminal.getvalue() == loaded
    assert sys.stdout is terminal


def test_a_bar_goes_when_the_start_fails(monkeypatch):
    terminal = use_terminal(monkeypatch)

    def fail():
        with load_display(say) as show_loaded:
            show_loaded(3 * MIB, 12 * MIB)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()

    assert terminal.getvalue().endswith(CLEAR_LINE)
    assert sys.stdout is terminal


def test_errors_that_go_to_a_file_do_not_go_to_the_terminal(monkeypatch):
    terminal = use_terminal(monkeypatch)
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)

    with load_display(say) as show_loaded:
        show_loaded(3 * MIB, 12 * MIB)
        sys.stderr.write("a worker's log line\n")

    assert errors.getvalue() == "a worker's log line\n"
    assert "log line" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("stream", "term"), [(io.StringIO(), "xterm"), (Terminal(), "dumb")], ids=["pipe", "dumb"]
)
def test_elsewhere_a_line_tells_now_and_then(monkeypatch, stream, term):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = []
    now = [0.0]

    with load_display(lines.append, stream=stream, clock=lambda: now[0]) as show_loaded:
        show_loaded(0, 0)
        for at in range(1, 13):
            now[0] = float(at)
            show_loaded(at * MIB, 12 * MIB)

    told = [f"loading weights: {done}.0 MiB of 12.0 MiB" for done in (1, 6, 11)]
    assert (lines, stream.getvalue()) == (told, "")
