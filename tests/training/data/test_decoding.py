"""Opening of local and remote files, packed or in other encodings, and the messages about unreadable ones."""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import os
import threading
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from tests.raised import raised_problems
from training.data.decoding import open_seekable, open_text
from training.data.file_systems import as_user_error
from training.data.listing import Listing
from training.data.sources import EXPORT
from training.problems import NETWORK, UserError
from training.recipe import Data

TEXT = "text,label\nnaïve café,1\n„gut“ 你好,0\n"
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda text: pa.compress(text, "zstd", asbytes=True),
}


def data(**values: Any) -> Data:
    return Data(**{"source": "csv", "path": "rows", "text": ["text"], "label": "label"} | values)


def read(file: Path | str, **values: Any) -> bytes:
    with open_text(str(file), data(**values)) as rows:
        return rows.read()


def problem(file: Path | str, **values: Any) -> str:
    """The message about a file that cannot be read; it names the file."""
    (found,) = raised_problems(read, file, **values)
    assert found.where == str(file)
    return found.message


@pytest.fixture
def folder() -> str:
    """A folder of a file system that is reached by URL."""
    return f"memory://{uuid.uuid4().hex}"


def written(file: Path | str, content: bytes) -> Path | str:
    with fsspec.open(str(file), "wb") as out:
        out.write(content)
    return file


# What is read


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_packed_or_plain_here_or_elsewhere_the_text_is_the_same(
    tmp_path: Path, folder: str, suffix: str, elsewhere: bool
) -> None:
    name = f"{folder if elsewhere else tmp_path}/rows.csv{suffix}"
    packed = PACK[suffix](TEXT.encode())
    assert read(written(name, packed)) == TEXT.encode()
    if suffix:  # as `cat` joins them
        assert read(written(name, packed + packed)) == (TEXT * 2).encode()


