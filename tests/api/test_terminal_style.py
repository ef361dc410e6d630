"""How a text report is drawn: for a terminal in its width and colours, else plain."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trine.commands._runs import terminal_style


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "70")
    return monkeypatch


def test_a_terminal_has_its_own_width_and_colours(terminal: pytest.MonkeyPatch) -> None:
    assert terminal_style(None) == (True, 70)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_turned_off(terminal: pytest.MonkeyPatch, name: str, value: str) -> None:
    terminal.setenv(name, value)
    assert terminal_style(None) == (False, 70)


def test_a_file_and_a_pipe_are_plain(terminal: pytest.MonkeyPatch) -> None:
    assert terminal_style(Path("report.txt")) == (False, 100)
    terminal.setattr(sys.stdout, "isatty", lambda: False)
    assert terminal_style(None, 90) == (False, 90)
