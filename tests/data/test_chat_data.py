"""The data source chat: formats of records, the data set, its cache, errors that name records, and a run."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.chat_templates import FAMILIES, chat_tokenizer, write_tokenizer
from tests.support.configs import LLAMA, tiny_config
from trainyard.config.data_schema import DataSection
from trainyard.config.smoke import smoke_config
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.data.formats.conversations import detect_format, read_conversation
from trainyard.data.loading import conversation_samples
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.conversation_samples import BUILT_IN_COUNT, chat_spec, open_conversations
from trainyard.data.loading.demo_corpus import make_conversation
from trainyard.data.loading.fingerprint import fingerprint_files
from trainyard.data.loading.packing import PaddedSamples
from trainyard.data.text.chat_encoder import chat_encoder
from trainyard.data.text.chat_template import CHATML
from trainyard.inference.generate import Prompt, generate_texts
from trainyard.inference.load import InferenceOptions, load_for_inference
from trainyard.inference.requests import SamplingOptions
from trainyard.run.model_files import run_model_files
from trainyard.run.trainer import Trainer

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "yes"}]
ADD = {"name": "add", "arguments": {"a": 1}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": ADD}]}
RECORDS: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("messages", {"messages": CHAT}, CHAT),
    (
        "sharegpt",
        {"system": "S", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "yes"}]},
        [{"role": "system", "content": "S"}, *CHAT],
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "function_call", "value": json.dumps(ADD)}, {"from": "observation", "value": "2"}]},
        [CALL, {"role": "tool", "content": "2"}],
    ),
    ("sharegpt", {"conversations": CHAT}, CHAT),
    ("alpaca", {"instruction": "Hello", "input": "", "output": "yes"}, CHAT),
    (
        "alpaca",
        {"instruction": "Add", "input": "1 2", "output": "3", "history": [["Hello", "yes"]]},
        [*CHAT, {"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}],
    ),
    ("prompt_completion", {"prompt": CHAT[:1], "completion": CHAT[1:]}, CHAT),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trainyard" / "chat"


def section(tmp_path: Path, records: list[Any], seq_len: int = 64, **chat: Any) -> DataSection:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    write_tokenizer(tokenizer, FAMILIES["chatml"])
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataSection(source="chat", paths=(str(path),), tokenizer=str(tokenizer), seq_len=seq_len, chat=chat)


@pytest.mark.parametrize(("name", "record", "messages"), RECORDS)
def test_records_become_messages(name: str, record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert detect_format(record) == name
    assert read_conversation(record).messages == messages
    assert read_conversation(record, name).messages == messages


def test_prompts_are_not_trained_unless_they_say_so() -> None:
    prompt = [*CHAT, {"role": "user", "content": "a"}]
    found = read_conversation({"prompt": prompt, "completion": [{"role": "assistant", "content": "b"}]})
    assert found.trained == (False, False, False, None)


def test_arguments_and_tools_that_are_text_are_read_as_json() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    found = read_conversation({"messages": [message], "tools": json.dumps(tools)})
    assert found.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert found.tools == tools


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"mesages": CHAT}, "no conversation: expected the keys messages, .* found mesages; nearest: messages"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"content": "a"}]}, "a message is a dict without role"),
        ({"messages": [{"role": "user", "content": 3}]}, "the content of a message is an int; expected text"),
        ({"messages": [{**CHAT[1], "weight": 2}]}, "weight=2; expected 0 or 1"),
        ({"conversations": [{"from": "humann", "value": "a"}]}, "from 'humann'; expected .*; nearest: human"),
        ({"input": "a", "output": 3}, "output: an int; expected text"),
        ({"instruction": "a", "output": "b", "history": [3]}, "history: expected pairs"),
    ],
)
def test_records_that_are_no_conversation(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_conversation(record)


def test_samples_are_shifted_and_padded(tmp_path: Path) -> None:
    data = section(tmp_path, [{"messages": CHAT}, {"messages": CHAT + CHAT}])
    documents = open_conversations(data, data.paths, None)
    fast = chat_tokenizer(FAMILIES["chatml"].specials)
    tokens, trained = documents.document(0)
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert tokens.tolist() == fast.encode(text).ids
    assert fast.decode(tokens[trained], skip_special_tokens=False) == "yes<|im_end|>"
    assert documents.lengths.dtype == np.int32
    assert documents.lengths.tolist() == [len(tokens), 2 * len(tokens)]
    sample = PaddedSamples(documents, 64, 0).samples(np.array([1, 0]))
    row, labels, count = sample["tokens"][1], sample["labels"][1], len(tokens)
    assert row[:count].tolist() == tokens.tolist()
    assert not row[count:].any()
    learned = np.flatnonzero(labels != IGNORE_INDEX)
    assert np.array_equal(learned + 1, np.flatnonzero(trained))
    assert np.array_equal(labels[learned], row[learned + 1])


def test_files_of_all_kinds_hold_the_same_conversations(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": None}}]
    records: list[Any] = [{"messages": CHAT, "tools": tools}, {"messages": [*CHAT, CHAT[0], CALL], "tools": []}]
    data = section(tmp_path, records)
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "data.parquet", row_group_size=1)
    (tmp_path / "array.json").write_text(json.dumps(records))
    expected = [open_conversations(data, data.paths, None).document(index) for index in range(2)]
    for name in ("data.parquet", "array.json"):
        found = open_conversations(data, (str(tmp_path / name),), None)
        for index, (tokens, trained) in enumerate(expected):
            assert np.array_equal(found.document(index)[0], tokens)
            assert np.array_equal(found.document(index)[1], trained)
        assert found.source(1).startswith(str(tmp_path / name))


def test_conversations_are_encoded_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = section(tmp_path, [{"messages": CHAT}] * 3)
    first = open_conversations(data, data.paths, None)
    (made,) = [path for path in cache.iterdir() if path.is_dir()]
    monkeypatch.setattr(conversation_samples, "map_ordered", None)
    other_length = data.model_copy(update={"seq_len": 40})
    assert np.array_equal(open_conversations(other_length, data.paths, None).lengths, first.lengths)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    changed = fingerprint_files(data)
    open_conversations(data, data.paths, None)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2
    assert made.is_dir()
    assert str(tmp_path / "tokenizer" / "chat_template.jinja") in changed


def test_worker_processes_encode_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        {"messages": [*CHAT, {"role": "user", "content": "x" * (number % 7 + 1)}, CHAT[1]]} for number in range(99)
    ]
    data = section(tmp_path, records)
    one = open_conversations(data, data.paths, None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(conversation_samples, "BYTES_PER_WORKER", 1)
    monkeypatch.setattr("trainyard.data.formats.documents.SLICE_BYTES", 1000)
    many = open_conversations(data, data.paths, None)
    assert len(many.slices) > 3
    assert np.array_equal(one.lengths, many.lengths)
    assert all(np.array_equal(one.document(index)[1], many.document(index)[1]) for index in range(99))
    assert one.source(98) == many.source(98) == f"{data.paths[0]}: line 99"


def test_errors_name_the_record_and_count(tmp_path: Path) -> None:
    silent = {"messages": CHAT[:1]}
    data = section(tmp_path, [{"messages": CHAT}, silent, {"messages": CHAT}, silent, {"text": "a"}])
    with pytest.raises(
        UserError,
        match=r"data.jsonl: line 2: no trained token.* \(2 records of 5 have this problem; 1 record has other",
    ):
        open_conversations(data, data.paths, None)
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    template += "{% for m in messages %}{{ m.content }}{% endfor %}"
    data = section(tmp_path, [{"messages": CHAT}, {"messages": CHAT[1:]}], template=template)
    with pytest.raises(UserError, match=r"line 2: chat template: roles must alternate \(1 record of 2"):
        open_conversations(data, data.paths, None)


def test_conversations_that_are_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long, late = [*CHAT, *CHAT], [{"role": "user", "content": "x" * 40}, CHAT[1]]
    data = section(tmp_path, [{"messages": each} for each in (CHAT, long, late)], seq_len=24)
    with pytest.raises(UserError, match=r"line 2: \d+ tokens, but data.seq_len=24; 2 conversations of 3 are longer"):
        open_conversations(data, data.paths, None)
    caplog.set_level(logging.WARNING)
    for too_long, kept, said in (("drop", 1, "dropped 2 of 3"), ("truncate", 2, "cut 1 of 3 to 24 tokens")):
        chat = data.chat.model_copy(update={"too_long": too_long})
        documents = open_conversations(data.model_copy(update={"chat": chat}), data.paths, None)
        assert len(documents) == kept
        assert documents.lengths.max() <= 24
        assert said in caplog.text
    assert "dropped 1 of 3, which have no trained token before that" in caplog.text


def _open(tmp_path: Path, **chat: Any) -> None:
    data = section(tmp_path, [{"messages": CHAT}], **chat)
    open_conversations(data, data.paths, None)


def test_mistakes_in_keys(tmp_path: Path) -> None:
    for chat, reason in (
        ({"train_on": ("assistent",)}, "nearest: assistant"),
        ({"train_on": ("user", "everything")}, "everything stands alone"),
        ({"template": "gone.jinja"}, "gone.jinja: No such file"),
        ({"template": "{% if %}"}, "not valid Jinja"),
    ):
        with pytest.raises((UserError, ValueError), match=reason):
            _open(tmp_path, **chat)
    with pytest.raises(ValueError, match=r"requires data.source=chat; found text"):
        DataSection(chat={"train_on": ("user",)})
    data = section(tmp_path, [{"messages": CHAT}])
    with pytest.raises(UserError, match=r"model.vocab=300: the tokenizer has \d+ tokens"):
        open_conversations(data, data.paths, None, 300)


def test_a_run_that_starts_from_weights_names_its_tokenizer(tmp_path: Path) -> None:
    path = section(tmp_path, [{"messages": CHAT}]).paths[0]
    chat: dict[str, Any] = {"source": "chat", "paths": path, "seq_len": 64}
    config = tiny_config(data=chat, checkpoint={"init_from": "some/weights"})
    with pytest.raises(UserError, match="nearest: some/weights"):
        build_datasets(config)
    assert len(build_datasets(tiny_config(data={**chat, "tokenizer": "bytes"})).train) == 1


def test_a_run_saves_the_tokens_that_end_answers_and_its_template(tmp_path: Path) -> None:
    data = section(tmp_path, [{"messages": CHAT}])
    model = tiny_config("llama").model
    files = run_model_files(data, model.model_copy(update={"eos_token_id": (7,)}), None, None)
    end = chat_tokenizer(FAMILIES["chatml"].specials).token_to_id("<|im_end|>")
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [end, 7]
    assert "chat_template.jinja" not in files
    template = FAMILIES["qwen2.5"].template
    data = section(tmp_path, [{"messages": CHAT}], template=template)
    assert run_model_files(data, model, None, None)["chat_template.jinja"].decode() == template


def test_built_in_conversations_end_their_turns_and_fit_a_smoke_trial() -> None:
    data = DataSection(source="chat", seq_len=256)
    documents = open_conversations(data, (), None)
    assert documents.end_ids == (256,)
    assert len(documents) == BUILT_IN_COUNT
    tokens, trained = documents.document(1)
    messages = make_conversation(1)
    answers = [each["content"] for each in messages if each["role"] == "assistant"]
    assert "".join(f"{answer}|" for answer in answers) == "".join(
        "|" if token == 256 else chr(token) for token in tokens[trained].tolist()
    )
    assert chat_encoder(chat_spec(data, ())).files()["chat_template.jinja"].decode() == CHATML
    assert "built-in conversations" in documents.source(0)
    with pytest.raises(UserError, match=r"data.paths: missing.*data.tokenizer=bytes"):
        open_conversations(data.model_copy(update={"tokenizer": "a.json"}), (), None)


@pytest.mark.parametrize("own", [False, True])
def test_smoke_keeps_conversations_packing_and_adapters(own: bool) -> None:
    config = tiny_config(
        data={
            "source": "chat",
            "paths": "a.jsonl",
            "packing": True,
            "seq_len": 4096,
            "tokenizer": "tok",
            "chat": {"format": "input_output", "train_on": ["everything"]},
        },
        model={**LLAMA, "max_positions": 4096},
        lora={"rank": 8, "alpha": 3.0, "targets": ["q", "v"], "init_from": "adapter"},
    )
    notes: list[str] = []
    small = smoke_config(config, 1, ["lora.rank=2", *(["data.paths=b.jsonl"] if own else [])], notes.append)
    ((_, lora),) = small.model.linear.wrappers()
    options: Any = lora
    assert (options.rank, options.alpha, options.targets, options.init_from) == (2, 3.0, ("q", "v"), None)
    assert "lora.init_from=adapter" in notes[0]
    data = small.data
    assert (data.source, data.packing, data.seq_len, data.chat.train_on) == ("chat", True, 256, ("everything",))
    found = (data.paths, data.tokenizer, data.chat.format, data.chat.too_long)
    assert found == ((("b.jsonl",), "tok", "input_output", "truncate") if own else ((), "bytes", "auto", "error"))


@pytest.mark.nightly
def test_a_model_answers_what_it_was_trained_to_answer(tmp_path: Path) -> None:
    answers = {"What is 2+2?": "It is four.", "Name a color.": "Blue, of course."}
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in answers.items()]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    config = tiny_config(
        {**LLAMA, "max_positions": 96},
        data={"source": "chat", "paths": str(tmp_path / "a.jsonl"), "seq_len": 96, "tokenizer": "bytes"},
        train={"steps": 150, "global_batch": 2},
        optimizer={"lr": 1e-2},
        schedule={"warmup_steps": 0},
        log={"directory": str(tmp_path)},
        checkpoint={"export_hf": True},
    )
    exported = Trainer(config).run().exported_weights
    model = load_for_inference(str(exported), InferenceOptions(device="cpu", max_batch=2))
    sampling = SamplingOptions(temperature=0.0, max_new_tokens=32, end_ids=model.end_ids)
    prompts = [Prompt(index, "", model.encode_chat(turn[:1])) for index, turn in enumerate(turns)]
    found = {each.prompt.index: each for each in generate_texts(model, prompts, sampling)}
    assert [found[index].text.strip() for index in range(2)] == list(answers.values())
    assert all(each.finish_reason == "stop" for each in found.values())
