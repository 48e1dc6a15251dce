"""`finetune serve` under load and faults: a classifier and an assistant whose every answer is known.

Clients ask without a pause, each answer is compared with that of the version that it names, and a request may be lost
only in a process that was killed. Meanwhile versions are promoted and rolled back, fail to load, and load and fail;
each of the server's processes is killed; clients are slow, go away, and send bodies of 1 GB; and the disk under
`--record` is full.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from flows.reports.tables import align
from tasks.registry.promotions import promote, roll_back
from tasks.tracking.connection import connect
from tests.drill import full_disk
from tests.drill.promises import require
from tests.flows.served import Server, add_version, register, store_model
from tests.flows.small import command
from tests.machine import Machine, wait_until
from tests.processes import argv
from tests.servers import closed_port
from tests.training.counting import NUMBERS, write_assistant, write_classifier
from training.jobs.processes import descendants

CLIENTS = 6
MOVES, KILLS, SERVER_KILLS, GONE, SLOW = 10, 5, 3, 40, 20
LOADED_WITHIN_S = 180.0
NOTICED_WITHIN_S = 1.0
"""After a kill of the program; a request that comes later waits for the next program."""
GIGABYTE = 10**9
MEMORY_MIB = 150
"""The server's own process may grow by so much: bodies of up to 16 MB are in it while they are read."""
HEAD = ["", "times", "answers", "wrong", "lost", "lost elsewhere than in a killed process"]
SHIFTS = {"1": 1, "2": 4}
"""Of the classifier's versions."""
LENGTHS = {"1": 3, "2": 5}
"""Tokens of an answer, by the assistant's versions."""


class Lost(Exception):
    """A request without an answer."""


class Rows:
    """A classifier of texts."""

    name, task = "rows", "sequence-classification"

    def register(self, folder: Path) -> dict[str, str]:
        """Makes its versions. Returns the numbers of the bad ones."""
        register(write_classifier(folder / "rows-1", SHIFTS["1"]), self.task)
        self._add(folder, "2", SHIFTS["2"])
        broken = {"does not load": add_version("0" * 64, self.task)}
        return broken | {"loads and fails": self._add(folder, "fails", 0, positions=2)}

    def _add(self, folder: Path, name: str, shift: int, **options: Any) -> str:
        key = name.ljust(40, "k")
        return add_version(store_model(write_classifier(folder / name, shift, **options), key), self.task, key)

    def ask(self, client: httpx.Client, draw: random.Random) -> tuple[str, bool]:
        """The version that answers, and whether the answer is its own."""
        texts = [draw.choices(NUMBERS, k=draw.randint(3, 8)) for _ in range(draw.randint(1, 4))]
        rows: list[Any] = [{"talk": " ".join(words)} for words in texts]
        body = answered(client.post("/predict", json={"rows": [*rows, {"talk": 4}]}))
        version = body["model"].rpartition("/")[2]
        expected = [self.expected(words[-1], version) for words in texts]
        found = [record.get("label") for record in body["predictions"]]
        return version, found == [*expected, None] and "holds int" in body["predictions"][-1]["error"]

    def expected(self, word: str, version: str) -> str:
        return NUMBERS[(NUMBERS.index(word) + SHIFTS.get(version, 0)) % len(NUMBERS)]

    def is_right(self, recorded: dict[str, Any]) -> bool:
        version = recorded["served_by"].rpartition("/")[2]
        return bool(recorded["prediction"]["label"] == self.expected(recorded["talk"].split()[-1], version))


class Assistant:
    """A generator, asked for continuations, answers and streams."""

    name, task = "assistant", "sft"

    def register(self, folder: Path) -> dict[str, str]:
        model = write_assistant(folder / "assistant")
        register(model, self.task, max_new_tokens=LENGTHS["1"])
        digest = store_model(model)
        add_version(digest, self.task, max_new_tokens=LENGTHS["2"])
        return {"does not load": add_version("0" * 64, self.task)}

    def ask(self, client: httpx.Client, draw: random.Random) -> tuple[str, bool]:
        word, way = draw.choice(NUMBERS), draw.choice(("text", "chat", "stream"))
        if way == "text":
            body = answered(client.post("/v1/completions", json={"model": "counter", "prompt": word}))
            text = body["choices"][0]["text"]
        else:
            request: dict[str, Any] = {"model": "counter", "messages": [{"role": "user", "content": word}]}
            if way == "chat":
                body = answered(client.post("/v1/chat/completions", json=request))
                text = body["choices"][0]["message"]["content"]
            else:
                response = client.post("/v1/chat/completions", json=request | {"stream": True})
                events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
                if response.status_code == 503 or "error" in response.text:
                    raise Lost(response.text)
                require(response.status_code == 200 and events[-1] == "[DONE]", f"a stream: {response.text}")
                chunks = [json.loads(event) for event in events[:-1]]
                body = chunks[0]
                text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        version = body["model"].rpartition("/")[2]
        return version, text == self.expected(word, version)

    def expected(self, word: str, version: str) -> str:
        place = NUMBERS.index(word) + 1
        return " ".join(NUMBERS[place : place + LENGTHS[version]])

    def is_right(self, recorded: dict[str, Any]) -> bool:
        word = recorded["text"] if "text" in recorded else recorded["talk"][-1]["content"]
        if word == "on":  # of the clients that go away
            return True
        return bool(recorded["prediction"] == self.expected(word, recorded["served_by"].rpartition("/")[2]))


