"""Supervised fine-tuning: rows of three sorts, which of their tokens are learnt, and that packed ones stay whole."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.arrow import write_arrow
from tests.fork_server import NEW_PYTHON
from tests.training import programs_here, tiny
from tests.training.data.test_forms import problems_of
from tests.training.forks import assert_resumes, curve, finish
from tests.training.vocabularies import CHAT, ROBERTA, chat, roberta, save_repository
from training.batching.batches import IGNORED, TokenRows
from training.data.ipc_files import ipc_writer
from training.data.prediction_rows import RowReader, WantedShard, digest_inputs
from training.engine.predictor import Predictor
from training.models.loading import load_tokenizer
from training.problems import UserError
from training.programs import create_model, predict_shards
from training.programs.predict_shards import PredictShardsSettings
from training.recipe import Training
from training.task_types.sft import SupervisedFineTuning
from training.tokenization import chat_templates, token_files, transformers_encoder
from training.tokenization import encoder as encoder_module
from training.tokenization.chat_templates import ChatTemplate, find_problem
from training.tokenization.packing import pack_whole_documents

ROOT = Path(__file__).parents[3]
EXAMPLE = (ROOT / "deployments/examples/chat.jinja").read_text()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
MARKED = CHATML.replace(
    "{{ m.content }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}",
)
REWRITES = CHATML.replace("{{ m.content }}", "{% if loop.last %}<think> {% endif %}{{ m.content }}")
TURNS = (("user", "b c"), ("assistant", "d"), ("user", "e"), ("assistant", "f g"))
USER, BOT, AGAIN, LAST = ({"role": role, "content": content} for role, content in TURNS)
KIND = SupervisedFineTuning()


def words(folder: Path, template: str | None = CHATML, **settings: Any) -> Path:
    """A tokenizer of a token a word: <|im_start|> 0, <|im_end|> 1, user 2, assistant 3, a 4, b 5, c 6, …"""
    vocabulary = ["<|im_start|>", "<|im_end|>", "user", "assistant", *"abcdefghij"]
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(vocabulary)}, unk_token="a"))
    made.add_special_tokens(vocabulary[:2])
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template_settings = {} if template is None else {"chat_template": template}
    return save_repository(folder, "llama", made, {"eos_token": "<|im_end|>", **template_settings, **settings})


def learnt(folder: Path, rows: Mapping[str, list[Any]], most: int = 64, **options: Any) -> list[tuple[Any, ...]]:
    """The ids of each row, and which of them are learnt."""
    spelt = {name: [json.dumps(v) if isinstance(v, list) else v for v in values] for name, values in rows.items()}
    made = (
        SupervisedFineTuning(options)
        .features(encoder_module.load_fast_encoder(folder, most), pa.record_batch(spelt))
        .rows
    )
    assert made["targets"].to_pylist() == [sum(row) for row in made["of_answer"].to_pylist()]
    assert made["length"].to_pylist() == [len(row) for row in made["input_ids"].to_pylist()]
    return list(zip(made["input_ids"].to_pylist(), made["of_answer"].to_pylist(), strict=True))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_of_a_conversation_its_answers_and_what_ends_them_are_learnt(tmp_path: Path, template: str) -> None:
    folder = words(tmp_path / "it", template)
    assert learnt(folder, {"messages": [[USER, BOT, AGAIN, LAST], [USER]]}) == [
        (
            [0, 2, 5, 6, 1, 0, 3, 7, 1, 0, 2, 8, 1, 0, 3, 9, 10, 1],
            [0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1],
        ),
        ([0, 2, 5, 6, 1, 0, 3], [0] * 7),
    ]
    once = {"instruction": ["b c", "b", "b"], "input": ["", "c", None], "output": ["d", "d", "d"]}
    written = [([0, 2, *prompt, 1, 0, 3, 7, 1], [0] * (5 + len(prompt)) + [1, 1]) for prompt in ([5, 6], [5, 6], [5])]
    assert learnt(folder, once) == written
    rows = learnt(folder, {"instruction": ["b c"]})
    assert rows == [([0, 2, 5, 6, 1, 0, 3], [0] * 7)] == learnt(folder, {"messages": [[USER]]})


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_an_answer_with_the_weight_0_is_context_and_one_with_the_weight_1_is_learnt(
    tmp_path: Path, template: str
) -> None:
    folder = words(tmp_path / "it", template)
    first, second = BOT | {"weight": 0}, LAST | {"weight": 1}
    ((ids, mask),) = learnt(folder, {"messages": [[USER | {"weight": 0}, first, AGAIN, second]]})
    assert ids == learnt(folder, {"messages": [[USER, BOT, AGAIN, LAST]]})[0][0]
    assert mask == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_weights_of_messages_other_than_0_and_1_and_answers_that_all_have_0_are_named() -> None:
    wrong = [[USER, LAST | {"weight": weight}] for weight in (0.5, "1", 2, -1)]
    assert [find_problem(row, answered=True) for row in wrong] == [
        f"weight of message 2 is {weight}, and must be 0 or 1" for weight in ("0.5", "'1'", "2", "-1")
    ]
    assert find_problem([USER, LAST | {"weight": None}], answered=True) is None
    assert find_problem([USER | {"weight": 1}, LAST], answered=True) == (
        "message 1, by 'user', has the weight 1, which only the assistant's may have"
    )
    assert find_problem([USER, BOT | {"weight": 0}], answered=True) == (
        "all messages by 'assistant' have the weight 0, so none is trained on"
    )


def test_a_template_that_marks_several_answers_as_one_is_refused_if_one_has_the_weight_0() -> None:
    whole = ChatTemplate("{% generation %}{% for m in messages %}{{ m.content }} {% endfor %}{% endgeneration %}", {})
    with pytest.raises(UserError, match="marks 1 answers of 2 in the conversation 'b c'"):
        whole.render_answers([USER, BOT | {"weight": 0}, AGAIN, LAST])


def test_completions_that_repeat_their_prompt_are_counted(tmp_path: Path) -> None:
    encoder = encoder_module.load_fast_encoder(words(tmp_path / "it", None), 64)
    rows = pa.record_batch({"prompt": ["b c", "b c"], "completion": ["b c d", " d"]})
    assert KIND.features(encoder, rows).remarks["repeated_in_completion"] == 1


def test_of_a_prompt_with_its_completion_that_and_the_eos_token_are_learnt_without_any_template(tmp_path: Path) -> None:
    folder = words(tmp_path / "it", None)
    both = {"prompt": ["b c", "b "], "completion": [" d", "d <|im_end|>"]}
    assert learnt(folder, both) == [([5, 6, 7, 1], [0, 0, 1, 1]), ([5, 7, 1], [0, 1, 1])]
    assert learnt(folder, both, append_eos=False)[0] == ([5, 6, 7], [0, 0, 1])
    assert learnt(folder, {"prompt": ["b c"]}) == [([5, 6], [0, 0])]
    with pytest.raises(UserError, match=r"model\.chat_template: is missing"):
        learnt(folder, {"messages": [[USER, BOT]]})


def test_prompts_and_completions_have_the_tokens_and_masks_that_trl_gives_them(tmp_path: Path) -> None:
    prompts, completions = ["The quick brown", "short:", "Fünf\n"], [" fox jumps", " Äpfel", "日本語"]
    for name, tokenizer, settings in (("chat", chat(), CHAT), ("first", chat(bos=True), CHAT)):
        folder = save_repository(tmp_path / name, "llama", tokenizer, settings)
        library = AutoTokenizer.from_pretrained(folder)
        found = learnt(folder, {"prompt": prompts, "completion": completions})
        for (ids, mask), prompt, completion in zip(found, prompts, completions, strict=True):
            # trl.SFTTrainer._prepare_dataset of rows that are no conversations
            prompt_ids = library(text=prompt)["input_ids"]
            both = library(text=prompt + completion + library.eos_token)["input_ids"]
            assert both[: len(prompt_ids)] == prompt_ids
            assert (ids, mask) == (both, [0] * len(prompt_ids) + [1] * (len(both) - len(prompt_ids)))


def test_tokens_that_the_tokenizer_adds_at_the_end_follow_a_completion_and_no_prompt(tmp_path: Path) -> None:
    folder = save_repository(tmp_path / "it", "roberta", roberta(), ROBERTA)
    (ids, mask), spaced = learnt(folder, {"prompt": ["The", "The "], "completion": [" fox", "fox"]})
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [made.id_to_token(token) for token in ids] == ["<s>", "T", "he", "Ġ", "f", "ox", "</s>"]
    assert mask == [0, 0, 0, 1, 1, 1, 1] and spaced == (ids, mask)
    assert learnt(folder, {"prompt": ["The"]}) == [(ids[:3], [0, 0, 0])]


@pytest.mark.parametrize(
    "template", [EXAMPLE, MARKED.replace("role }} ", "role }}\n").replace("assistant ", "assistant\n")]
)
@pytest.mark.parametrize("by_class", [False, True])
def test_marked_answers_are_those_that_the_library_masks(tmp_path: Path, template: str, by_class: bool) -> None:
    folder = save_repository(tmp_path / "it", "llama", chat(), {**CHAT, "chat_template": "never read"})
    (folder / "chat_template.jinja").write_text(template)
    library = AutoTokenizer.from_pretrained(folder)
    conversations = [[USER, {"role": "assistant", "content": "Fünf Äpfel, 日本語"}, AGAIN, LAST], [AGAIN, LAST]]
    encoder = (
        transformers_encoder.load_encoder(folder, folder, 200)
        if by_class
        else encoder_module.load_fast_encoder(folder, 200)
    )
    rows = {"messages": list(map(json.dumps, conversations))}
    made = KIND.features(encoder, pa.record_batch(rows)).rows
    for messages, ids, mask in zip(
        conversations, made["input_ids"].to_pylist(), made["of_answer"].to_pylist(), strict=True
    ):
        theirs = library.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert (ids, mask) == (theirs["input_ids"], theirs["assistant_masks"]) and 0 < sum(mask) < len(mask)
    for messages, prompt in zip(
        conversations, KIND.prompts(encoder, pa.record_batch(rows), GenerationConfig()), strict=True
    ):
        theirs = library.apply_chat_template(messages[:-1], add_generation_prompt=True)
        assert prompt.ids.tolist() == theirs["input_ids"]


def test_a_template_that_rewrites_messages_is_refused_unless_it_marks_the_answers(tmp_path: Path) -> None:
    spoken = [USER, BOT, AGAIN, LAST]
    with pytest.raises(UserError, match=r"changes message 2 of the conversation 'b c' .* {% generation %}"):
        learnt(words(tmp_path / "rewrites", REWRITES), {"messages": [spoken]})
    marked = ChatTemplate(MARKED.replace("{{ m.role }}", "{{ m.role }}{% if loop.last %} now{% endif %}"), {})
    text, spans = marked.render_answers(spoken)
    assert [text[start:end] for start, end in spans] == ["d<|im_end|>", "f g<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ today }}{{ today.year }}", "'today' is undefined"),
        ("{{ messages + 1 }}", "can only concatenate list"),
    ],
)
def test_an_error_of_a_template_is_reported_with_the_conversation(template: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"model\.chat_template: cannot write the conversation 'b c': .*{why}"):
        ChatTemplate(template, {}).render_answers([USER, BOT])


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 3000000000 }}",
        "{{ 'x' * (messages|length * 3000000000) }}",
        "{% for i in range(100000) %}{{ 'x' * 1000000 }}{% endfor %}",
        "{% set a = range(100000)|list %}{% for i in a %}{% for j in a %}{% endfor %}{% endfor %}",
        "{{ 99999 ** 99999 ** 99 }}",
        "{% set n = namespace(x=10) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ 'x'.ljust(5 * 10 ** 9)|length }}",
        "{{ ('y' * 100000).join('x' * 100000)|length }}",
    ],
)
def test_a_template_without_end_is_ended(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "LONGEST_S", 0.5)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(UserError, match="it writes more than 20,000,000 characters, or takes longer than"):
        chat_templates.ChatTemplate(template, {}).render_prompt([{"role": "user", "content": "hi"}])
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.slow
@pytest.mark.parametrize("template", ["{{ ([[0] * 900] * 99999)|sum(start=[]) }}", "{{ 2.5|round(10 ** 9, 'ceil') }}"])
def test_a_template_with_an_operation_without_end_ends_with_its_process(template: str) -> None:
    program = "from training.tokenization import chat_templates; chat_templates.LONGEST_S = 0.3; "
    program += f"chat_templates.ChatTemplate({template!r}, {{}}).render_prompt([{{'role': 'user', 'content': 'hi'}}])"
    child = subprocess.run([NEW_PYTHON, "-c", program], stderr=subprocess.PIPE, text=True, timeout=120)
    assert child.returncode == -signal.SIGPROF and "chat_templates.py" in child.stderr


@pytest.mark.parametrize(
    "dated",
    [
        "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}26 Jul 2024{% endif %}",
        "{% if strftime_now is not defined %}26 Jul 2024{% else %}{{ strftime_now('%d') }}{% endif %}",
        "{{ strftime_now('%d %b %Y') }}",
    ],
)
def test_a_template_that_uses_the_date_gets_a_fixed_one(dated: str) -> None:
    assert ChatTemplate(dated + ": {{ messages[0].content }}", {}).render_prompt([USER]) == "26 Jul 2024: b c"


IGNORES = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
SYSTEM = {"role": "system", "content": "h"}
CALL = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize("template", [IGNORES, MARKED.replace("messages %}", "messages if m.role != 'system' %}")])
def test_a_template_that_does_not_write_a_message_or_its_calls_is_refused(template: str) -> None:
    chat_template = ChatTemplate(template, {})
    for render in (chat_template.render_answers, chat_template.render_last_answer, chat_template.render_prompt):
        with pytest.raises(
            UserError, match="does not write the content of message 1, by 'system', of the conversation"
        ):
            render([SYSTEM, USER, BOT])
        with pytest.raises(UserError, match="does not write the tool_calls of message 2, by 'assistant'"):
            render([USER, BOT | CALL])
        render([SYSTEM | {"content": " "}, USER, BOT | {"tool_calls": []}])


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("<|im_end|>", None),
        ("\n{{ eos_token }}", None),
        ("<|eot|>\n", "ends answers with '<|eot|>\\n', which is no special token of the tokenizer"),
        ("", "ends answers without an end token"),
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_a_template_whose_answers_end_with_no_token_that_ends_them_is_reported(
    end: str, words: str | None, marked: bool, tmp_path: Path
) -> None:
    template = (MARKED if marked else CHATML).replace("<|im_end|>", end)
    tokenizer = save_repository(tmp_path / "it", "llama", chat(), {**CHAT, "chat_template": template})
    spoken = {"messages": [json.dumps([USER, BOT])]}
    for name, rows in {"talks": spoken, "texts": {"prompt": ["b"], "completion": ["c"]}}.items():
        (tmp_path / name).mkdir()
        with ipc_writer(tmp_path / name / "train.arrow", pa.record_batch(rows).schema) as writer:
            writer.write(pa.record_batch(rows))
        token_files.tokenize(KIND, tmp_path / name, tokenizer, tmp_path / name / "tokens", 64)
        problems = json.loads((tmp_path / name / "tokens/log/report.json").read_text())["problems"]
        found = [problem["message"] for problem in problems if problem["where"] == "model.chat_template"]
        assert len(found) == (words is not None and name == "talks") and all(words in message for message in found)


@pytest.mark.parametrize(
    "content", ["m.content | upper", "m.content | tojson", "m.content.split('</think>')[-1]", "m.content | trim"]
)
def test_a_template_may_write_contents_in_another_way_or_only_a_part_of_them(content: str) -> None:
    said = {"role": "assistant", "content": "<think>\nno</think>yes é "}
    chat_template = ChatTemplate(CHATML.replace("{{ m.content }}", f"{{{{ {content} }}}}"), {})
    chat_template.render_answers([SYSTEM, USER, said])
    with_calls = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls }}{% endif %}")
    assert "'name': 'f'" in ChatTemplate(with_calls, {}).render_answers([USER, said | CALL])[0]


def test_a_conversation_is_written_without_torch() -> None:
    code = (
        "import sys; from training.tokenization.chat_templates import ChatTemplate; "
        "print(ChatTemplate('{{ messages[0].content }}', {}).render_prompt([{'content': 'b'}]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "b False\n", done.stderr


def test_rows_that_are_no_conversation_are_named(tmp_path: Path) -> None:
    good = [USER, BOT]
    turn = {"role": "assistant", "content": " "}
    wrong: list[Any] = ["b", [], [USER], [{"role": "bot", "content": "d"}], [USER, {"role": "assistant"}], [*good, 1]]
    wrong += [[USER, turn], [USER, turn], [USER, turn | {"content": [1]}], {"from": "human"}]
    problems = [find_problem(row, answered=True) for row in wrong]
    assert problems == [
        "it is a text, and must be a list of messages",
        "it has no message",
        "its last message is by 'user', and must be by 'assistant'",
        "message 1 is by 'bot', and roles are system, user, assistant, tool",
        "message 2 has no content: it has role",
        "message 3 is a number, and must have role and content",
        *["message 2, by 'assistant', is empty"] * 2,
        "content of message 2 is a list, and must be a text",
        "it is an object, and must be a list of messages",
    ]
    assert find_problem([{"role": "system", "content": ""}, *good], answered=True) is None  # many data sets have such
    rows = [{"messages": row} for row in (good, [USER, BOT, AGAIN, LAST], *wrong)]
    found = [f"messages row 9: has no conversation in column 'messages' ({problems[6]}) (2 rows like this: 9, 10)"]
    for row, problem in zip((3, 4, 5, 6, 7, 8, 11), [*problems[:6], problems[8]], strict=True):
        found.append(f"messages row {row}: has no conversation in column 'messages' ({problem})")
    found.append("messages row 12: has no conversation in column 'messages' (for less frequent reasons)")
    assert problems_of(KIND, rows, tmp_path) == found


@pytest.mark.parametrize(
    "text", ["{% for m in messages %}{{ m.text }}{% endfor %}", "a{% generation %}{% endgeneration %}"]
)
def test_a_template_that_writes_no_answer_is_reported_as_such(text: str) -> None:
    with pytest.raises(UserError, match=r"^model\.chat_template: writes no answer"):
        ChatTemplate(text, {}).render_answers([USER, BOT])


def test_a_tokenizer_that_does_not_tell_where_tokens_begin_is_refused(tmp_path: Path) -> None:
    settings = {"tokenizer_class": "ByT5Tokenizer", "pad_token": "<pad>", "chat_template": CHATML}
    folder = save_repository(tmp_path / "it", "bert", None, settings)
    with pytest.raises(UserError, match="ByT5Tokenizer encodes in Python and does not map tokens to characters"):
        KIND.features(transformers_encoder.load_encoder(folder, folder, 64), pa.record_batch({"prompt": ["b"]}))


def write_rows(folder: Path, **splits: list[Any]) -> Path:
    folder.mkdir()
    for split, rows in splits.items():
        table = pa.table({"messages": list(map(json.dumps, rows))})
        write_arrow(folder / f"{split}.arrow", table)
    return folder


def test_rows_are_cut_on_the_right_and_those_without_an_answer_left_are_counted_and_not_packed(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "a " * 6}, LAST]
    data = write_rows(tmp_path / "data", train=[[USER, LAST], long], validation=[long, [USER, LAST]])
    folder, out = words(tmp_path / "it", truncation_side="left"), tmp_path / "tokens"
    found = token_files.tokenize(KIND, data, folder, out, 9)
    assert (found.truncated, found.lost) == (4, 2 * (1 + 5))
    report = json.loads((out / "log/report.json").read_text())
    empty = [one["message"].partition(":")[0] for one in report["problems"] if "cuts off all targets" in one["message"]]
    assert empty == [f"9 cuts off all targets in 1 of 2 rows of {split}" for split in ("train", "validation")]
    train, validation = (TokenRows(out / f"{split}.arrow") for split in ("train", "validation"))
    assert (len(train), train.targets.tolist()) == (1, [2])
    assert validation.targets.tolist() == [0, 2] and validation.lengths.tolist() == [9, 9]
    batch = KIND.collator(load_tokenizer(folder), 1)([validation[0]])
    assert KIND.target_count(batch) == 0 and (batch["labels"] == IGNORED).all()
    more = write_rows(tmp_path / "more", train=[long])
    for task in (KIND, SupervisedFineTuning({"packing": False})):
        with pytest.raises(UserError, match="8 cuts off all answers of train"):
            token_files.tokenize(task, more, folder, tmp_path / "none", 8)


def test_rows_that_the_template_refuses_are_counted_in_each_split_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "BYTES_AT_ONCE", 100)  # several parts
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    folder = words(tmp_path / "it", refusal + CHATML)
    refused = [{"role": "system", "content": "c"}, USER, BOT]
    train = [[USER, BOT], refused, [USER, BOT], *[refused] * 3]
    data = write_rows(tmp_path / "data", train=train, validation=[refused], test=[[USER, BOT]])
    with pytest.raises(UserError) as found:
        token_files.tokenize(KIND, data, folder, tmp_path / "tokens", 9)
    why = "it cannot write the conversation 'c': no system. Change the template, or the rows. To leave such rows "
    why += "out, set data.checks.refused_by_template: warning."
    assert str(found.value).splitlines() == [
        f"model.chat_template: refuses 4 of 6 rows of train (2, 4, 5, …). Row 2: {why}",
        f"model.chat_template: refuses 1 of 1 rows of validation (1). Row 1: {why}",
    ]


def test_a_length_that_leaves_an_evaluated_split_without_answers_is_refused(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "a " * 6}, LAST]
    data = write_rows(tmp_path / "data", train=[[USER, LAST], long], validation=[long, long])
    with pytest.raises(UserError) as refused:
        token_files.tokenize(KIND, data, words(tmp_path / "it"), tmp_path / "tokens", 9, level="ignore")
    (problem,) = [problem for problem in refused.value.problems if problem.level == "error"]
    assert problem.where == "tokens.max_length" and problem.message == "9 cuts off all targets of validation: raise it."


def test_conversations_are_packed_whole_into_the_fullest_row_that_has_room() -> None:
    lists = [[1, 1], [2, 2, 2, 2], [3, 3, 3], [4], [5, 5, 5, 5, 5], [6, 6]]
    lengths = np.array(list(map(len, lists)), np.int32)
    made = pack_whole_documents(
        pa.RecordBatch.from_pydict(
            {
                "input_ids": pa.array(lists, pa.list_(pa.int32())),
                "of_answer": pa.array([[0] * (len(one) - 1) + [1] for one in lists], pa.list_(pa.int8())),
                "length": lengths,
                "targets": np.ones(6, np.int32),
            }
        ),
        6,
    )
    assert made.schema.field("length").type == made.schema.field("targets").type == pa.int32()
    assert made.to_pylist() == [
        {"input_ids": [5, 5, 5, 5, 5, 4], "of_answer": [0, 0, 0, 0, 1, 1], "length": 6, "targets": 2, "starts": [0, 5]},
        {"input_ids": [2, 2, 2, 2, 1, 1], "of_answer": [0, 0, 0, 1, 0, 1], "length": 6, "targets": 2, "starts": [0, 4]},
        {"input_ids": [3, 3, 3, 6, 6], "of_answer": [0, 0, 1, 0, 1], "length": 5, "targets": 2, "starts": [0, 3]},
    ]


def test_a_packed_conversation_gets_the_logits_and_the_loss_that_it_gets_alone(tmp_path: Path) -> None:
    folder = words(tmp_path / "it", MARKED, pad_token="j")
    spoken = [[USER, BOT, AGAIN, LAST], [USER, LAST], [AGAIN, BOT]]
    data = write_rows(tmp_path / "data", train=spoken, validation=spoken)
    token_files.tokenize(KIND, data, folder, tmp_path / "tokens", 40)
    packed, alone = (TokenRows(tmp_path / f"tokens/{split}.arrow") for split in ("train", "validation"))
    collate, model = KIND.collator(load_tokenizer(folder), 8), network()
    KIND.prepare(model, load_tokenizer(folder))
    loss = KIND.loss(Training(), [], packed, outside=False)
    assert loss is not None and len(packed) == 1 and packed.lengths.tolist() == [int(alone.lengths.sum())]
    total, order = 0.0, np.argsort(-alone.lengths, kind="stable").tolist()
    with torch.no_grad():
        together = collate([packed[0]])
        logits = KIND.forward(model, together)["logits"]
        for start, row in zip(packed[0]["starts"].tolist(), order, strict=True):
            batch = collate([alone[row]])
            mine = KIND.forward(model, batch)["logits"]
            length = int(alone.lengths[row])
            assert (logits[0, start : start + length] - mine[0, :length]).abs().max() < 1e-6
            total += float(loss(mine, batch["labels"])) * KIND.target_count(batch)
    assert KIND.target_count(together) == sum(packed.targets) == sum(alone.targets)
    assert float(loss(logits, together["labels"])) == pytest.approx(total / KIND.target_count(together), rel=1e-6)


def test_a_question_ends_as_its_template_has_it_also_with_the_token_that_ends_texts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }} {{ eos_token }} {% endfor %}"
    folder, model = words(tmp_path / "eos", template), network()
    KIND.prepare(model, load_tokenizer(folder))
    rows = pa.record_batch({"messages": [json.dumps([USER]), json.dumps([USER, BOT])]})
    found = KIND.prompts(encoder_module.load_fast_encoder(folder, 64), rows, KIND.options.settings_for(model))
    assert [prompt.ids.tolist() for prompt in found] == [[5, 6, 1], [5, 6, 1]]


def test_a_model_stops_where_the_template_ends_an_answer(tmp_path: Path) -> None:
    found = {}
    for name, template in {
        "none": None,
        "chatml": CHATML,
        "marked": MARKED,
        "example": EXAMPLE,
        "refuses": "{{ 1 + 'a' }}",
    }.items():
        model = network()
        KIND.prepare(model, load_tokenizer(words(tmp_path / name, template, eos_token="j")))
        found[name] = model.generation_config.eos_token_id
        assert model.config.eos_token_id == found[name]
    both = [13, 1]
    assert found == {"none": 13, "chatml": both, "marked": both, "example": 13, "refuses": 13}


def network() -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": 14, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **size, **ends, intermediate_size=64)).eval()


@pytest.fixture(scope="module")
def assistants(world: Path) -> Path:
    """A world with a causal model too, and conversations in tokens."""
    made = Tokenizer.from_file(str(world / "base/tokenizer/tokenizer.json"))
    config = tiny.CONFIG | {"model_type": "gpt2", "vocab_size": made.get_vocab_size()}
    create_model.create(config, made, seed=1).save_pretrained(world / "sft/model")
    shutil.copytree(world / "base/tokenizer", world / "sft/tokenizer")
    (world / "sft/tokenizer/chat_template.jinja").write_text(EXAMPLE)
    draw = random.Random(3)
    rows = {split: [spoken(draw) for _ in range(count)] for split, count in (("train", 150), ("validation", 40))}
    token_files.tokenize(KIND, write_rows(world / "spoken", **rows), world / "sft/tokenizer", world / "sft/tokens", 64)
    return world


def spoken(draw: random.Random) -> list[dict[str, str]]:
    """A conversation: a few words of one sort, and the name of the sort as the answer."""
    sort = draw.choice(tiny.LABELS)
    question = " ".join(draw.choices(tiny.WORDS[sort], k=draw.randint(1, 6)))
    return [{"role": "user", "content": question}, {"role": "assistant", "content": draw.choice(tiny.WORDS[sort])}]


def fit_job(world: Path, job_dir: Path) -> Path:
    settings = {"task": "sft", "labels": [], "metrics": ["perplexity", "token_accuracy"]}
    training: dict[str, Any] = {"checkpoint_interval_s": 0.05, "num_train_epochs": 4, "gradient_accumulation_steps": 2}
    training |= {"per_device_train_batch_size": 2}
    return tiny.fit_job(world, job_dir, base="sft", tokens="sft/tokens", settings=settings, **training)


@pytest.fixture(scope="module")
def trained(assistants: Path) -> Path:
    """A job that ran to its end undisturbed."""
    job = fit_job(assistants, assistants / "whole")
    assert finish(job).state == "finished"
    return job


@pytest.mark.slow
def test_killed_within_an_epoch_it_ends_with_the_same_bytes(assistants: Path, trained: Path, tmp_path: Path) -> None:
    killed = fit_job(assistants, tmp_path / "killed")
    assert_resumes(killed, trained, after=3)
    assert (trained / "output/model/chat_template.jinja").read_text() == EXAMPLE
    first, *_, last = (figures["eval_loss"] for _, figures in sorted(curve(trained).items()) if "eval_loss" in figures)
    assert last < first


def test_requests_of_a_batch_file_are_answered_like_single_conversations(trained: Path, tmp_path: Path) -> None:
    folder, options = trained / "output/model", {"max_new_tokens": 5, "min_new_tokens": 3}
    talks = [spoken(random.Random(seed))[:-1] for seed in (1, 4, 5)]
    file = tmp_path / "requests.jsonl"
    requests = [{"custom_id": str(number), "body": {"messages": talk}} for number, talk in enumerate(talks)]
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    (rows,) = RowReader(SupervisedFineTuning(options), {"messages": "talk"}).shards(str(file), 10)
    settings = PredictShardsSettings(
        task="sft",
        options=options,
        columns={"messages": "talk"},
        shards=[WantedShard(file=str(file), number=0, digest=digest_inputs(rows))],
        shard_rows=10,
        max_length=64,
        batch_size=2,
        mixed_precision="no",
    )
    inputs = {"model": folder, "tokenizer": folder}
    programs_here.run(predict_shards, tmp_path, inputs, **settings.model_dump(mode="json"))
    found = pq.read_table(tmp_path / "shards" / f"{digest_inputs(rows)}.parquet")["generated_text"].to_pylist()
    predictor = Predictor(SupervisedFineTuning(options), folder, folder, 64)
    alone = [predictor.predict(pa.RecordBatch.from_pydict({"messages": [json.dumps(talk)]})) for talk in talks]
    assert found == [one[0]["generated_text"] for one in alone] and all(found)


def test_a_conversation_is_answered_alike_with_and_without_the_answer_that_it_has(trained: Path) -> None:
    task, folder = SupervisedFineTuning({"max_new_tokens": 5, "min_new_tokens": 3}), trained / "output/model"
    rows = [spoken(random.Random(seed)) for seed in (1, 4)]
    rows += [row[:-1] for row in rows]
    predictions = Predictor(task, folder, folder, 64).predict(
        pa.record_batch({"messages": list(map(json.dumps, rows))})
    )
    assert [one["targets"] > 0 for one in predictions] == [True, True, False, False]
    assert [one["loss"] is not None for one in predictions] == [True, True, False, False]
    written = [one["generated_text"] for one in predictions]
    assert written[:2] == written[2:] and all(written)
    assert task.lines(predictions[2]) == [written[2]] and len(task.lines(predictions[0])) == 4
    without_text = {name: value for name, value in predictions[2].items() if name != "generated_text"}
    assert task.lines(without_text) == ["no answer is generated: options.max_new_tokens is 0"]
    assert task.same_prediction(predictions[2], predictions[2], 1e-3)
    cut = {"loss": None, "targets": 0, "perplexity": None}  # as an evaluation stores a row that has no answer left
    assert task.same_prediction(predictions[2], cut, 1e-3)
    assert not task.same_prediction(predictions[2], predictions[2] | {"generated_text": "else"}, 1e-3)
