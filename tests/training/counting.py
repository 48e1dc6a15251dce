"""An assistant that counts: a GPT-2 whose weights say which word follows which, so that every answer is known.

The last word of the prompt decides: after `three` comes `four five … nine`, after `on` comes `on` for ever, after
`tool` a call, after `look` the word `so` and a call behind a special token. The chat template writes the tools,
the questions and answers one after another, behind them the system's message, and after the question `count` the number
of messages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
CALL = '<tool_call>{"name":"count","arguments":{"to":3}}</tool_call>'
MARK, MARKED = "[TOOL_CALLS]", 'count[ARGS]{"to":3}'
WORDS = ["<pad>", "<unk>", "<end>", *NUMBERS, "on", "count", "tool", CALL, "look", "so", MARK, MARKED]
FOLLOWS = dict(zip(NUMBERS, [*NUMBERS[1:], "<end>"], strict=True)) | {"on": "on", "tool": CALL}
FOLLOWS |= dict.fromkeys(("count", "<end>", CALL, MARKED), "<end>") | {"look": "so", "so": MARK, MARK: MARKED}
POSITIONS = 4096
TEMPLATE = """\
{%- set numbers = "one two three four five six seven eight nine".split() -%}
{%- if tools %}{{ tools | tojson }} {% endif -%}
{%- for message in messages if message.role != "system" -%}
{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }} {% endfor -%}
{%- if messages[0].role == "system" -%}{{ messages[0].content }} {% endif -%}
{%- if messages[-1].content == "count" -%}{{ numbers[messages | length - 1] }}{%- endif -%}"""


def write_classifier(folder: Path, shift: int, positions: int = POSITIONS) -> Path:
    """The model and tokenizer of a classifier: the label of a text is the number that is `shift` behind its last word.
    With fewer positions than a row has words, it loads and fails."""
    import torch
    from transformers import GPT2Config, GPT2ForSequenceClassification

    write_assistant(folder)
    labels = dict(enumerate(NUMBERS))
    config = GPT2Config(
        vocab_size=len(WORDS), n_embd=len(WORDS), n_layer=1, n_head=1, n_positions=positions, pad_token_id=0,
        id2label=labels, label2id={name: number for number, name in labels.items()},
    )  # fmt: skip
    model = GPT2ForSequenceClassification(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wte.weight.copy_(torch.eye(len(WORDS), config.n_embd))
        for number, word in labels.items():
            model.score.weight[(number + shift) % len(NUMBERS), WORDS.index(word)] = 5
    model.save_pretrained(folder)
    return folder


def write_assistant(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Its model and its tokenizer, as training exports them, in the folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(WORDS)}
    config = GPT2Config(
        vocab_size=len(WORDS), n_embd=len(WORDS), n_layer=1, n_head=1, n_positions=POSITIONS, tie_word_embeddings=False,
        bos_token_id=words["<end>"], eos_token_id=words["<end>"], pad_token_id=words["<pad>"],
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wte.weight.copy_(torch.eye(len(WORDS), config.n_embd))
        for before, after in FOLLOWS.items():
            model.lm_head.weight[words[after], words[before]] = 1
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names: dict[str, Any] = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<end>"}
    names["additional_special_tokens"] = [MARK]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names).save_pretrained(folder)
    return folder