def answered(response: httpx.Response) -> Any:
    """The body of an answer."""
    if response.status_code == 503:
        raise Lost(response.text)
    require(response.status_code == 200, f"{response.status_code}: {response.text[:300]}")
    return response.json()


class Load:
    """Clients that ask without a pause, and what they got."""

    def __init__(self, kind: Rows | Assistant, url: str, token: str) -> None:
        self.answers, self.faults = 0, list[str]()
        self.wrong = 0
        self.versions: Counter[str] = Counter()
        self.lost: list[tuple[float, float, str]] = []
        self._kind, self._url, self._token = kind, url, token
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def more(self, count: int = 3 * CLIENTS) -> None:
        """Waits for more answers."""
        before = self.answers
        wait_until(lambda: self.answers >= before + count or bool(self.faults), LOADED_WITHIN_S)
        require(not self.faults, "; ".join(self.faults[:3]))

    def _ask(self, number: int) -> None:
        draw, login = random.Random(number), {"Authorization": f"Bearer {self._token}"}
        with httpx.Client(base_url=self._url, headers=login, timeout=200, trust_env=False) as client:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    version, right = self._kind.ask(client, draw)
                except (Lost, httpx.TransportError) as error:
                    self.lost.append((began, time.monotonic(), repr(error)))
                    time.sleep(0.1)
                except Exception as error:
                    self.faults.append(repr(error))
                    return
                else:
                    self.answers += 1
                    self.versions[version] += 1
                    self.wrong += not right


