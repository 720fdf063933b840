"""Texts that follow a JSON schema: each of them validates, with a validator that somebody else wrote."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch

from tests.inference.test_generate import END, MODELS, load, run, save
from tests.support.hf_folders import VOCAB, save_hf_folder
from trainyard.core.errors import UserError
from trainyard.data.text.tokenizer import ByteTokenizer
from trainyard.devices.cpu import CpuDevice
from trainyard.inference.requests import Request, SamplingOptions
from trainyard.inference.sampling import TokenMasks
from trainyard.inference.text.json_schema import SchemaCompiler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None, 3]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^[a-z]{2,5}$"},
    {"anyOf": [{"type": "null"}, {"const": {"a": [1, 2.5, "é\n"]}}]},
    {"type": "array", "prefixItems": [{"type": "string", "format": "date"}, {"$ref": "#/$defs/tag"}], "items": False,
     "minItems": 2, "$defs": {"tag": {"enum": ["x", "y"]}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    return save(MODELS["llama"](), tmp_path_factory.mktemp("llama"))[0]


def schema_request(number: int, schema: dict[str, Any], **options: Any) -> Request:
    sampling = {"max_new_tokens": 100, "end_ids": frozenset([END]), "json_schema": json.dumps(schema)}
    return Request(number, [5, 9, 200, 3], SamplingOptions(**sampling | options))


def text_of(events: list[Any]) -> str:
    return ByteTokenizer().decode([event.token for event in events])


@pytest.mark.parametrize("has_graphs", [False, True])
def test_every_complete_text_validates(llama: Path, has_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled and greedy texts, next to texts without a schema, which are what they are alone."""
    monkeypatch.setattr(CpuDevice, "supports_graphs", has_graphs)
    free = [Request(100 + n, [n, 7], SamplingOptions(1.0, seed=n, max_new_tokens=40)) for n in range(3)]
    alone = run(load(llama), free)
    loaded = load(llama, max_batch=6)
    loaded.scheduler.lookahead = int(has_graphs)
    requests = [
        schema_request(len(SCHEMAS) * seed + index, schema, temperature=float(seed > 0), seed=seed, num_logprobs=1)
        for seed in range(3)
        for index, schema in enumerate(SCHEMAS)
    ]
    events = run(loaded, [request for pair in zip(requests[:3], free, strict=True) for request in pair] + requests[3:])
    assert all([e.token for e in events[n]] == [e.token for e in alone[n]] for n in alone)
    texts = []
    for request in requests:
        found = events[request.request_id]
        assert found[-1].finish_reason == "stop", text_of(found)
        schema = json.loads(str(request.options.json_schema))
        jsonschema_rs.validate(schema, json.loads(text_of(found)))
        texts.append(text_of(found))
    assert len(set(texts)) > len(requests) // 2


def test_log_probabilities_are_those_without_a_schema(llama: Path) -> None:
    model = load(llama)
    events = run(model, [schema_request(0, PERSON, num_logprobs=20)])[0]
    assert text_of(events).startswith('{"name":"')
    assert any(event.token not in [token for token, _ in event.top_logprobs] for event in events)


def test_a_text_that_is_cut_ends_with_length(llama: Path) -> None:
    events = run(load(llama), [schema_request(0, PERSON, max_new_tokens=5)])[0]
    assert (text_of(events), events[-1].finish_reason) == ('{"nam', "length")


def test_tokens_of_several_characters(tmp_path: Path) -> None:
    """A vocabulary of merges, and a model with more tokens than its tokenizer."""
    save_hf_folder(tmp_path, "llama")
    model = load(tmp_path)
    options = SamplingOptions(1.0, max_new_tokens=60, json_schema=json.dumps(PERSON), end_ids=model.end_ids)
    for seed in range(3):
        found = run(model, [Request(0, [5], SamplingOptions(**options.__dict__ | {"seed": seed}))])[0]
        tokens = [event.token for event in found if event.token not in model.end_ids]
        assert model.tokenizer is not None
        jsonschema_rs.validate(PERSON, json.loads(model.tokenizer.decode(tokens)))
        assert found[-1].finish_reason == "stop"
    assert model.model_config.vocab == VOCAB


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("[]", "not valid"),
        ("", "not valid"),
        ('{"type": "wrong"}', "not supported: Invalid type: wrong"),
        ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ('{"$ref": "https://example.com/schema"}', "not supported"),
    ],
)
def test_schemas_that_are_refused(schema: str, message: str) -> None:
    compiler = SchemaCompiler(ByteTokenizer(), 257, frozenset([END]))
    with pytest.raises(UserError, match=message) as refused:
        compiler.start(schema)
    assert "\n" not in str(refused.value)


def test_steps_without_schemas_have_no_masks(llama: Path) -> None:
    loaded = load(llama)
    run(loaded, [Request(0, [1], SamplingOptions(1.0, max_new_tokens=4))])
    assert loaded.scheduler.engine.sampler.masks is None


def test_masks_fit_a_vocabulary_that_fills_its_last_word() -> None:
    """llguidance pads the mask of such a vocabulary by another word."""
    words = SchemaCompiler(ByteTokenizer(), 288, frozenset([END])).start(json.dumps(PERSON)).next_tokens()
    masks = TokenMasks(1, 288, CpuDevice())
    masks.set(0, words)
    allowed = masks.apply(torch.zeros(1, 288), slice(1)).isfinite().nonzero()[:, 1].tolist()
    assert allowed == [ord("{")]
