"""`finetune serve` of a model of images: files of a form, and rows of JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.flows.served import Server, register
from tests.fork_server import call
from tests.task_types import CORNERS, VIT
from tests.training.pictures import file_of, noise, stored

TASK = "image-classification"


def make_model(folder: Path) -> Path:
    """A model that was never trained."""
    from tests.training import programs_here, tiny
    from training import task_types
    from training.programs import create_image_model

    programs_here.run(create_image_model, folder / "base", {}, config=VIT, seed=0)
    return tiny.export_untrained(folder / "base/output", folder / "model", task_types.load(TASK), CORNERS)


def predict(folder: Path, images: list[str]) -> list[float]:
    """The probability of the label that the model finds likeliest, of each image."""
    from training import task_types
    from training.engine.predictor import Predictor

    predictor = Predictor(task_types.load(TASK), folder, folder, 1)
    return [one["probability"] for one in predictor.predict(pa.RecordBatch.from_pydict({"image": images}))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return call(make_model, tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def photos(model: Path, tmp_path_factory: pytest.TempPathFactory, fresh_database: Path) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("photos") / "home"
    home.mkdir(mode=0o700)
    (home / "mlflow.db").write_bytes(fresh_database.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_HOME", str(home))
        register(model, TASK)
        with Server(home, "counter") as server:
            yield server


@pytest.mark.slow
def test_files_of_a_form_and_data_urls_have_the_models_predictions_in_their_order(model: Path, photos: Server) -> None:
    contents = [file_of(noise(seed), kind) for seed, kind in enumerate(["PNG", "JPEG", "WEBP"])]
    expected = call(predict, model, [stored(content) for content in contents])
    files = [("file", (f"{number}.img", content)) for number, content in enumerate(contents)]
    of_form = photos.client.post("/predict", files=files)
    rows = [{"talk": f"data:image/png;base64,{stored(content)}"} for content in contents]
    of_rows = photos.client.post("/predict", json={"rows": rows})
    for answer in (of_form, of_rows):
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "counter/1"
        assert [one["probability"] for one in answer.json()["predictions"]] == pytest.approx(expected, abs=1e-5)
    assert "-F file=@image.jpg" in photos.printed


def test_bad_files_are_one_message_that_names_each(photos: Server) -> None:
    png = file_of(noise())
    half, page = ("image.jpg", png[: len(png) // 2]), ("image.jpg", b"<html>")
    answer = photos.client.post("/predict", files=[("file", ("good.png", png)), ("file", half), ("file", page)])
    assert answer.status_code == 400
    (first, second) = answer.json()["error"]["message"].splitlines()
    assert first == "file 2 (image.jpg): has a damaged or truncated image in column 'talk'."
    assert second.startswith("file 3 (image.jpg): has a web page, where one of PNG, ")


FILE = b'--x\r\nContent-Disposition: form-data; filename="a%s"\r\n\r\nhello\r\n--x--\r\n'


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (b"", "multipart/form-data", "needs a boundary"),
        (b"", "multipart/form-data; boundary=x", "its end is missing"),
        (b"--x\r\nhello\r\n--x--\r\n", "multipart/form-data; boundary=x", "no end of its headers"),
        (b"--x--\r\n", "multipart/form-data; boundary=x", "has no file"),
        (
            b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nhello\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
            "prompt: is no file",
        ),
        (FILE % (b";" * 2**20), "multipart/form-data; boundary=x", "headers within 4,096 bytes"),
        (b"--x\r\n\r\n" * 1001 + b"--x--\r\n", "multipart/form-data; boundary=x", "has 1,001 files"),
        (FILE % b"", "multipart/form-data; boundary*=idna''%ff", "needs a boundary"),
        (FILE.replace(b"filename", b"filename*") % b"", "multipart/form-data; boundary=x", "is no file"),
    ],
)
def test_a_form_without_files_is_refused(photos: Server, body: bytes, kind: str, words: str) -> None:
    answer = photos.client.post("/predict", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
