"""The program that tokenizes as transformers does: `python -m training.slow_tokens JOB`.

For tokenizers that exist only in Python, and for those whose class builds another tokenizer than tokenizer.json holds.
The latter lose nothing but the seconds in which transformers is imported: they encode with all cores, like any other.

inputs     data (SPLIT.arrow), tokenizer and model (the folders of a snapshot)
settings   kind, options, max_length, level (what it is that rows are cut: error, warning or ignore)
output     what `training.tokens.write` writes
figures    rows, tokens, truncated and lost of all splits together
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training import kinds
from training.problems import Problem, UserError
from training.program import run_program
from training.protocol import OUTPUT, Events, Job
from training.tokens import Encoded, Encoder, FastEncoder, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Tokenize every split; gives the figures."""
    events.progress(phase="tokenizer")
    encoder = load_encoder(Path(job.inputs["tokenizer"]), Path(job.inputs["model"]), job.settings["max_length"])
    return write(
        kinds.of(job.settings),
        Path(job.inputs["data"]),
        encoder,
        job_dir / OUTPUT,
        job.settings["level"],
        lambda done, total: events.progress(done=done, total=total),
    )


def load_encoder(tokenizer: Path, model: Path, max_length: int) -> Encoder:
    """What AutoTokenizer makes of the folder. Raises UserError where it can make nothing of it."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from training.model import load_tokenizer

    try:
        loaded = load_tokenizer(tokenizer, model)
    except Exception as error:  # whatever a class makes of files that it does not expect
        message = f"AutoTokenizer cannot load it: {error}. Save the tokenizer again with save_pretrained()."
        raise UserError([Problem(kind="tokens", where=str(tokenizer), message=message)]) from error
    kind = type(loaded)
    if (
        isinstance(loaded, PreTrainedTokenizerFast)
        and kind.__call__ is PreTrainedTokenizerBase.__call__
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
    ):
        split = loaded.split_special_tokens
        return FastEncoder(
            loaded.backend_tokenizer,
            max_length,
            side=loaded.truncation_side,
            split_special_tokens=split,
            eos=loaded.eos_token_id,
        )
    return PythonEncoder(loaded, max_length)


class PythonEncoder:
    """A tokenizer that has a way of its own to encode, in Python."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.max_length, self.eos = max_length, tokenizer.eos_token_id
        self._tokenizer = tokenizer

    def special_tokens(self, pairs: bool) -> int:
        return int(self._tokenizer.num_special_tokens_to_add(pair=pairs))

    def encode_whole(self, texts: list[str]) -> Encoded:
        rows = self._tokenizer(texts, truncation=False, verbose=False)["input_ids"]
        lengths = np.fromiter(map(len, rows), np.int32, len(texts))
        ids = np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))
        return Encoded(lengths, ids, None, np.zeros(len(texts), np.int64))

    def words_of(self, texts: list[str]) -> np.ndarray[Any, np.dtype[np.int32]]:
        message = (
            f"{type(self._tokenizer).__name__} does not tell which word a token is of: set it to false, or choose "
        )
        message += "a model whose tokenizer is one of the tokenizers library."
        raise UserError([Problem(kind="tokens", where="options.whole_words", message=message)])

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        rows = self._tokenizer(
            texts, pairs, truncation=True, max_length=self.max_length, return_token_type_ids=pairs is not None
        )
        lengths = np.fromiter(map(len, rows["input_ids"]), np.int32, len(texts))
        lost = np.zeros(len(texts), np.int64)
        if len(full := np.flatnonzero(lengths >= self.max_length)):
            lost[full] = self._uncut_lengths(texts, pairs, full.tolist()) - lengths[full]
        total = int(lengths.sum())
        types = None if pairs is None else np.fromiter(chain.from_iterable(rows["token_type_ids"]), np.int8, total)
        return Encoded(lengths, np.fromiter(chain.from_iterable(rows["input_ids"]), np.int32, total), types, lost)

    def encode_words(self, rows: list[list[str]]) -> Encoded:
        """Raises UserError: Python's tokenizers do not tell which word a token is of."""
        message = (
            f"{type(self._tokenizer).__name__} encodes in Python and does not tell which word a token is of: choose a "
            "model with a tokenizer.json that AutoTokenizer takes as it is."
        )
        raise UserError([Problem(kind="tokens", where=str(self._tokenizer.name_or_path), message=message)])

    def _uncut_lengths(self, texts: list[str], pairs: list[str] | None, rows: list[int]) -> np.ndarray[Any, Any]:
        chosen = [None if column is None else [column[row] for row in rows] for column in (texts, pairs)]
        whole = self._tokenizer(*chosen, truncation=False, verbose=False)["input_ids"]
        return np.fromiter(map(len, whole), np.int64, len(rows))


if __name__ == "__main__":
    run_program(main)
