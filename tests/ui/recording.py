"""A recording of the tutorial's commands in a terminal: tests/ui/pictures/terminal.svg, for the first page.

    python -m tests.ui.recording

The commands run in an empty folder. Their lines appear in the picture as they did in the terminal; waits are shortened.
"""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.fork_server import search_path_of_shell
from tests.servers import closed_port
from tests.test_data_pages import BLOCK

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "tests/ui/pictures/terminal.svg"
TUTORIAL = ROOT / "docs/tutorial.md"
COMMANDS = (
    "finetune init mails.csv --model scratch --yes",
    "finetune run deployments/mails.yaml",
    "finetune serve mails",
    'curl http://127.0.0.1:8000/predict -H "Authorization: Bearer $(cat .finetune/services/serve.token)"'
    """ -d '{"rows": [{"mail": "Where is my parcel?"}]}'""",
)
COLUMNS, LINES = 108, 50
OF_OTHER_HOMES = ("FINETUNE_HOME", "PREFECT_API_URL", "MLFLOW_TRACKING_URI")
LONGEST_WAIT_S = 0.5  # between two lines of the picture

# Control sequences of rich's live displays, and one that is incomplete at the end of what was read.
CONTROL = re.compile(r"(\r|\n|\x1b\[[0-9;?]*[A-Za-z])")
INCOMPLETE = re.compile(r"\x1b[^A-Za-z]*$")

# The variables are those of rich's `export_svg`. No font comes from the network.
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px "DejaVu Sans Mono", Menlo, Consolas, monospace }}
.{unique_id}-matrix text {{ animation: appear 1ms backwards }}
.{unique_id}-title {{ font: bold 18px sans-serif }}
@keyframes appear {{ from {{ opacity: 0 }} }}
DELAYS
@media (prefers-reduced-motion: reduce) {{ .{unique_id}-matrix text {{ animation: none }} }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class Screen:
    """The lines of a terminal, and when each of them became what it is."""

    def __init__(self) -> None:
        self.lines, self.since = [""], [0.0]
        self._row, self._is_at_start, self._rest = 0, True, ""

    def write(self, text: str, now: float) -> None:
        """Executes the text as a terminal does, but for colours and the width."""
        text = self._rest + text
        cut = INCOMPLETE.search(text)
        self._rest = cut[0] if cut else ""
        for part in CONTROL.split(text.removesuffix(self._rest)):
            if part == "\n":
                self._row += 1
                if self._row == len(self.lines):
                    self.lines.append("")
                    self.since.append(now)
            elif part == "\r":
                self._is_at_start = True
            elif part.startswith("\x1b["):
                if part[-1] == "A":
                    self._row -= int(part[2:-1] or 1)
                elif part[-1] == "K":
                    self._put("", now)
            elif part:
                self._put(part if self._is_at_start else self.lines[self._row] + part, now)

    def _put(self, line: str, now: float) -> None:
        self.lines[self._row], self.since[self._row], self._is_at_start = line, now, not line


def run_in_terminal(command: str, screen: Screen, folder: Path, until: str = "") -> subprocess.Popen[bytes]:
    """Types the command, and waits for its end, or for a line that begins so. Raises CalledProcessError if it fails."""
    begin = time.monotonic() - screen.since[-1]
    screen.write(f"$ {command}\r\n", screen.since[-1])
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in OF_OTHER_HOMES}
    env |= {"TERM": "xterm", "PATH": search_path_of_shell()}
    words = ["sh", "-c", f"exec {command}"]
    child = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=env)
    os.close(theirs)
    decoder = codecs.getincrementaldecoder("utf-8")()
    while more := _read(ours):
        screen.write(decoder.decode(more), time.monotonic() - begin)
        if until and any(line.startswith(until) for line in screen.lines[:-1]):
            return child
    os.close(ours)
    if child.wait():
        raise subprocess.CalledProcessError(child.returncode, command, "\n".join(screen.lines))
    return child


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # on Linux, when the other end is closed
        return b""


def draw(screen: Screen) -> str:
    """The SVG picture of the screen, in which each line appears at its time."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    shown_at_s = [0.0]
    for before, now in pairwise(screen.since):
        shown_at_s.append(shown_at_s[-1] + min(LONGEST_WAIT_S, max(0.0, now - before)))
    delays, row = [], 0
    for line, at_s in zip(screen.lines, shown_at_s, strict=True):
        for start in range(0, max(1, len(line)), COLUMNS):  # a terminal breaks lines anywhere
            console.print(Text(line[start : start + COLUMNS], "bold green" if line.startswith("$ ") else ""))
            delays.append(f'[clip-path="url(#r-line-{row})"] {{{{ animation-delay: {at_s:.2f}s }}}}')
            row += 1
    console.print()
    return console.export_svg(title="", unique_id="r", code_format=FORMAT.replace("DELAYS", "\n".join(delays)))


def main() -> None:
    """Records the commands, and writes the picture."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder, screen = Path(made), Screen()
        for block in BLOCK.finditer(TUTORIAL.read_text()):
            if block[2] == "file make_mails.py":
                subprocess.run([sys.executable, "-c", block[3]], cwd=folder, check=True)
        init, run, serve, ask = COMMANDS
        run_in_terminal(init, screen, folder)
        run_in_terminal(run, screen, folder)
        port = closed_port()
        server = run_in_terminal(f"{serve} --port {port}", screen, folder, until="  -d '{")
        try:
            run_in_terminal(ask.replace(":8000", f":{port}"), screen, folder)
        finally:
            server.terminate()
            server.wait()
        for shown, meant in ((f"{folder}/", ""), (f" --port {port}", ""), (f":{port}", ":8000")):
            screen.lines = [line.replace(shown, meant) for line in screen.lines]
        while not screen.lines[-1]:
            screen.lines.pop(), screen.since.pop()
    PICTURE.write_text(draw(screen))


if __name__ == "__main__":
    main()