@pytest.mark.parametrize("encoding", ["utf-8", "UTF8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "gb18030"])
@pytest.mark.parametrize("suffix", PACK)
def test_any_encoding_becomes_utf_8_without_a_mark(tmp_path: Path, encoding: str, suffix: str) -> None:
    file = written(tmp_path / f"rows.csv{suffix}", PACK[suffix](TEXT.encode(encoding)))
    assert read(file, encoding=encoding) == TEXT.encode()


def test_a_mark_of_utf_8_is_dropped_though_the_recipe_does_not_name_it(tmp_path: Path) -> None:
    assert read(written(tmp_path / "rows.csv", TEXT.encode("utf-8-sig"))) == TEXT.encode()


@pytest.mark.parametrize("encoding", ["utf-16", "cp1252", "shift_jis"])
def test_characters_that_lie_across_two_pieces_are_whole(tmp_path: Path, encoding: str) -> None:
    text = "é" if encoding == "cp1252" else "本"
    long = ("x" + text * 1_100_000).encode(encoding)
    assert read(written(tmp_path / "rows.csv", long), encoding=encoding) == ("x" + text * 1_100_000).encode()


@pytest.mark.parametrize(
    ("encoding", "wrong"),
    [("utf-8", b"caf\xe9"), ("cp1252", b"caf\x81"), ("ascii", b"caf\xe9"), ("utf-16", b"\xff\xfec\0\0\xd8a\0")],
)
def test_bytes_that_cannot_be_decoded_are_left_for_the_reader_to_report_with_their_row(
    tmp_path: Path, encoding: str, wrong: bytes
) -> None:
    given = read(written(tmp_path / "rows.csv", wrong), encoding=encoding)
    with pytest.raises(UnicodeDecodeError):
        given.decode()
    assert given.startswith(b"c")


def test_pyarrow_and_a_loop_over_lines_read_it_alike(tmp_path: Path) -> None:
    rows = "".join(f"{number},text {number}\n" for number in range(200_000))
    file = str(written(tmp_path / "rows.csv.gz", gzip.compress(f"a,b\n{rows}".encode(), 1)))
    with open_text(file, data()) as lines:
        assert sum(1 for _ in lines) == 200_001
        assert lines.share == 1.0
    with open_text(file, data()) as rows_of, pyarrow.csv.open_csv(pa.PythonFile(rows_of, mode="r")) as batches:
        assert sum(batch.num_rows for batch in batches) == 200_000


def test_a_block_has_the_requested_length(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.csv.gz", gzip.compress(b"x" * 5_000_000))
    with open_text(str(file), data()) as rows:
        assert [len(rows.read(3_000_000)) for _ in range(3)] == [3_000_000, 2_000_000, 0]


def test_a_reader_may_be_given_up_at_any_time(tmp_path: Path) -> None:
    file = str(written(tmp_path / "rows.csv", b"a,b\n" + b"1,2\n" * 2_000_000))
    options = pyarrow.csv.ReadOptions(block_size=2**16)
    for _ in range(5):
        with open_text(file, data()) as rows:
            next(iter(pyarrow.csv.open_csv(pa.PythonFile(rows, mode="r"), read_options=options)))


@pytest.mark.parametrize("suffix", PACK)
def test_the_share_grows_from_nothing_to_all_of_the_file_as_it_lies(tmp_path: Path, suffix: str) -> None:
    file = written(tmp_path / f"rows.csv{suffix}", PACK[suffix](os.urandom(3_000_000).hex().encode()))
    with open_text(str(file), data()) as rows:
        shares = [rows.share]
        while rows.read(1_000_000):
            shares.append(rows.share)
    assert shares[0] == 0.0 and shares[-1] == 1.0 and shares == sorted(shares) and len(set(shares)) > 2


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_parquet_file_is_read_by_place(tmp_path: Path, folder: str, elsewhere: bool) -> None:
    table = pa.table({"text": ["a", "b"], "label": [0, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    file = str(tmp_path / "rows.parquet")
    if elsewhere:
        file = str(written(f"{folder}/rows.parquet", (tmp_path / "rows.parquet").read_bytes()))
    with open_seekable(file) as stored:
        assert pyarrow.parquet.ParquetFile(stored).read().equals(table)


# What is refused


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_small_file_packed_from_an_endless_one_is_refused_at_the_cap_in_bounded_memory(
    tmp_path: Path, suffix: str
) -> None:
    bomb = written(tmp_path / f"rows.csv{suffix}", PACK[suffix](bytes(b"a" * 50_000_000)))
    assert os.path.getsize(bomb) < 100_000
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    with pytest.raises(UserError) as raised, open_text(str(bomb), data(max_file_gb=0.01)) as rows:
        while rows.read(100_000):
            most = pa.total_allocated_bytes() - before
    assert most + tracemalloc.get_traced_memory()[1] < 8_000_000
    tracemalloc.stop()
    (found,) = raised.value.problems
    assert found.where == str(bomb)
    assert "more than 0.01 GB once unpacked from" in found.message and "MB of" in found.message
    assert "raise data.max_file_gb" in found.message


def test_a_plain_file_over_the_cap_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    with file.open("wb") as sparse:
        sparse.truncate(3_000_000_000)
    assert "more than 2 GB" in problem(file, max_file_gb=2.0)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("how", ["cut", "flipped", "other"])
def test_a_packed_file_that_is_damaged_is_reported(tmp_path: Path, suffix: str, how: str) -> None:
    packed = bytearray(PACK[suffix](os.urandom(100_000)))
    if how == "flipped":
        packed[-5 if suffix == ".gz" else 3] ^= 0xFF
    content = {"cut": bytes(packed[:-100]), "flipped": bytes(packed), "other": TEXT.encode()}[how]
    message = problem(written(tmp_path / f"rows.csv{suffix}", content))
    assert "damaged, cut short, or not packed by" in message and message.endswith("copy or pack it again.")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TEXT.encode("utf-16"), "is UTF-16 by its first bytes: set data.encoding: utf-16."),
        (TEXT.encode("utf-32"), "is UTF-32 by its first bytes: set data.encoding: utf-32."),
        (
            TEXT.encode("utf-16-le"),
            "is no UTF-8: many of its first bytes are NUL. If it is UTF-16 text, set data.encoding: utf-16-le.",
        ),
        (
            TEXT.encode("utf-16-be"),
            "is no UTF-8: many of its first bytes are NUL. If it is UTF-16 text, set data.encoding: utf-16-be.",
        ),
        (gzip.compress(b"a", mtime=0), "is no text but packed by gzip: let its name end in .gz."),
        (b"PK\x03\x04rest", f"is no text but a zip archive or a spreadsheet: unpack it, or {EXPORT}."),
        (b"PAR1rest", "is no text but a Parquet file: set data.source: parquet."),
    ],
)
def test_content_that_is_no_utf_8_text_is_reported_with_its_likely_format(
    tmp_path: Path, content: bytes, words: str
) -> None:
    assert problem(written(tmp_path / "rows.csv", content)) == words


def test_text_that_has_not_the_mark_of_the_encoding_is_not_made_nonsense_of(tmp_path: Path) -> None:
    message = problem(written(tmp_path / "rows.csv", TEXT.encode()), encoding="utf-16")
    assert message == (
        "has no mark of its byte order, so it is not utf-16: is it utf-8, utf-16-le or utf-16-be? Set data.encoding."
    )


def test_a_file_that_does_not_exist_is_reported(tmp_path: Path, folder: str) -> None:
    assert "does not exist (any more)" in problem(tmp_path / "rows.csv")
    assert "does not exist: check the URL" in problem(f"{folder}/rows.csv")
    for file in (str(tmp_path / "rows.parquet"), f"{folder}/rows.parquet"):
        with pytest.raises(UserError), open_seekable(file):
            pass


def test_a_file_without_read_permission_is_reported() -> None:
    # As root, who may read everything, no file gives this error.
    with (
        pytest.raises(UserError, match=r"may not be read by this user: change its permissions"),
        as_user_error("/rows.csv"),
    ):
        raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "htps://me/rows.csv",
            "'htps' is no protocol that can be read: choose from s3, gs, https, …. Did you mean 'http",
        ),
        ("gs://bucket/rows.csv", "gs:// cannot be read here: install the package gcsfs (pip install gcsfs)."),
    ],
)
def test_a_protocol_that_cannot_be_read_is_reported_with_the_next_step(url: str, words: str) -> None:
    assert problem(url).startswith(words)


