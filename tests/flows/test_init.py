"""`finetune init`: the recipe that it writes for a file of rows."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pty
import random
import stat
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, models

from flows.cli.main import main
from tests.made import NO_WEIGHTS
from tests.training.pictures import file_of, noise

ROOT = Path(__file__).parents[2]
LABELS = {"pets": ("cat", "dog", "hamster"), "tools": ("saw", "hammer", "drill"), "food": ("bread", "cheese", "soup")}


def sentence(draw: random.Random, label: str) -> str:
    """Words about a label."""
    return " ".join(
        ["the", *draw.choices(LABELS[label], k=3), "of", draw.choice(("Ann", "Bob")), str(draw.randrange(9999))]
    )


def labelled(delimiter: str) -> Callable[[random.Random], str]:
    """A row of CSV."""

    def row(draw: random.Random) -> str:
        label = draw.choice([*LABELS])
        return f"{sentence(draw, label)}{delimiter}{label}"

    return row


def answered(draw: random.Random) -> str:
    """A row of JSON in alpaca's form."""
    return json.dumps({"instruction": sentence(draw, "pets"), "input": "", "output": sentence(draw, "tools")})


def conversation(draw: random.Random) -> str:
    """A row of JSON in OpenAI's form."""
    messages = [{"role": "user", "content": sentence(draw, "pets")}]
    return json.dumps({"messages": [*messages, {"role": "assistant", "content": sentence(draw, "tools")}]})


def preferred(draw: random.Random) -> str:
    """A row of JSON with two answers."""
    chosen, rejected = f" {sentence(draw, 'tools')}", f" {sentence(draw, 'food')}"
    return json.dumps({"prompt": sentence(draw, "pets"), "chosen": chosen, "rejected": rejected})


def tagged(draw: random.Random) -> str:
    """A sentence of CoNLL."""
    words = sentence(draw, "pets").split()
    return "\n".join(f"{word}\t{'B-PER' if word in ('Ann', 'Bob') else 'O'}" for word in words) + "\n"


