"""The program that creates a base model with random weights: `python -m training.programs.create_model JOB`.

inputs     data (train.arrow, whose texts the vocabulary is learned from), perhaps pinned
           (files that replace the model's)
settings   CreateModelSettings, below
output     model/ (config.json, safetensors), tokenizer/: the same bytes every time
result     ModelResult, below
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
from pyarrow import types

from training.data.ipc_files import read_batches
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, Result, Settings
from training.jobs.search_path import hide_package
from training.models.configurations import RECIPE, invalid_values, make_config
from training.models.repository_files import part_of
from training.tokenization.special_tokens import SPECIAL, sentinel

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

LARGEST_ALPHABET = 1000
"""Distinct characters kept, the most frequent ones; any other becomes [UNK], and in words of WordPiece all the word."""

Rows = Callable[[], Iterator[str]]
"""Returns an iterator over all texts."""


class ModelResult(Result):
    """The size of the model that training starts from."""

    parameters: int | None = None
    """Of a new model."""
    megabytes: float | None = None
    """The weights of a copied model, in 10^6 bytes."""
    vocab_size: int | None = None
    """Tokens that the model has; None if unknown."""


class CreateModelSettings(Settings):
    """The settings of a job of this program."""

    config: dict[str, Any]
    """The configuration of transformers, with model_type and vocab_size (upper bound, tokens)."""
    seed: int
    texts: list[str]
    """The columns with texts, or lists of texts, that the vocabulary is learnt from."""
    writes: bool
    """Whether the model generates text."""
    sentinels: int = 0
    """The tokens for missing spans of a text, in the vocabulary."""


def main(job_dir: Path, job: Job, events: Events) -> ModelResult:
    """Learns the vocabulary, draws the weights and saves both."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    settings = CreateModelSettings.model_validate(job.settings)
    config = settings.config
    make_config(config, RECIPE)  # a mistake in it is reported before the vocabulary is learnt
    data = Path(job.inputs["data"]) / "train.arrow"
    events.progress(phase="vocabulary")
    learn = learner(writes=settings.writes, sentinels=settings.sentinels)
    tokenizer = learn(lambda: texts(data, settings.texts), config["vocab_size"])
    events.progress(phase="model")
    model = create(config | {"vocab_size": tokenizer.get_vocab_size()}, tokenizer, settings.seed)
    # A head that takes the last token, as XLNet's does, needs the padding before it.
    side = "left" if getattr(model.config, "summary_type", None) == "last" else "right"
    longest = getattr(model.config, "max_position_embeddings", None)
    save_tokenizer(tokenizer, longest, job_dir / OUTPUT / "tokenizer", padding_side=side)
    with hide_package("deepspeed"):  # where it is installed, transformers would look for an engine of it: 2 seconds
        model.save_pretrained(job_dir / OUTPUT / "model")
    if "pinned" in job.inputs:
        for file in Path(job.inputs["pinned"]).iterdir():
            shutil.copyfile(file, job_dir / OUTPUT / str(part_of(file.name)) / file.name)
    return ModelResult(vocab_size=model.config.vocab_size, parameters=model.num_parameters())


def texts(file: Path, columns: Sequence[str]) -> Iterator[str]:
    """The texts of these columns of an Arrow file, a record batch at a time."""
    for batch in read_batches(file, mapped=False):
        for values in map(batch.column, columns):
            yield from (pc.list_flatten(values) if types.is_list(values.type) else values).to_pylist()


def learner(*, writes: bool, sentinels: int) -> Callable[[Rows, int], Tokenizer]:
    """The function that trains the tokenizer: one that decodes any text if the model generates texts or their missing
    spans."""
    if not sentinels:
        return train_bpe if writes else train_wordpiece

    def learn(rows: Rows, vocab_size: int) -> Tokenizer:
        tokenizer = train_bpe(rows, vocab_size - sentinels)
        tokenizer.add_special_tokens([sentinel(number) for number in range(sentinels)])
        return tokenizer

    return learn