class Fire:
    """A served model under load, and the faults that befall it."""

    def __init__(
        self, kind: Rows | Assistant, machine: Machine, disk: full_disk.SmallDisk | None, record: Path
    ) -> None:
        self.table = [HEAD]
        self._kind, self._machine, self._disk = kind, machine, disk
        self._record = disk.seen if disk else record
        self._arguments = ["counter", "--port", str(closed_port()), "--record", str(record)]
        self._command = [*(disk.inside if disk else ()), *command()]
        self._killed: list[tuple[float, float]] = []
        """When a process was killed, and when requests were answered again."""
        self.server = self._start()
        self.load = Load(kind, self.server.url, self.server.token)

    def play(self, broken: dict[str, str]) -> None:
        """All faults, one after another. Raises Broken."""
        self.load.more(200)
        resident = resident_mib(self.server.process.pid)
        with self._row("promoted, and rolled back", 2 * MOVES):
            for _ in range(MOVES):
                promote("counter", "2")
                self._wait_for("2")
                roll_back("counter")
                self._wait_for("1")
        for how, version in broken.items():
            with self._row(f"a version that {how}", 1):
                connect().set_registered_model_alias("counter", "champion", version)
                self._says(f"Version {version} is not loaded")
                self._says("Version 1 goes on answering")
                self.load.more()
                connect().set_registered_model_alias("counter", "champion", "1")
        require(not self.load.versions.keys() - {"1", "2"}, f"bad versions answered: {self.load.versions}")
        for part in ("program", "supervisor"):
            with self._row(f"kill -9: {part}", KILLS):
                for _ in range(KILLS):
                    self._kill(part)
        with self._row("kill -9: server", SERVER_KILLS):
            for _ in range(SERVER_KILLS):
                self._kill_server()
        with self._row("clients that go away", GONE):
            for number in range(GONE):
                go_away(self.server, self._kind, number)
            self.load.more()
        with self._row("bodies byte by byte, which get 408", SLOW):
            self._slow_bodies()
        if isinstance(self._kind, Assistant):
            with self._row("streams read byte by byte", SLOW), contextlib.ExitStack() as slow:
                for _ in range(SLOW):
                    slow.enter_context(slow_stream(self.server))
                promote("counter", "2")
                self._wait_for("2")
                roll_back("counter")
                self._wait_for("1")
        with self._row("bodies of 1 GB, announced and chunked", 4):
            for chunked, with_token in itertools.product((False, True), repeat=2):
                send_gigabyte(self.server, chunked=chunked, with_token=with_token)
            self.load.more()
        self._fill_disk()
        self.load.more()
        grown = resident_mib(self.server.process.pid) - resident
        self._end()
        self.table.append([f"server's memory at its end: {grown:+.0f} MiB", "", "", "", "", ""])
        require(grown < MEMORY_MIB, f"the server has grown by {grown:.0f} MiB")

    @contextlib.contextmanager
    def _row(self, what: str, times: int) -> Iterator[None]:
        """A line of the table: the answers while the block runs."""
        load, kills = self.load, len(self._killed)
        answers, wrong, lost = load.answers, load.wrong, len(load.lost)
        yield
        unexplained = [one for one in load.lost[lost:] if not self._in_kill(*one[:2])]
        counts = [load.answers - answers, load.wrong - wrong, len(load.lost) - lost, len(unexplained)]
        self.table.append([what, str(times), *(f"{count:,}" for count in counts)])
        print("  " + align(self.table)[-1], flush=True)
        require(load.wrong == wrong, f"{what}: {load.wrong - wrong} wrong answers")
        require(not unexplained, f"{what}: requests are lost: {unexplained[:3]}; kills: {self._killed[kills:]}")
        require(not load.faults, f"{what}: {load.faults[:3]}")

    def _in_kill(self, began: float, ended: float) -> bool:
        return any(began <= back and ended >= killed for killed, back in self._killed)

    def _start(self) -> Server:
        return Server(self._machine.home, *self._arguments, command=self._command)

    def _says(self, text: str) -> None:
        wait_until(lambda: text in self.server.printed, LOADED_WITHIN_S)
        self.server.printed = self.server.printed.partition(text)[2]

    def _wait_for(self, version: str) -> None:
        """Waits until the version answers, and the one before has ended."""
        wait_until(lambda: self.server.client.get("/health").json()["version"] == version, LOADED_WITHIN_S)
        wait_until(lambda: len(self._programs()) == 1, LOADED_WITHIN_S)
        self.load.more()

    def _programs(self) -> list[int]:
        below = descendants(self.server.process.pid)
        return [
            pid
            for pid in below
            if "training.programs.serve" in argv(pid) and "training.jobs.supervise" not in argv(pid)
        ]

    def _kill(self, part: str) -> None:
        below = descendants(self.server.process.pid)
        (program,) = self._programs()
        (supervisor,) = [pid for pid in below if "training.jobs.supervise" in argv(pid)]
        time.sleep(random.random() / 2)
        killed = time.monotonic()
        os.kill(program if part == "program" else supervisor, signal.SIGKILL)
        self._killed.append((killed, killed + NOTICED_WITHIN_S))
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), LOADED_WITHIN_S)
        self.load.more()

    def _kill_server(self) -> None:
        below = descendants(self.server.process.pid)
        time.sleep(random.random() / 2)
        killed = time.monotonic()
        self.server.process.kill()
        self.server.process.wait()
        self._killed.append((killed, killed + LOADED_WITHIN_S))
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 20)
        self.server.client.close()
        self.server = self._start()
        self._killed[-1] = (killed, time.monotonic())
        self.load.more()

    def _slow_bodies(self) -> None:
        """Bodies that arrive byte by byte, until each of them has its answer."""
        began = time.monotonic()
        waiting = [open_request(self.server, "/predict", length=1000) for _ in range(SLOW)]
        ended: Counter[str] = Counter()
        while waiting and time.monotonic() < began + 120:
            for client in [*waiting]:
                if select.select([client], [], [], 0)[0]:
                    ended[client.recv(100).decode(errors="replace").partition("\r\n")[0][9:]] += 1
                    waiting.remove(client)
                    client.close()
                else:
                    with contextlib.suppress(OSError):
                        client.send(b" ")
            time.sleep(0.5)
        require(not waiting and all(status.startswith("408") for status in ended), f"slow bodies: {ended}")

    def _fill_disk(self) -> None:
        if self._disk is None:
            print(f"no full disk: {full_disk.why_not()}", flush=True)
            return

        def unrecorded() -> float:
            text = self.server.client.get("/metrics").text
            return float(next(line.split()[1] for line in text.splitlines() if line.startswith("finetune_unrecorded_")))

        with self._row("a full disk under --record", 1):
            self._disk.fill()
            wait_until(lambda: unrecorded() > 100, LOADED_WITHIN_S)
            self._says("Rows are not recorded")
            self.load.more(200)
        self._disk.resize(50)
        size = sum(file.stat().st_size for file in self._record.iterdir())
        wait_until(lambda: sum(file.stat().st_size for file in self._record.iterdir()) > size, LOADED_WITHIN_S)

    def _end(self) -> None:
        self.load.stop()
        wait_until(lambda: self.server.client.get("/health").json()["waiting"] == 0, 60)
        below = descendants(self.server.process.pid)
        self.server.process.terminate()
        require(self.server.process.wait(60) == 0, f"it ends with {self.server.process.returncode}")
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 20)
        rows = [json.loads(line) for file in self._record.iterdir() for line in file.read_text().splitlines()]
        wrong = [row for row in rows if not self._kind.is_right(row)]
        require(bool(rows) and not wrong, f"{len(wrong)} of {len(rows)} recorded rows are wrong: {wrong[:2]}")
        load = self.load
        unexplained = sum(not self._in_kill(*one[:2]) for one in load.lost)
        self.table.append(["all", "", *(f"{n:,}" for n in (load.answers, load.wrong, len(load.lost), unexplained))])
        self.table.append([f"recorded rows, all whole and right: {len(rows):,}", "", "", "", "", ""])


