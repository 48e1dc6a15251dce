"""Faults of a shared store: while runs use it, machines die, objects are damaged, the bucket fails, clocks stop.

Each fault has a prefix in the bucket and homes of its own, each a machine. Then one more home runs, and the bucket
works again. All runs that end must end with what a run without a store ended with. After each, its artifacts must be
whole in the bucket, or be named as missing there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.drill.compare import Left, left_by
from tests.drill.fires import UNREGISTERED
from tests.drill.ground import Ground, Run
from tests.drill.promises import Skipped, judge, require
from tests.drill.watch import Watch
from tests.s3 import BUCKET, KEYS, S3
from training.jobs.processes import descendants

SETTINGS = (
    "compute.num_processes=1",
    "training.num_train_epochs=60",
    "training.checkpoint_interval_s=0.3",
)
END_WITHIN_S = 400.0
REQUESTS = 150
"""A fault comes at one of so many first requests of a run."""
SILENT_S = 20.0
"""Longer than a client waits for an answer."""
DAY_S = 86_400


class StoreFaults:
    """Plays faults by number, as a seed draws them.

    Args:
        ground: where runs take place.
        watch: looks at what they leave.
        seed: draws the faults.
    """

    def __init__(self, ground: Ground, watch: Watch, seed: int) -> None:
        self.s3 = S3()
        self.results: dict[str, str] = {}
        self.folder = ground.folder
        self._ground, self._watch, self._seed = ground, watch, seed
        self._homes = itertools.count(1)
        self.prefix = ""
        self.changed: dict[str, bytes] = {}
        """Objects with changed bytes of the same size: an upload takes them for whole, and only a fetch reads them."""
        home = ground.folder / "without-store"
        began = time.monotonic()
        run = ground.start(home, *SETTINGS)
        require(not self.status(run), f"the undisturbed run failed: {run.ending()}")
        self._whole = left_by(home, run.result())
        print(f"undisturbed, no store: {time.monotonic() - began:.1f} s, sha256 of the weights {self._whole.model}")

    def play(self, number: int) -> None:
        """Plays one fault to its end, and compares."""
        draw = random.Random(f"{self._seed}-{number}")
        name = f"{number:02} {[*FAULTS][(number - 1) % len(FAULTS)]}"
        self.prefix, self.changed = f"fault-{number}", {}

        def fault() -> str:
            about = FAULTS[name[3:]](self, draw)
            self.heal()
            self.succeed(self.start(self.home()))
            return about

        self.results[name] = judge(f"store  {name}", fault)
        self.heal()

    def heal(self) -> None:
        """The bucket works from now on."""
        self.s3.fault = self.s3.lost = lambda request: None
        self.s3.cut_after = None

    def home(self) -> Path:
        """A machine that has nothing."""
        return self.folder / f"{self.prefix}-home-{next(self._homes)}"

    def start(self, home: Path, *settings: str, **more: str) -> Run:
        """Starts a run of this home that uses the bucket."""
        store = {"FINETUNE_STORE": f"s3://{BUCKET}/{self.prefix}"}
        return self._ground.start(home, *SETTINGS, *settings, **store, **self.s3.environment(), **KEYS, **more)

    def status(self, run: Run) -> int:
        """Watches the run to its end; nothing of it may be left soon after. Returns its exit status."""
        return self._watch.exit_status(run, END_WITHIN_S)

    def kill(self, run: Run) -> bool:
        """Kills a run. Returns whether it had not ended before."""
        os.kill(run.process.pid, signal.SIGKILL)
        return self.status(run) == -signal.SIGKILL

    def burn(self, home: Path) -> None:
        """Removes the home of runs that have ended, when nothing of them is left."""
        self._watch.settle()
        shutil.rmtree(home)

    def stop(self, run: Run) -> list[int]:
        """Stops all processes of a run. Returns their pids."""
        pids = [run.process.pid, *descendants(run.process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        return pids

    def succeed(self, run: Run, registers: bool = True) -> None:
        """The run ends with the undisturbed run's bytes, and what it says to be in the bucket is there."""
        require(self.status(run) == 0, f"exit status {run.process.returncode}: {run.ending()}")
        left = left_by(run.home, run.result())
        lines = [line for line in self._whole.differences(left) if registers or not line.startswith("registered")]
        require(not lines, f"{'; '.join(lines)}: {run.ending()}")
        self._look_for_lost(run, left)

    def _look_for_lost(self, run: Run, left: Left) -> None:
        objects, printed = self.objects(), run.printed()
        unread = [name for name, content in self.changed.items() if objects.get(name) == content]
        for stage, (key, _) in left.artifacts.items():
            if is_named_as_missing(printed, stage, key):
                continue
            fault = damage(objects, stage, key, unread)
            require(fault is None, f"{stage} {key[:16]}: {fault}: {run.ending()}")

    def objects(self) -> dict[str, bytes]:
        """What the store holds, by name."""
        above = f"{self.prefix}/"
        found = self.s3.objects(above)
        return {name.removeprefix(above): content for name, content in found.items()}

    @contextmanager
    def at_request(self, number: int, act: Callable[[], None]) -> Iterator[None]:
        """Within the block, acts once when the bucket gets its request of this number, before that has an effect."""
        count = itertools.count(1)

        def fault(request: str) -> None:
            if next(count) == number:
                act()

        self.s3.fault = fault
        yield
        self.s3.fault = lambda request: None


