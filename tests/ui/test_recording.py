"""The recording of a terminal on the first page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.test_data_pages import BLOCK
from tests.test_followed_pages import TUTORIAL, without_figures
from tests.ui.recording import COLUMNS, COMMANDS, PICTURE, Screen, draw

SVG = "{http://www.w3.org/2000/svg}"


def shown(picture: str) -> list[str]:
    """The texts of the picture, from top to bottom."""
    texts = ["".join(text.itertext()) for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    return [text for text in texts if text.strip()]


def test_the_recording_shows_the_commands_of_the_tutorial_and_their_output() -> None:
    rows = shown(PICTURE.read_text())
    text = "".join(row if len(row) == COLUMNS else f"{row}\n" for row in rows).replace("\xa0", " ")
    recorded = set(without_figures(re.sub(r"^\$ ", "", text, flags=re.MULTILINE)))
    tutorial: dict[str, str] = {}
    for block in BLOCK.finditer(TUTORIAL.read_text()):
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block[3], re.MULTILINE):
            tutorial.setdefault(command, output)
    for command in COMMANDS:
        lines = set(without_figures(f"{command}\n{tutorial[command]}")) - {""}
        assert lines - recorded == set()


def test_a_line_that_is_drawn_again_is_recorded_as_it_was_at_last_and_appears_then() -> None:
    screen = Screen()
    screen.write("$ run\r\n", 0.0)
    screen.write("  fit 1/2\r\n  gate waiting", 1.0)
    screen.write("\r\x1b[2K\x1b[1A\x1b[2K\x1b[1", 2.0)  # the rest of the sequence comes later
    screen.write("m  fit\x1b[0m ran\r\n  gate ran\r\n", 2.1)
    assert screen.lines == ["$ run", "  fit ran", "  gate ran", ""]
    assert screen.since == [0.0, 2.1, 2.1, 2.1]


def test_a_long_line_is_broken_where_a_terminal_breaks_it_and_each_part_appears_with_it() -> None:
    screen = Screen()
    screen.write("$ run\r\n", 0.0)
    screen.write("x" * (COLUMNS + 2) + "\r\n<&>", 0.25)
    picture = draw(screen)
    assert shown(picture) == ["$\xa0run", "x" * COLUMNS, "xx", "<&>"]
    delays = re.findall(r"r-line-(\d)\)\"\] \{ animation-delay: ([\d.]+)s", picture)
    assert delays == [("0", "0.00"), ("1", "0.25"), ("2", "0.25"), ("3", "0.25")]