def open_request(
    server: Server, path: str, *, length: int = 0, chunked: bool = False, token: str = ""
) -> socket.socket:
    """A connection that has sent the headers of a request."""
    client = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token or server.token}\r\n"
    head += "Content-Type: application/json\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n" if chunked else f"Content-Length: {length}\r\n\r\n"
    client.sendall(head.encode())
    return client


def go_away(server: Server, kind: Rows | Assistant, number: int) -> None:
    """A client that closes its connection: in the middle of its body, after it, or in the middle of a stream."""
    if isinstance(kind, Rows):
        path, request = "/predict", dict[str, Any](rows=[{"talk": "one two three"}] * 100)
    else:
        path = "/v1/completions"
        request = {"model": "counter", "prompt": "on", "max_tokens": 3000, "stream": bool(number % 2)}
    body = json.dumps(request).encode()
    with open_request(server, path, length=len(body)) as client:
        client.sendall(body if number % 3 else body[:-5])
        time.sleep(0.05 * (number % 4))


@contextlib.contextmanager
def slow_stream(server: Server) -> Iterator[None]:
    """A client that reads a byte of a long stream now and then."""
    request: dict[str, Any] = {"model": "counter", "prompt": "on", "max_tokens": 500, "stream": True}
    body, stop = json.dumps(request).encode(), threading.Event()

    def read() -> None:
        with open_request(server, "/v1/completions", length=len(body)) as client, contextlib.suppress(OSError):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(body)
            while not stop.wait(0.5):
                client.recv(1)

    thread = threading.Thread(target=read)
    thread.start()
    yield
    stop.set()
    thread.join()


def send_gigabyte(server: Server, *, chunked: bool, with_token: bool) -> None:
    """A body of 1 GB, which is refused long before its end."""
    expected, part, sent = b"413" if with_token else b"401", b"x" * 2**20, 0
    with open_request(server, "/predict", length=GIGABYTE, chunked=chunked, token="" if with_token else "no") as client:
        with contextlib.suppress(OSError):  # the server closes the connection
            while sent < GIGABYTE and not select.select([client], [], [], 0)[0]:
                client.sendall(b"100000\r\n" + part + b"\r\n" if chunked else part)
                sent += len(part)
        with contextlib.suppress(ConnectionResetError):
            status = client.recv(100)
            require(status[9:12] == expected, f"1 GB, chunked {chunked}, token {with_token}: {status!r}")
    require(sent < 100 * 2**20, f"{sent:,} bytes of a body of 1 GB were taken")


def resident_mib(pid: int) -> float:
    """The resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def serve(machine: Machine) -> None:
    """The classifier, and then the assistant. Raises Broken where a promise does not hold."""
    for kind in (Rows(), Assistant()):
        home = machine.home if kind.name == "rows" else Path(f"{machine.home}-{kind.name}")
        home.mkdir(mode=0o700, exist_ok=True)
        with in_home(home), contextlib.ExitStack() as opened:
            broken = kind.register(home.parent / f"{kind.name}-models")
            record = home.parent / f"{kind.name}-recorded"
            record.mkdir()
            disk = None if full_disk.why_not() else opened.enter_context(full_disk.SmallDisk(record, 50))
            here = Machine(home)
            fire = Fire(kind, here, disk, record)
            try:
                fire.play(broken)
            finally:
                fire.load.stop()
                if fire.server.process.poll() is None:
                    fire.server.process.kill()
                    print(fire.server.printed[-3000:], flush=True)
            print(f"{kind.name}:", *align(fire.table), sep="\n", flush=True)
        left = [path.name for path in (home / "jobs").glob("*")]
        print(f"jobs of killed servers in the home: {len(left)}", flush=True)
        require(not left, f"jobs of killed servers are left: {left}")


@contextlib.contextmanager
def in_home(home: Path) -> Iterator[None]:
    """This process's own home."""
    before = os.environ.get("FINETUNE_HOME")
    os.environ["FINETUNE_HOME"] = str(home)
    try:
        yield
    finally:
        os.environ.pop("FINETUNE_HOME")
        if before is not None:
            os.environ["FINETUNE_HOME"] = before