def is_named_as_missing(printed: str, stage: str, key: str) -> bool:
    """Whether a run says that this artifact is not in the bucket."""
    missing = [line for line in printed.splitlines() if "Not in s3://" in line and " yet: " in line]
    return "may only be read" in printed or any(f"{stage} {key[:16]}" in line for line in missing)


def damage(objects: dict[str, bytes], stage: str, key: str, unread: Container[str] = ()) -> str | None:
    """What is wrong with an artifact of the bucket, beside the content of the objects that are named as unread."""
    manifest = objects.get(f"artifacts/{stage}/{key}.json")
    if manifest is None:
        return "its manifest is lost"
    for file in json.loads(manifest)["files"]:
        name = f"objects/{file['sha256'][:2]}/{file['sha256']}"
        content = objects.get(name)
        if content is None:
            return f"{file['path']} is lost"
        if name not in unread and hashlib.sha256(content).hexdigest() != file["sha256"]:
            return f"{file['path']} has wrong bytes"
    return None


def killed(faults: StoreFaults, draw: random.Random) -> str:
    """A machine dies at a request; its disk is lost, or the next run of its home goes on."""
    number, burned = draw.randint(1, REQUESTS), draw.random() < 0.5
    home, dead = faults.home(), threading.Event()
    run = faults.start(home)

    def kill() -> None:
        os.kill(run.process.pid, signal.SIGKILL)
        dead.set()

    with faults.at_request(number, kill):
        status = faults.status(run)
    if burned:
        faults.burn(home)
    elif dead.is_set():
        faults.succeed(faults.start(home))
    require(dead.is_set() == (status != 0), f"exit status {status}: {run.ending()}")
    return f"at request {number}, {'its home is lost' if burned else 'its next run goes on'}"


def killed_twice(faults: StoreFaults, draw: random.Random) -> str:
    """Two machines die one after the other, and their disks are lost."""
    numbers = sorted(draw.sample(range(10, REQUESTS), 2))
    for number in numbers:
        home = faults.home()
        run = faults.start(home)
        with faults.at_request(number, lambda run=run: os.kill(run.process.pid, signal.SIGKILL)):  # type: ignore[misc]
            faults.status(run)
        faults.burn(home)
    return f"at requests {numbers[0]} and {numbers[1]}, both homes are lost"


def damaged(faults: StoreFaults, draw: random.Random) -> str:
    """Objects and manifests are truncated, changed or lost; another machine's run mends them."""
    faults.succeed(faults.start(faults.home()))
    names = sorted(name for name in faults.objects() if name.startswith(("objects/", "artifacts/")))
    chosen = draw.sample(names, draw.randint(1, 4))
    for name in chosen:
        content, harm = faults.objects()[name], draw.choice(["truncated", "changed", "lost"])
        if harm == "lost":
            faults.s3.remove(f"{faults.prefix}/{name}")
        else:
            at = draw.randrange(len(content) or 1)
            harmed = content[:at]
            if harm == "changed" and content:
                harmed += bytes([content[at] ^ 1]) + content[at + 1 :]
                faults.changed[name] = harmed
            faults.s3.put(f"{faults.prefix}/{name}", harmed)
    faults.succeed(faults.start(faults.home()))
    return f"{len(chosen)} of {len(names)} objects"


def refuses(faults: StoreFaults, draw: random.Random) -> str:
    """The bucket answers with an error for a part of the run, or from then on; the next run of the home delivers."""
    status, first = draw.choice([500, 503, 403]), draw.randint(1, REQUESTS)
    count = draw.choice([1, 5, 40, 10**6])
    home, number = faults.home(), itertools.count(1)
    faults.s3.fault = lambda request: status if first <= next(number) < first + count else None
    faults.succeed(faults.start(home))
    faults.heal()
    faults.succeed(faults.start(home))
    return f"{status} to {'all requests' if count == 10**6 else f'{count} requests'} from {first} on"


