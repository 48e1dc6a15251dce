"""The repositories of deployments/sst2.yaml, made small: GLUE's SST-2, and a DistilBERT with its tokenizer."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.flows.small import BAD, FILLER, GOOD

ROWS, MODEL = "nyu-mll/glue", "distilbert/distilbert-base-uncased"

CARD = """---
configs:
- config_name: cola
  data_files:
  - {split: train, path: cola/train-*}
- config_name: sst2
  data_files:
  - {split: train, path: sst2/train-*}
  - {split: validation, path: sst2/validation-*}
dataset_info:
- config_name: sst2
  features:
  - {name: sentence, dtype: string}
  - {name: label, dtype: {class_label: {names: {'0': negative, '1': positive}}}}
  - {name: idx, dtype: int32}
---
"""


def parquet(rows: int, seed: int) -> bytes:
    """Reviews whose label hangs on one word, in the columns of GLUE's SST-2."""
    draw = random.Random(seed)
    labels = [draw.randrange(2) for _ in range(rows)]
    sentences = [" ".join([*draw.choices(FILLER, k=draw.randint(3, 9)), draw.choice((BAD, GOOD)[n])]) for n in labels]
    columns = [pa.array(sentences), pa.array(labels, pa.int64()), pa.array(range(rows), pa.int32())]
    file = io.BytesIO()
    pq.write_table(pa.table(columns, names=["sentence", "label", "idx"]), file)
    return file.getvalue()


def sst2_files(train_rows: int = 160) -> dict[str, bytes]:
    """The data set, a small one."""
    return {
        "README.md": CARD.encode(),
        "cola/train-00000-of-00001.parquet": parquet(4, seed=1),
        "sst2/train-00000-of-00001.parquet": parquet(train_rows, seed=2),
        "sst2/validation-00000-of-00001.parquet": parquet(40, seed=3),
    }


def distilbert_files(folder: Path) -> dict[str, bytes]:
    """A DistilBERT of some thousand weights with its tokenizer, and other files that must not be loaded."""
    from training.programs.create_model import create, save_tokenizer, train_wordpiece

    tokenizer = train_wordpiece(lambda: iter([" ".join([*GOOD, *BAD, *FILLER])]), 200)
    save_tokenizer(tokenizer, 128, folder)
    config = {"model_type": "distilbert", "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    config |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 128}
    create(config, tokenizer, seed=1).save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {
        "README.md": b"# A small one",
        "pytorch_model.bin": b"\x80\x04. a pickle",
        "modeling_evil.py": b"raise SystemExit('code of the repository was run')",
        "onnx/model.safetensors": b"another format",
    }