class Web(BaseHTTPRequestHandler):
    """A web server with one file, which ignores ranges."""

    def do_HEAD(self) -> None:
        name = self.path.partition("?")[0]
        status = {"/rows.csv": 200, "/rows.csv.gz": 200, "/cut.csv": 200, "/secret.csv": 403, "/busy.csv": 503}
        content = gzip.compress(TEXT.encode()) if name.endswith(".gz") else TEXT.encode()
        self.send_response(status.get(name, 404))
        self.send_header("Content-Length", str(len(content) + (10 if name == "/cut.csv" else 0)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_GET = do_HEAD

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.csv?version=2", "rows.csv.gz?version=2"])
def test_a_file_of_a_plain_web_server_is_read_in_one_go(web: str, name: str) -> None:
    with open_text(f"{web}/{name}", data()) as rows:
        assert rows.read() == TEXT.encode() and rows.share == 1.0


def test_a_file_of_a_plain_web_server_is_not_read_by_place(web: str) -> None:
    with pytest.raises(UserError, match="gives files from their beginning only"), open_seekable(f"{web}/rows.csv"):
        pass


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("none.csv", "data", "does not exist: check the URL"),
        ("secret.csv", "data", "in the environment: FSSPEC_HTTP"),
        ("busy.csv", NETWORK, "the fault is the server's. Run the same command again later."),
        ("cut.csv", NETWORK, "check the network, then run the same command again."),
    ],
)
def test_a_refusal_of_a_web_server_is_reported_by_its_kind(web: str, name: str, kind: str, words: str) -> None:
    (found,) = raised_problems(read, f"{web}/{name}")
    assert (found.kind, found.where) == (kind, f"{web}/{name}") and words in found.message


def test_a_server_that_does_not_answer_is_a_matter_of_the_network() -> None:
    (found,) = raised_problems(read, "http://127.0.0.1:9/rows.csv")
    assert (found.kind, found.where) == (NETWORK, "http://127.0.0.1:9/rows.csv")
    assert found.message.endswith("check the network, then run the same command again.")


# Links


def test_a_file_of_rows_that_leads_out_of_its_folder_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "inbox").mkdir()
    secret = written(tmp_path / "secret.csv", b"text,label\nhush,1\n")
    (tmp_path / "inbox" / "notes.csv").symlink_to(secret)
    assert f"is a link to {secret}, outside of its folder" in problem(tmp_path / "inbox" / "notes.csv")
    with pytest.raises(UserError, match="outside of its folder"), open_seekable(str(tmp_path / "inbox" / "notes.csv")):
        pass