@pytest.fixture
def folder(tmp_path: Path, home: Path, model_unchecked: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the example of a chat template."""
    examples = tmp_path / "deployments" / "examples"
    examples.mkdir(parents=True)
    (examples / "chat.jinja").write_bytes((ROOT / "deployments" / "examples" / "chat.jinja").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(file: str, row: Callable[[random.Random], str], header: str = "", rows: int = 200) -> None:
    """Writes rows that are drawn."""
    draw = random.Random(1)
    Path(file).write_text("\n".join([*([header] if header else []), *(row(draw) for _ in range(rows))]) + "\n")


def recipe_of(name: str) -> dict[str, Any]:
    """The recipe in deployments/NAME.yaml."""
    return dict(
        yaml.safe_load(Path("deployments", f"{name}.yaml").read_text())["deployments"][0]["parameters"]["recipe"]
    )


@pytest.mark.parametrize(
    ("file", "row", "header", "task"),
    [
        ("mails.csv", labelled(";"), "text;label", "sequence-classification"),
        ("mails.tsv", labelled("\t"), "", "sequence-classification"),
        ("names.conll", tagged, "", "token-classification"),
        ("answers.jsonl", answered, "", "sft"),
        ("chats.jsonl", conversation, "", "sft"),
        ("pairs.jsonl", preferred, "", "preference"),
    ],
)
def test_check_finds_no_error_in_what_init_wrote_for_a_model_from_scratch(
    folder: Path,
    file: str,
    row: Callable[[random.Random], str],
    header: str,
    task: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(file, row, header)
    assert main(["init", file, "--yes", "--model", "scratch"]) == 0
    name = file.partition(".")[0]
    assert f"finetune run   deployments/{name}.yaml" in capsys.readouterr().out
    assert recipe_of(name)["task"] == task
    assert main(["check", f"deployments/{name}.yaml"]) == 0


@pytest.mark.parametrize(("path", "source"), [("photos", "imagefolder"), ("photos.csv", "csv")])
def test_images_in_folders_of_labels_and_in_a_column_of_paths_are_recognised(
    folder: Path, path: str, source: str
) -> None:
    lines = ["picture,kind"]
    for label, number in product(("cat", "dog", "saw"), range(40)):
        picture = Path("photos", label, f"{number}.png")
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(file_of(noise(len(lines))))
        lines.append(f"{picture},{label}")
    Path("photos.csv").write_text("\n".join(lines) + "\n")
    assert main(["init", path, "--yes", "--model", "scratch"]) == 0
    recipe = recipe_of("photos")
    assert recipe["task"] == "image-classification" and recipe["data"]["source"] == source
    assert recipe["data"]["columns"] == {"image": "image" if source == "imagefolder" else "picture"}
    assert "tokens" not in recipe and recipe["model"]["config"]["model_type"] == "vit"
    assert main(["check", "deployments/photos.yaml"]) == 0


def test_guesses_have_their_reason_and_the_second_best(folder: Path) -> None:
    write("mails.csv", labelled(";"), "text;label")
    assert main(["init", "mails.csv"]) == 0
    lines = Path("deployments/mails.yaml").read_text().splitlines()
    delimiter = next(number for number, line in enumerate(lines) if line.strip().startswith("delimiter"))
    assert "same number of columns" in lines[delimiter - 1]
    path = next(number for number, line in enumerate(lines) if "distilbert" in line)
    assert "medium answerdotai/ModernBERT-base" in " ".join(" ".join(lines[path - 2 : path]).replace("#", "").split())


def test_rows_of_groups_and_of_changing_times_are_held_out_by_them(folder: Path) -> None:
    draw = random.Random(2)
    customers = [(f"c{n}", draw.choice([*LABELS])) for n in range(60)]
    rows = [f"{sentence(draw, label)},{label},{name}" for name, label in customers for _ in range(5)]
    Path("orders.csv").write_text("\n".join(["text,label,customer", *rows]) + "\n")
    assert main(["init", "orders.csv", "--yes", "--model", "scratch"]) == 0
    written = Path("deployments/orders.yaml").read_text()
    recipe = yaml.safe_load(written)["deployments"][0]["parameters"]["recipe"]
    assert recipe["data"]["split"] == {"by": "group", "column": "customer"}
    assert "rows with one customer share 100% of their labels" in " ".join(written.replace("#", "").split())
    assert main(["check", "deployments/orders.yaml"]) == 0
    days = [f"2026-{1 + n // 28:02}-{1 + n % 28:02}" for n in range(300)]
    labels = ["pets" if draw.random() < n / 300 else "food" for n in range(300)]
    rows = [f"{sentence(draw, label)},{label},{day}" for day, label in zip(days, labels, strict=True)]
    Path("news.csv").write_text("\n".join(["text,label,day", *rows]) + "\n")
    assert main(["init", "news.csv", "--yes", "--model", "scratch"]) == 0
    recipe = yaml.safe_load(Path("deployments/news.yaml").read_text())["deployments"][0]["parameters"]["recipe"]
    assert recipe["data"]["split"] == {"by": "time", "column": "day"}
    assert main(["check", "deployments/news.yaml"]) == 0


def test_candidates_of_queries_are_reranked_in_lists_or_rows_and_stay_together(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, lists, rows = random.Random(3), list[str](), ["question,passage,label"]
    for number in range(60):
        query, documents = f"which are {draw.choice([*LABELS])} {number}", [sentence(draw, label) for label in LABELS]
        grades = draw.sample([3, 1, 0], 3)
        lists.append(json.dumps({"query": query, "docs": documents, "labels": grades}))
        rows += [f"{query},{text},{int(grade == 3)}" for text, grade in zip(documents, grades, strict=True)]
    Path("lists.jsonl").write_text("\n".join(lists) + "\n")
    Path("pairs.csv").write_text("\n".join(rows) + "\n")
    for file in ("lists.jsonl", "pairs.csv"):
        assert main(["init", file, "--yes", "--model", "scratch"]) == 0
        name = file.partition(".")[0]
        recipe = recipe_of(name)
        assert recipe["task"] == "reranking" and recipe["evaluation"]["metrics"] == ["ndcg_at_10", "mrr_at_10"]
        assert ("split" in recipe["data"]) == (name == "pairs") and recipe.get("options", {}) == (
            {"loss": "lambda"} if name == "lists" else {}
        )
        assert "at first BM25" in " ".join(Path(f"deployments/{name}.yaml").read_text().replace("#", "").split())
        assert main(["check", f"deployments/{name}.yaml"]) == 0, capsys.readouterr()
    assert recipe["data"]["split"] == {"by": "group", "column": "question"}


def test_each_guess_has_a_second_best_and_the_gate_names_what_it_compares(folder: Path) -> None:
    write("mails.csv", labelled(";"), "text;label")
    assert main(["init", "mails.csv", "--model", "scratch"]) == 0
    written = Path("deployments/mails.yaml").read_text()
    groups = groupby(written.splitlines(), lambda line: line.strip().startswith("#"))
    header, *comments = (" ".join(line.strip(" #") for line in lines) for is_comment, lines in groups if is_comment)
    assert "after `else` the second-best value" in header
    labels = "3 labels, the most frequent first: "  # the only column that can be the labels
    assert len(comments) > 12 and [one[: len(labels)] for one in comments if "; else " not in one] == [labels]
    assert dict(recipe_of("mails")["release"]) == {  # type: ignore[call-overload]
        "registry": "mails",
        "gate": {"compare": "accuracy", "minimum": {}},
    }


def test_folders_of_texts_get_a_recipe_that_check_finds_no_error_in(folder: Path) -> None:
    draw = random.Random(1)
    for number in range(120):
        label = draw.choice([*LABELS])
        file = Path("mails", label, f"{number}.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(sentence(draw, label).replace("Ann", "Zoë").encode("cp1252"))
        file.with_suffix(".json").write_text("{}")
    Path("mails", "food", "empty.txt").touch()
    Path("mails", "index.json").write_text("[]")
    assert main(["init", "mails", "--yes", "--model", "scratch"]) == 0
    data = dict(recipe_of("mails")["data"])  # type: ignore[call-overload]
    assert (data["source"], data["encoding"], data["label"]) == ("textfolder", "cp1252", "label")
    assert data["checks"] == {"blank_text": "warning"}
    assert main(["check", "deployments/mails.yaml"]) == 0


def test_folders_with_the_names_of_splits_are_splits(folder: Path) -> None:
    for split in ("news-train", "news-test"):
        for label, words in LABELS.items():
            for number in range(20):
                file = Path("news", split, label, str(number))
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(f"about {words[number % 3]} and {number} more of {split}")
    assert main(["init", "news", "--yes", "--model", "scratch"]) == 0
    recipe = recipe_of("news")
    assert dict(recipe["data"])["splits"] == {"train": "news-train", "test": "news-test"}  # type: ignore[call-overload]
    assert dict(recipe["data"])["label"] == "label"  # type: ignore[call-overload]
    assert main(["check", "deployments/news.yaml"]) == 0


def test_lengths_are_counted_by_the_tokenizer_of_a_model_on_this_machine(folder: Path) -> None:
    write("mails.csv", labelled(","), "text,label")
    letters = Tokenizer(models.BPE(vocab={"[UNK]": 0}, merges=[], unk_token="[UNK]"))  # a token a character
    Path("model").mkdir()
    letters.save("model/tokenizer.json")
    config = {"model_type": "bert", "max_position_embeddings": 40, "hidden_size": 8}
    Path("model/config.json").write_text(json.dumps(config))
    Path("model/model.safetensors").write_bytes(NO_WEIGHTS)
    assert main(["init", "mails.csv", "--yes", "--model", "model"]) == 0
    assert dict(recipe_of("mails")["tokens"]) == {"max_length": 40}  # type: ignore[call-overload]
    written = " ".join(Path("deployments/mails.yaml").read_text().split("#"))
    assert "by the model's tokenizer" in " ".join(written.split())


def test_texts_with_labels_train_embeddings_if_the_user_asks_for_them(folder: Path) -> None:
    write("mails.csv", labelled(","), "text,label")
    assert main(["init", "mails.csv", "--yes", "--task", "embedding", "--model", "scratch"]) == 0
    recipe = recipe_of("mails")
    assert recipe["options"] == {"loss": "batch_all_triplet"}
    assert dict(recipe["evaluation"])["metrics"] == ["ndcg_at_10", "mrr_at_10"]  # type: ignore[call-overload]
    assert main(["check", "deployments/mails.yaml"]) == 0


def test_a_blank_line_in_a_table_is_passed_over(folder: Path) -> None:
    write("mails.csv", lambda draw: labelled(",")(draw) + ("\n" if draw.random() < 0.1 else ""), "text,label")
    assert main(["init", "mails.csv", "--yes"]) == 0


def test_preferences_with_tools_in_openais_form_are_written_by_the_template_of_a_scratch_model(folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]

    def pair(draw: random.Random) -> str:
        call = {"type": "function", "function": {"name": "find", "arguments": json.dumps({"number": draw.random()})}}
        asked = {"messages": json.loads(conversation(draw))["messages"][:1], "tools": tools}
        good, bad = {"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": "No idea."}
        return json.dumps({"input": asked, "preferred_output": [good], "non_preferred_output": [bad]})

    write("pairs.jsonl", pair)
    assert main(["init", "pairs.jsonl", "--yes", "--model", "scratch"]) == 0
    model = dict(recipe_of("pairs")["model"])  # type: ignore[call-overload]
    assert recipe_of("pairs")["task"] == "preference" and model["config"]["tie_word_embeddings"]
    assert main(["check", "deployments/pairs.yaml"]) == 0


@pytest.mark.parametrize("task", ["kto", "sft"])
def test_rated_conversations_are_judged_or_trained_on_where_the_rating_is_good(folder: Path, task: str) -> None:
    write("rated.jsonl", lambda draw: json.dumps({**json.loads(conversation(draw)), "label": draw.random() < 0.7}))
    chosen = ["--task", "sft"] if task == "sft" else []
    assert main(["init", "rated.jsonl", "--yes", "--model", "scratch", *chosen]) == 0
    data = dict(recipe_of("rated")["data"])  # type: ignore[call-overload]
    assert recipe_of("rated")["task"] == task and data["columns"] == {"messages": "messages"}
    assert data.get("filter") == ("label == True" if task == "sft" else None)
    assert main(["check", "deployments/rated.yaml"]) == 0


def test_texts_in_another_language_get_a_multilingual_model(folder: Path) -> None:
    write("mails.csv", lambda draw: labelled(",")(draw).replace("the", "für"), "text,label")
    assert main(["init", "mails.csv", "--model", "medium"]) == 0
    assert recipe_of("mails")["model"] == {"source": "hub", "path": "FacebookAI/xlm-roberta-base"}


def test_rare_labels_are_judged_and_chosen_by_the_macro_average(folder: Path) -> None:
    write(
        "2024.csv", lambda draw: f"{sentence(draw, 'pets')},{'rare' if draw.random() < 0.1 else 'usual'}", "text,label"
    )
    assert main(["init", "2024.csv"]) == 0
    recipe = recipe_of("2024")
    assert dict(recipe["evaluation"])["metrics"] == ["f1_macro", "accuracy"]  # type: ignore[call-overload]
    assert dict(recipe["training"])["metric_for_best_model"] == "f1_macro"  # type: ignore[call-overload]
    assert yaml.safe_load(Path("deployments/2024.yaml").read_text())["deployments"][0]["name"] == "2024"


def test_tools_get_a_model_whose_template_writes_them_and_a_metric_of_calls(folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "feed"}}]
    write("tools.jsonl", lambda draw: json.dumps({**json.loads(conversation(draw)), "tools": tools}))
    assert main(["init", "tools.jsonl"]) == 0
    assert dict(recipe_of("tools")["model"])["path"] == "Qwen/Qwen2.5-0.5B-Instruct"  # type: ignore[call-overload]
    metrics = ["perplexity", "token_accuracy", "tool_call_accuracy"]
    assert dict(recipe_of("tools")["evaluation"])["metrics"] == metrics  # type: ignore[call-overload]


def test_a_folder_that_cannot_be_made_is_one_message(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write("mails.csv", labelled(","), "text,label")
    Path("deployments").write_text("a file")
    assert main(["init", "mails.csv"]) == 2
    assert "deployments/mails.yaml cannot be written (File exists)" in capsys.readouterr().err


INJECTED = "pull: [{prefect.deployments.steps.run_shell_script: {script: id}}]"


@pytest.mark.parametrize("line_end", ["\n", "\r", "\x85", "\u2028", "\u2029"])
def test_names_and_labels_with_line_ends_and_codes_of_terminals_stay_in_their_comments_and_values(
    folder: Path, line_end: str
) -> None:
    importlib.import_module("prefect.cli.deployment")  # changes how PyYAML writes texts of several lines
    text, label = f"text{line_end}{INJECTED}{line_end}#", f"label{line_end} \x1b[31m"
    file, rows = f"mails{line_end}{INJECTED}{line_end}#.jsonl", list[str]()
    draw = random.Random(1)
    for _ in range(200):
        name = draw.choice([*LABELS])
        rows.append(json.dumps({text: sentence(draw, name), label: f"{name}{line_end}{INJECTED}{line_end}#\x1b[31m"}))
    Path(file).write_text("\n".join(rows))
    assert main(["init", file, "--yes", "--model", "scratch", "--name", "mails"]) == 0
    written = Path("deployments/mails.yaml").read_bytes().decode()
    assert "\x1b" not in written and "# 3 labels" in written
    document = yaml.safe_load(written)
    (deployment,) = document.pop("deployments")
    assert document == {} and deployment.keys() == {"name", "entrypoint", "work_pool", "parameters"}
    data = deployment["parameters"]["recipe"]["data"]
    assert (data["path"], data["text"], data["label"]) == (file, [text], label)


def test_a_name_that_is_no_unicode_is_written(folder: Path) -> None:
    file = os.fsdecode(b"mails\xff.csv")
    write(file, labelled(","), "text,label")
    assert main(["init", file, "--yes", "--model", "scratch", "--name", "mails"]) == 0
    assert dict(recipe_of("mails")["data"])["path"] == file  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("link", "is a link to"),
        ("pipe", "is a pipe, a socket or a device"),
        ('{"max_position_embeddings": "x", "hidden_size": [1], "num_hidden_layers": 1e999, "vocab_size": -1}', ""),
    ],
)
def test_a_model_folder_is_read_as_a_run_reads_it(
    folder: Path, config: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write("mails.csv", labelled(","), "text,label")
    (folder / "other.json").write_text("{}")
    model = folder / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(NO_WEIGHTS)
    (model / "tokenizer.json").write_text("{}" if message else Tokenizer(models.BPE()).to_str())
    if config == "link":
        (model / "config.json").symlink_to(folder / "other.json")
    elif config == "pipe":
        os.mkfifo(model / "config.json")
    else:
        (model / "config.json").write_text(config)
    assert main(["init", "mails.csv", "--yes", "--model", "model"]) == (2 if message else 0)
    assert message in capsys.readouterr().err


def test_a_recipe_is_not_written_where_others_can_change_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("mails.csv", labelled(","), "text,label")
    Path("deployments").chmod(0o777)
    assert main(["init", "mails.csv", "--yes", "--model", "scratch"]) == 2
    assert "could change deployments/mails.yaml before it is run" in capsys.readouterr().err
    assert not Path("deployments/mails.yaml").exists()


def test_a_recipe_is_not_one_that_others_may_write_whatever_the_umask_is(tmp_path: Path, home: Path) -> None:
    write(str(tmp_path / "mails.csv"), labelled(","), "text,label")
    before = os.umask(0)
    try:
        with contextlib.chdir(tmp_path):
            assert main(["init", "mails.csv", "--yes", "--model", "scratch"]) == 0
    finally:
        os.umask(before)
    for written in (tmp_path / "deployments", tmp_path / "deployments" / "mails.yaml"):
        assert not written.stat().st_mode & stat.S_IWOTH


@pytest.mark.parametrize(
    ("name", "content", "path", "said"),
    [
        (
            "one.csv",
            "text,label\n" + "some words here,spam\n" * 30,
            "one.csv",
            "column 'label' has the value 'spam' in all",
        ),
        (
            "price.csv",
            "text;price\n" + "some words here;3,5\nother words here;7\n" * 20,
            "price.csv",
            "write 3.5 for 3,5",
        ),
        ("columns.json", json.dumps({"text": ["some words"] * 30}), "columns.json", "has 1 row that can be read"),
        ("ragged.csv", "text,label\n" + "a,b\n" * 20 + "a,b,c\n" * 21, "ragged.csv", "Problems: ragged in 21 rows."),
        ("inner.json", json.dumps([{"review": {"text": "a b"}}] * 30), "inner.json", "review hold objects"),
        (
            "some.tab",
            "text\tteam\nstring\tdiscrete\nmeta\tclass\n" + "some words here\tsales\n" * 30,
            "some.tab",
            "sed 2,3d some.tab > some-rows.tab",
        ),
        ("texts/a/1.txt", "some words", "texts/b*/*.txt", "texts/b*/*.txt has no file of rows"),
    ],
)
def test_rows_that_no_recipe_can_read_are_refused_with_the_next_step(
    folder: Path, name: str, content: str, path: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content)
    assert main(["init", path]) == 2
    assert said in capsys.readouterr().err
    assert [*Path("deployments").glob("*.yaml")] == []


def test_a_glob_of_texts_is_their_folder_or_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label, words in LABELS.items():
        for number in range(10):
            file = Path("mails", label, f"{number}.txt")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"about {words[number % 3]} and {number} more")
    for glob in ("mails/*/*.txt", "mails/*", "mails/**/*.txt"):
        assert main(["init", glob, "--name", "mails", "--force", "--model", "scratch"]) == 0
        data = dict(recipe_of("mails")["data"])  # type: ignore[call-overload]
        assert (data["source"], data["path"], data["label"]) == ("textfolder", "mails", "label")
    assert main(["init", "mails/pets/*.txt", "--model", "scratch"]) == 0
    assert "label" not in dict(recipe_of("pets")["data"])  # type: ignore[call-overload]
    capsys.readouterr()
    assert main(["init", "mails/[pt]*", "--name", "some"]) == 2
    assert "leaves out 10 of the 30 texts of mails" in capsys.readouterr().err
    assert main(["init", "mails/pets/1.txt", "mails/pets/2.txt"]) == 2
    assert "a glob in quotation marks" in capsys.readouterr().err


def test_a_file_that_is_sorted_by_its_labels_is_for_a_classifier(folder: Path) -> None:
    rows = [f"some words here,{label}" for label in ("neg", "pos") for _ in range(3100)]
    Path("sorted.csv").write_text("\n".join(["text,label", *rows]))
    assert main(["init", "sorted.csv"]) == 0
    assert recipe_of("sorted")["task"] == "sequence-classification"
    assert "all have the label neg, as if sorted by it" in Path("deployments/sorted.yaml").read_text()


def test_rows_without_a_label_are_left_out_and_too_few_rows_to_promote_are_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        "part.csv",
        lambda draw: labelled(",")(draw) if draw.random() < 0.6 else f"{sentence(draw, 'pets')},",
        "text,label",
    )
    assert main(["init", "part.csv", "--model", "scratch"]) == 0
    assert dict(recipe_of("part")["data"])["checks"] == {"missing_label": "warning"}  # type: ignore[call-overload]
    printed = capsys.readouterr().out
    assert "About 40 rows of test are few: the gate finds only gains of 0.16 and more" in printed
    assert "no version is promoted" not in printed
    write("few.csv", labelled(","), "text,label", rows=30)
    assert main(["init", "few.csv", "--model", "scratch"]) == 0
    assert (
        "about 6 rows are held out for the test, and no version is promoted by fewer than 20" in capsys.readouterr().out
    )


def test_few_rows_get_more_epochs_and_random_weights_most(folder: Path) -> None:
    epochs = {}
    for rows in (100, 1200, 3100):
        write("rows.csv", labelled(","), "text,label", rows)
        for model in ("small", "scratch"):
            assert main(["init", "rows.csv", "--force", "--model", model]) == 0
            epochs[rows, model] = dict(recipe_of("rows")["training"])["num_train_epochs"]  # type: ignore[call-overload]
    assert [epochs[rows, "small"] for rows in (100, 1200, 3100)] == [10, 4, 3]
    assert [epochs[rows, "scratch"] for rows in (100, 1200, 3100)] == [20, 16, 3]


def test_a_missing_file_is_not_asked_for_on_the_hub(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "data/reviews.csv", "--yes"]) == 2
    said = capsys.readouterr().err
    assert "data/reviews.csv" in said and "Hub" not in said, said


def test_an_existing_recipe_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("mails.csv", labelled(","), "text,label")
    Path("deployments/mails.yaml").write_text("mine")
    assert main(["init", "mails.csv"]) == 2
    assert "--force" in capsys.readouterr().err
    assert Path("deployments/mails.yaml").read_text() == "mine"


def test_a_task_type_that_does_not_fit_is_refused_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("mails.csv", labelled(","), "text,label")
    assert main(["init", "mails.csv", "--task", "preference"]) == 2
    assert "choose from sequence-classification, causal-lm" in capsys.readouterr().err
    assert not Path("deployments/mails.yaml").exists()


def test_a_terminal_is_asked_with_the_guess_as_default(folder: Path) -> None:
    write("mails.csv", labelled(","), "text,label")
    main_end, terminal = pty.openpty()
    program = [sys.executable, "-c", "from flows.cli.main import start; start()", "init", "mails.csv"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(program, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.write(main_end, b"causal-lm\nscratch\n")
    assert child.wait(60) == 0
    os.close(terminal)
    os.close(main_end)
    recipe = recipe_of("mails")
    assert recipe["task"] == "causal-lm"
    assert dict(recipe["model"])["source"] == "scratch"  # type: ignore[call-overload]