def loses_answers(faults: StoreFaults, draw: random.Random) -> str:
    """Requests have their effect, and the answer is an error: the client makes them again."""
    share = draw.choice([0.05, 0.2])
    faults.s3.lost = lambda request: 500 if draw.random() < share else None
    faults.succeed(faults.start(faults.home()))
    return f"{share:.0%} of the answers"


def slow(faults: StoreFaults, draw: random.Random) -> str:
    """Each answer takes long."""
    most_s = draw.choice([0.3, 1.0])
    faults.s3.fault = lambda request: time.sleep(draw.random() * most_s)
    faults.succeed(faults.start(faults.home()))
    return f"answers take up to {most_s:g} s"


def silent(faults: StoreFaults, draw: random.Random) -> str:
    """The bucket does not answer for a time, or from then on."""
    first, count = draw.randint(1, REQUESTS), draw.choice([1, 3, 10**6])
    home, number, over = faults.home(), itertools.count(1), threading.Event()

    def fault(request: str) -> int | None:
        if first <= next(number) < first + count:
            over.wait(SILENT_S)
            return 500
        return None

    faults.s3.fault = fault
    faults.succeed(faults.start(home))
    faults.heal()
    over.set()
    faults.succeed(faults.start(home))
    return f"no answer to {'all requests' if count == 10**6 else f'{count} requests'} from {first} on"


def cuts(faults: StoreFaults, draw: random.Random) -> str:
    """Connections end in the middle of answers, while another machine fetches."""
    faults.succeed(faults.start(faults.home()))
    share = draw.choice([0.1, 0.3])

    def fault(request: str) -> None:
        if request.startswith("GET") and draw.random() < share:
            faults.s3.cut_after = draw.randrange(2000)

    faults.s3.fault = fault
    faults.succeed(faults.start(faults.home()))
    return f"{share:.0%} of the answers to GET"


def two_at_once(faults: StoreFaults, draw: random.Random) -> str:
    """Two machines run the same; one of them may die."""
    delay_s, dies = draw.random() * 6, draw.random() < 0.5
    first = faults.start(faults.home())
    time.sleep(delay_s)
    second = faults.start(faults.home())
    if dies:
        time.sleep(draw.random() * 10)
        victim, other = draw.sample([first, second], 2)
        if not faults.kill(victim):
            faults.succeed(victim)
        faults.succeed(other)
    else:
        faults.succeed(first)
        faults.succeed(second)
    return f"the second starts after {delay_s:.1f} s{', one dies' if dies else ''}"


def frozen(faults: StoreFaults, draw: random.Random) -> str:
    """A machine stops for longer than its leases last, while another does its work, and goes on."""
    delay_s = 4 + draw.random() * 8
    first = faults.start(faults.home())
    time.sleep(delay_s)
    pids = faults.stop(first)
    second = faults.start(faults.home())
    try:
        faults.succeed(second)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    faults.succeed(first)
    return f"after {delay_s:.1f} s"


def wrong_clock(faults: StoreFaults, draw: random.Random) -> str:
    """The clock of one machine stands still or is off by a year, while another machine runs the same."""
    wrong = draw.choice(["stopped", "stopped", f"{-400 * DAY_S}", f"{400 * DAY_S}"])
    # MLflow's database takes no two metrics of one time and step.
    first = faults.start(faults.home(), UNREGISTERED, LD_PRELOAD=str(_clock(faults)), WRONG_CLOCK_S=wrong)
    time.sleep(draw.random() * 5)
    second = faults.start(faults.home())
    faults.succeed(first, registers=False)
    faults.succeed(second)
    return "it stands still" if wrong == "stopped" else f"it is off by {int(wrong) // DAY_S} days"


def _clock(faults: StoreFaults) -> Path:
    """A library that gives a process another clock."""
    library = faults.folder / "clock.so"
    if not library.exists():
        if (compiler := shutil.which("cc")) is None:
            raise Skipped("without a C compiler: apt-get install gcc")
        source = Path(__file__).parent / "faults" / "clock.c"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


FAULTS: dict[str, Callable[[StoreFaults, random.Random], str]] = {
    "killed": killed,
    "refuses": refuses,
    "damaged": damaged,
    "two at once": two_at_once,
    "silent": silent,
    "killed twice": killed_twice,
    "loses answers": loses_answers,
    "wrong clock": wrong_clock,
    "cuts": cuts,
    "frozen": frozen,
    "slow": slow,
}
