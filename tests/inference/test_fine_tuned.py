"""What a LoRA run on conversations leaves can answer: its run directory, its checkpoint, its adapter on the base."""

from pathlib import Path
from typing import Any

import pytest

from tests.inference.test_generate import LLAMA, load, save
from tests.support.configs import tiny_config
from tests.support.hf_reference import hf_model
from trainyard import Trainer
from trainyard.core.errors import UserError
from trainyard.inference.generate import Prompt, generate_texts
from trainyard.inference.load import InferenceModel
from trainyard.inference.requests import Request, SamplingOptions
from trainyard.inference.serve.served_model import ServedModel
from trainyard.inference.serve.worker import SchedulerWorker

QUESTION = [{"role": "user", "content": "Hi"}]
ANSWER = "Good day."
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = '[["[user]Hi[assistant]", false], ["Good day.<256>", true]]}'


def train(directory: Path) -> tuple[Path, Path]:
    """A base, and a run whose adapter has learned one answer."""
    base, _ = save(hf_model("llama-gqa", **LLAMA), directory / "base")
    turns = [*QUESTION, {"role": "assistant", "content": ANSWER}]
    (directory / "chat.jsonl").write_text(f'{{"messages": {str(turns).replace(chr(39), chr(34))}}}\n')
    (directory / "chat.jinja").write_text(TEMPLATE)
    chat: dict[str, Any] = {"source": "chat", "paths": str(directory / "chat.jsonl"), "tokenizer": "bytes"}
    config = tiny_config(
        model={"from_hf": str(base), "linear": {"lora": {"rank": 8, "alpha": 16}}},
        data={**chat, "seq_len": 48, "chat": {"template": str(directory / "chat.jinja")}},
        train={"steps": 40, "global_batch": 2},
        optimizer={"lr": 2e-2},
        schedule={"warmup_steps": 0},
        log={"directory": str(directory / "run")},
        checkpoint={"init_from": str(base), "every": 40, "export_hf": True},
    )
    return base, Trainer(config).run().directory


def answer(model: InferenceModel) -> tuple[str, str | None]:
    sampling = SamplingOptions(max_new_tokens=24, end_ids=model.end_ids)
    (found,) = generate_texts(model, [Prompt(0, "", model.encode_chat(QUESTION))], sampling)
    return found.text, found.finish_reason


def test_a_fine_tuned_model_answers_and_stops_by_itself(tmp_path: Path) -> None:
    base, run = train(tmp_path)
    (inputs,) = {line.partition('"source"')[2] for line in (run / "inputs.jsonl").read_text().splitlines()}
    assert inputs.endswith(' "tokens": 29, "trained": 10, "shown": 29, "parts": ' + PARTS), inputs
    checkpoint = run / "checkpoints" / "step_00000040"
    assert answer(load(run)) == (ANSWER, "stop")
    for adapter in (run, checkpoint, run / "adapter"):
        assert answer(load(base, adapter=str(adapter))) == (ANSWER, "stop"), adapter
    loaded = load(base, adapters={"tuned": str(run)})
    assert answer(loaded)[0] != ANSWER
    tuned = loaded.with_adapter("tuned")  # with the template and the end token of the run
    served = ServedModel("tuned", tuned, tuned.tokenizer, SchedulerWorker(tuned.scheduler, 4), 1)  # type: ignore[arg-type]
    assert served.chat_template.render(QUESTION) == "[user]Hi[assistant]"
    request = Request(0, tuned.encode_chat(QUESTION), SamplingOptions(max_new_tokens=24, end_ids=served.end_ids), 1)
    tuned.scheduler.add(request)
    events = []
    while tuned.scheduler.has_work:
        events += tuned.scheduler.step()
    assert (bytes(event.token for event in events[:-1]).decode(), events[-1].finish_reason) == (ANSWER, "stop")
    with pytest.raises(UserError, match="has adapters already; nearest: convert --merge"):
        load(run, adapter=str(run / "adapter"))
    other, _ = save(hf_model("llama-gqa", **LLAMA | {"num_hidden_layers": 1}), tmp_path / "other")
    with pytest.raises(UserError, match=r"its base model has model.layers=2; .*other has 1"):
        load(other, adapter=str(run))