def train_bpe(rows: Rows, vocab_size: int) -> Tokenizer:
    """A BPE tokenizer in SentencePiece's manner, of at most `vocab_size` tokens: what it takes apart, it puts together
    again as it was, case, accents and line breaks, but for ▁, which stands for a space. The same texts give the same
    vocabulary in every process."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL["unk_token"]))
    space = pre_tokenizers.Metaspace()
    marks = pre_tokenizers.Split(Regex(r"[\p{P}\p{S}\s&&[^▁]]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([space, marks])
    tokenizer.decoder = decoders.Metaspace()
    alphabet = _alphabet(row.replace(" ", space.replacement) for row in rows())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL.values()],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(rows(), trainer)
    return _with_ends(tokenizer)


def train_wordpiece(rows: Rows, vocab_size: int) -> Tokenizer:
    """A lower-casing WordPiece tokenizer in BERT's manner, of at most `vocab_size` tokens. The same texts give the same
    vocabulary in every process."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=True)
    learner = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk_token"]))
    learner.normalizer, learner.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    normal = (normalizer.normalize_str(row) for row in rows())
    alphabet = [character for character in _alphabet(normal) if not character.isspace()]
    # The trainer numbers the pieces "##x" in the order of a randomly seeded hash table and settles ties
    # between merges by number. Named as special tokens they have numbers beforehand; only the vocabulary is kept.
    pieces = [f"##{character}" for character in alphabet]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL.values(), *pieces],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner.train_from_iterator(rows(), trainer)
    tokenizer = Tokenizer(models.WordPiece(learner.get_vocab(), unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = learner.normalizer, learner.pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    return _with_ends(tokenizer)


def _with_ends(tokenizer: Tokenizer) -> Tokenizer:
    """Adds the special tokens around a text, and between two."""
    from tokenizers import processors

    tokenizer.add_special_tokens(list(SPECIAL.values()))
    ends = [(token, tokenizer.token_to_id(token)) for token in (SPECIAL["cls_token"], SPECIAL["sep_token"])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return tokenizer


def create(config: dict[str, Any], tokenizer: Tokenizer, seed: int) -> PreTrainedModel:
    """A model without a head, its weights drawn with `seed`; `config` has its model_type's own names. One that has
    tokens for the ends of a text has those of the tokenizer, not the numbers that they have by default."""
    from transformers import AutoConfig, AutoModel, set_seed

    model_type, fields = config["model_type"], {k: v for k, v in config.items() if k != "model_type"}
    fields["pad_token_id"] = tokenizer.token_to_id(SPECIAL["pad_token"])
    with invalid_values(RECIPE, f"{model_type} does not accept it"):
        made = AutoConfig.for_model(model_type, **fields)
    for name, token in {"bos_token_id": "cls_token", "eos_token_id": "sep_token"}.items():
        if name not in fields and getattr(made, name, None) is not None:
            setattr(made, name, tokenizer.token_to_id(SPECIAL[token]))
    made.architectures = made.architectures or []  # AutoModel iterates over them for a type with two models, as Funnel
    set_seed(seed)
    with invalid_values(RECIPE, f"no {model_type} can be made of it"):
        model: PreTrainedModel = AutoModel.from_config(made, trust_remote_code=False)
    return model


def save_tokenizer(tokenizer: Tokenizer, max_length: int | None, out: Path, *, padding_side: str = "right") -> None:
    """Writes the files that AutoTokenizer reads; `max_length` is the limit of tokens, if there is one."""
    from transformers import PreTrainedTokenizerFast

    limit: dict[str, Any] = {} if max_length is None else {"model_max_length": max_length}
    if padding_side != "right":
        limit["padding_side"] = padding_side
    names = ["input_ids", "token_type_ids", "attention_mask"]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **SPECIAL, **limit)
    wrapped.save_pretrained(out)


def _alphabet(normalized: Iterator[str]) -> list[str]:
    """The most frequent characters, in order; between equally frequent ones the lower code point wins."""
    counts: Counter[str] = Counter()
    for row in normalized:
        counts.update(row)
    by_frequency = sorted(counts, key=lambda c: (-counts[c], c))
    return sorted(by_frequency[:LARGEST_ALPHABET])


if __name__ == "__main__":
    run_program(main)
