"""A headless Chromium, driven through its DevTools protocol: https://chromedevtools.github.io/devtools-protocol"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1360, 850  # pixels
ANSWER_TIMEOUT_S = 60.0
TEXT_TIMEOUT_S = 90.0
CLICK_TIMEOUT_S = 5.0  # until a click counts as missed
SETTLE_S = 1.5  # for charts that are drawn with a flourish

TEXT = """(() => {
  const texts = [document.body.innerText];
  for (const field of document.querySelectorAll("input, textarea")) texts.push(field.value, field.placeholder);
  for (const frame of document.querySelectorAll("iframe")) texts.push(frame.contentDocument?.body?.innerText);
  return texts.join("\\n");
})()"""
CLICK = """(text => {
  const fits = node => node.innerText?.trim() === text && node.offsetParent !== null;
  const found = [...document.querySelectorAll("a, button, [role], label, li, span, div")].filter(fits);
  const one = found.find(node => !found.some(other => other !== node && node.contains(other))) ?? found[0];
  one?.scrollIntoView({block: "center"});
  const box = one?.getBoundingClientRect();
  return box && [box.x + box.width / 2, box.y + box.height / 2];
})(%s)"""
FOCUS = """(text => {
  const one = document.querySelector(`input[placeholder="${text}"]`);
  one?.focus();
  return Boolean(one);
})(%s)"""
SCROLL = """(text => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode())
    if (walk.currentNode.textContent.includes(text)) {
      walk.currentNode.parentElement.style.scrollMarginTop = "24px";
      walk.currentNode.parentElement.scrollIntoView({block: "start"});
      return true;
    }
  return false;
})(%s)"""


class Missing(AssertionError):
    """A page lacks a text or an element."""


class Page:
    """One tab."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._numbers = connection, itertools.count(1)
        self.do("Page.enable")
        self.size(WIDTH, HEIGHT)

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The browser's result of one command."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._connection.recv(timeout=ANSWER_TIMEOUT_S))
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def size(self, width: int, height: int) -> None:
        """Sets the size of the window in pixels."""
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return self.do("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def open(self, url: str, *texts: str) -> None:
        """Opens the address and waits for all texts. Raises Missing if one does not appear."""
        self.do("Page.navigate", url="about:blank")  # an address that differs behind `#` alone loads nothing
        self.do("Page.navigate", url=url)
        self.wait_for(*texts)

    def wait_for(self, *texts: str, timeout_s: float = TEXT_TIMEOUT_S) -> None:
        """Waits until the page shows all texts, wherever its lines break. Raises Missing if one does not appear."""
        deadline = time.monotonic() + timeout_s
        while missing := [text for text in texts if _one_line(text) not in (shown := _one_line(str(self.run(TEXT))))]:
            if time.monotonic() > deadline:
                raise Missing(f"{self.run('location.href')} does not show {missing}; it shows: {shown[:3000]}")
            time.sleep(0.3)

    def click(self, text: str, *texts: str) -> None:
        """Clicks the element with exactly this text, and again until the page shows all `texts`: a click misses if the
        layout moves under it. Raises Missing if there is no such element, or no click shows the texts."""
        deadline = time.monotonic() + TEXT_TIMEOUT_S
        while True:
            x, y = self._until(CLICK, text)
            for kind in ("mousePressed", "mouseReleased"):  # some parts of a page ignore a script's click
                self.do("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
            try:
                return self.wait_for(*texts, timeout_s=CLICK_TIMEOUT_S)
            except Missing:
                if time.monotonic() > deadline:
                    raise

    def type(self, placeholder: str, text: str) -> None:
        """Types into the field with this placeholder. Raises Missing if there is none."""
        self._until(FOCUS, placeholder)
        self.do("Input.insertText", text=text)

    def scroll_to(self, text: str) -> None:
        """Scrolls until the first text node that contains `text` is at the top. Raises Missing if there is none."""
        self._until(SCROLL, text)

    def _until(self, script: str, text: str) -> Any:
        deadline = time.monotonic() + TEXT_TIMEOUT_S
        while not (found := self.run(script % json.dumps(text))):
            if time.monotonic() > deadline:
                raise Missing(f"{self.run('location.href')} has nothing called {text!r}")
            time.sleep(0.3)
        return found

    def picture(self, file: Path) -> None:
        """Saves a screenshot of the window as a .png or .webp file."""
        time.sleep(SETTLE_S)
        kind = file.suffix.removeprefix(".")
        quality = {"quality": 80} if kind == "webp" else {}
        taken = self.do("Page.captureScreenshot", format=kind, **quality)
        file.write_bytes(base64.b64decode(taken["data"]))


def _one_line(text: str) -> str:
    return " ".join(text.split())


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A tab of a browser with an empty profile. Raises FileNotFoundError if no Chromium is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise FileNotFoundError("no Chromium is installed: on Debian and Ubuntu, apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        argv = [program, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
        argv += ["--no-first-run", "--hide-scrollbars", "--disable-gpu", "--disable-dev-shm-usage"]
        argv += ["--no-sandbox"] if os.geteuid() == 0 else []  # as root it has none
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        try:
            with connect(_tab(Path(profile) / "DevToolsActivePort"), max_size=None) as connection:
                yield Page(connection)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tab(port_file: Path) -> str:
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while not port_file.is_file() or not port_file.read_text().strip():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Chromium has not started within {ANSWER_TIMEOUT_S:g} s")
        time.sleep(0.1)
    request = urllib.request.Request(f"http://127.0.0.1:{port_file.read_text().split()[0]}/json/new", method="PUT")
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
        return str(json.load(answer)["webSocketDebuggerUrl"])