def test_a_glob_does_not_follow_a_folder_that_leads_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "inbox").mkdir()
    (tmp_path / "private").mkdir()
    written(tmp_path / "private" / "rows.csv", b"text,label\nhush,1\n")
    (tmp_path / "inbox" / "more").symlink_to(tmp_path / "private")
    with pytest.raises(UserError, match=r"more: is a link to .*private, outside of"):
        Listing().find_files(f"{tmp_path}/inbox/**/*.csv", (".csv",))


@pytest.mark.parametrize("named", [str, lambda file: f"file://{file}", lambda file: f"local://{file}"])
def test_nothing_of_the_home_is_read_as_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: Callable[[Path], str]
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "services").mkdir(parents=True)
    password = written(tmp_path / "home" / "services" / "password.csv", b"text,label\nhush,1\n")
    (_, (file,)) = Listing().find_files(named(Path(password)), (".csv",))
    assert "lies in the home of finetune, which holds passwords and keys" in problem(file.file)


def test_links_within_a_folder_and_those_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.csv", b"text,label\nx,1\n")
    (tmp_path / "train.csv").symlink_to("rows.csv")
    repository = tmp_path / "datasets--a--b"
    for made in ("blobs", "snapshots/c0ffee/data"):
        (repository / made).mkdir(parents=True)
    Path(rows).rename(repository / "blobs" / "0123")
    (tmp_path / "rows.csv").write_bytes((repository / "blobs" / "0123").read_bytes())
    (repository / "snapshots" / "c0ffee" / "data" / "train.csv").symlink_to("../../../blobs/0123")
    for file in (tmp_path / "train.csv", repository / "snapshots" / "c0ffee" / "data" / "train.csv"):
        assert read(file) == b"text,label\nx,1\n"


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_names_that_another_user_gave_a_file_are_refused(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    (tmp_path / "inbox").mkdir()
    link(Path(written(tmp_path / "inbox" / "own.csv", b"text,label\nhush,1\n")), tmp_path / "inbox" / "notes.csv")
    os.chown(tmp_path / "inbox", 1234, 1234)
    os.chown(tmp_path / "inbox" / "notes.csv", 1234, 1234, follow_symlinks=False)
    os.chown(tmp_path / "inbox" / "own.csv", 0, 0)
    assert "of user 0" in problem(tmp_path / "inbox" / "notes.csv")


@pytest.mark.skipif(os.getuid() != 0, reason="gives links to another user")
def test_a_folder_that_another_user_has_linked_to_one_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    written(tmp_path / "private" / "train.csv", b"text,label\nhush,1\n")
    (tmp_path / "inbox").symlink_to(tmp_path / "private")
    assert read(tmp_path / "inbox" / "train.csv") == b"text,label\nhush,1\n", "a link of one's own"
    os.chown(tmp_path / "inbox", 1234, 1234, follow_symlinks=False)
    assert "lies in a folder that is a link of user 1234 to a file of user 0" in problem(tmp_path / "inbox/train.csv")
    os.chown(tmp_path / "private" / "train.csv", 1234, 1234)
    assert read(tmp_path / "inbox" / "train.csv") == b"text,label\nhush,1\n", "their own rows"


@pytest.mark.skipif(os.getuid() != 0, reason="gives links to another user")
def test_a_folder_that_becomes_a_link_while_it_is_read_hands_out_nothing(tmp_path: Path) -> None:
    for folder in ("inbox", "private"):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder / "train.csv", f"text,label\n{folder},1\n".encode())
    (tmp_path / "link").symlink_to(tmp_path / "private")
    os.chown(tmp_path / "link", 1234, 1234, follow_symlinks=False)
    inbox, link = (str(tmp_path / name).encode() for name in ("inbox", "link"))
    rename, at_cwd, exchange = ctypes.CDLL(None).renameat2, -100, 2
    ended, seen = time.monotonic() + 1.0, set()

    def keep_swapping() -> None:
        while time.monotonic() < ended:
            rename(at_cwd, inbox, at_cwd, link, exchange)

    swapping = threading.Thread(target=keep_swapping)
    swapping.start()
    while time.monotonic() < ended:
        with contextlib.suppress(UserError):
            seen.add(read(tmp_path / "inbox" / "train.csv"))
    swapping.join()
    assert seen == {b"text,label\ninbox,1\n"}


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.csv")
    assert "is a pipe, a socket or a device" in problem(tmp_path / "rows.csv")
