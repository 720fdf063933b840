"""Text samples in the training loop: the tokens of transformers, one graph with evaluation, and a run that does not
notice them."""

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from tests.support import configs
from tests.support.logs import captured_log
from trainyard import Callback, Trainer
from trainyard.cli.console import terminal_safe
from trainyard.cli.train_console import TrainConsole
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.text.tokenizer import TokenizerSpec, hf_tokenizer_files
from trainyard.devices.base import CompileOptions
from trainyard.devices.cpu import CpuDevice
from trainyard.preflight.dryrun.dry_run import without_io
from trainyard.run.continue_prompts import continue_prompts
from trainyard.run.records import RunSummary

PROMPTS = ["To be", "", "Hi"]
GREEDY = {"every": 2, "prompts": PROMPTS, "max_new_tokens": 6, "temperature": 0.0}
SAMPLED = {**GREEDY, "temperature": 1.0, "top_p": 0.9}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def configure(tmp_path: Path, model: dict[str, Any] | str = "llama", **sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "data": {"source": "text", "seq_len": 16, "validation_fraction": 0.01},
        "optimizer": {"lr": 1e-2},
        "log": {"directory": str(tmp_path), "every": 4},
        "samples": GREEDY,
    }
    names = {*base, *sections}
    return configs.tiny_config(model, **{name: {**base.get(name, {}), **sections.get(name, {})} for name in names})


def samples_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_greedy_samples_equal_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = configure(tmp_path, family, checkpoint={"export_hf": True}, train={"steps": 6, "micro_batch": 2})
    summary = Trainer(config).run()
    samples = samples_of(summary.directory)
    assert [(record["step"], record["prompt"]) for record in samples] == [(s, p) for s in (2, 4, 6) for p in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(summary.exported_weights)
    tokenizer = AutoTokenizer.from_pretrained(summary.exported_weights)
    for record in samples[-len(PROMPTS) :]:
        prompt = tokenizer(record["prompt"] or tokenizer.eos_token, return_tensors="pt").input_ids
        with torch.no_grad():
            expected = model.generate(prompt, do_sample=False, max_new_tokens=6, pad_token_id=tokenizer.eos_token_id)
        assert record["tokens"] == expected[0, prompt.shape[1] :].tolist()
        assert record["text"] == tokenizer.decode(record["tokens"], skip_special_tokens=True)


def state_of_run(config: Config) -> tuple[list[float], list[torch.Tensor], Any]:
    """Losses, final parameters, and the next numbers of all random generators. The loss uses one of them."""

    def noisy(output: Any, batch: Any) -> Any:
        logits, labels = output.logits().flatten(0, 1), batch["labels"].long().flatten()
        return F.cross_entropy(logits, labels, reduction="sum") * (1 + 0.1 * torch.rand(())), labels.numel()

    losses: list[float] = []

    class RecordLoss(Callback):
        def on_log(self, trainer: Any, record: dict[str, Any]) -> None:
            losses.append(record["loss"])

    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    trainer = Trainer(config, loss=noisy, callbacks=[RecordLoss()])
    trainer.run()
    parameters = [trainer.full_parameter(name) for name in trainer.blueprint.parameter_names()]
    optimizer = [trainer.optimizer.state.exp_avg, trainer.optimizer.state.exp_avg_sq]
    return losses, [*parameters, *optimizer], (torch.rand(4).tolist(), np.random.rand(), random.random())


def test_samples_change_nothing_of_the_run(tmp_path: Path) -> None:
    """Bit-identical losses, parameters, optimizer state and random generators, with dropout."""
    model = {**configs.GPT, **DROPOUT}
    runs = [
        state_of_run(configure(tmp_path, model, log={"every": 1}, samples={**SAMPLED, "every": every}))
        for every in (0, 1)
    ]
    assert len(runs[0][0]) == 4
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert runs[0][2] == runs[1][2]
    assert (tmp_path / "run-2/samples.jsonl").is_file()
    assert not (tmp_path / "run/samples.jsonl").exists()


@pytest.mark.parametrize(
    ("evaluate_every", "document_mask"),
    [(1, False), *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((1, True), (0, False)))],
)
def test_samples_use_the_graphs_of_evaluation(
    evaluate_every: int, document_mask: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first evaluation nothing compiles. Without evaluation, samples compile the block once."""
    counts: dict[str, int] = {}

    def count(event: str) -> None:
        counts.setdefault(event, torch._dynamo.utils.counters["stats"]["unique_graphs"])

    class CountGraphs(Callback):
        def on_log(self, trainer: Any, record: dict[str, Any]) -> None:
            count("step")

        def on_evaluate(self, trainer: Any, record: dict[str, Any]) -> None:
            count("evaluate")

        def on_end(self, trainer: Any) -> None:
            count("end")

    monkeypatch.setattr(CpuDevice, "compile_options", lambda self: CompileOptions("eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = configure(
        tmp_path,
        data={"document_mask": document_mask},
        compile={"enabled": True},
        evaluate={"every": evaluate_every, "batches": 1},
        train={"steps": 3, "micro_batch": 4},
        samples={**GREEDY, "every": 1, "max_new_tokens": 2},
    )
    Trainer(config, callbacks=[CountGraphs()]).run()
    if evaluate_every:
        assert counts["end"] == counts["evaluate"] > counts["step"]
    else:
        assert counts["end"] == counts["step"] + 1


def test_draws_depend_on_seed_prompt_index_and_position_only(tmp_path: Path) -> None:
    """Not on the micro batch; the same prompt twice gets two samples."""

    def tokens(micro_batch: int, **samples: Any) -> list[list[int]]:
        config = configure(
            tmp_path, train={"steps": 2, "micro_batch": micro_batch}, samples={**SAMPLED, "temperature": 2.0, **samples}
        )
        return [record["tokens"] for record in samples_of(Trainer(config).run().directory)]

    first = tokens(1, prompts=["a", "a", "b"])
    assert first == tokens(4, prompts=["a", "a", "b"])
    assert first[:2] == tokens(2, prompts=["a", "a"])
    assert first[0] != first[1]
    assert first != tokens(1, prompts=["a", "a", "b"], seed=1)


def test_samples_end_at_the_end_token_and_at_the_sequence_length(tmp_path: Path) -> None:
    config = configure(tmp_path, samples={**GREEDY, "max_new_tokens": 50})
    trainer = Trainer(config)
    prompts = [[97, 98, 99], [5]]
    first, second = continue_prompts(trainer.runner, config.samples, config.data, prompts, end_id=-1) or []
    assert [len(first), len(second)] == [13, 15]
    end_id = first[4]
    expected = [row[: row.index(end_id) + 1] if end_id in row else row for row in (first, second)]
    assert continue_prompts(trainer.runner, config.samples, config.data, prompts, end_id) == expected


def interrupt_during_samples(at_call: int) -> Callback:
    class Interrupt(Callback):
        calls = 0

        def on_evaluation_batch(self, trainer: Any) -> None:
            self.calls += 1
            if self.calls == at_call:
                os.kill(os.getpid(), signal.SIGINT)

    return Interrupt()


def run_in(config: Config, *callbacks: Callback) -> RunSummary:
    with captured_log(lambda line: None):
        return Trainer(config, callbacks=callbacks).run()


def test_a_signal_between_tokens_ends_the_run_and_the_resumed_run_samples_again(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"checkpoint": {"every": 100, "resume": "auto"}, "train": {"steps": 6}}
    full = run_in(configure(tmp_path / "full", **sections))
    config = configure(tmp_path / "stopped", **sections)
    interrupt = interrupt_during_samples(8)  # step 2 has six tokens
    stopped = run_in(config, interrupt)
    assert stopped.interrupted
    assert stopped.steps == 4
    assert interrupt.calls == 8  # type: ignore[attr-defined]
    assert {record["step"] for record in samples_of(stopped.directory)} == {2}
    resumed = run_in(config)
    assert resumed.directory == stopped.directory
    assert resumed.steps == 6
    assert samples_of(resumed.directory) == samples_of(full.directory)


def test_resuming_an_older_step_drops_later_samples(tmp_path: Path) -> None:
    config = configure(tmp_path, checkpoint={"every": 1, "keep": 0, "resume": "auto"}, samples=SAMPLED)
    first = run_in(config)
    before = samples_of(first.directory)
    for step in (3, 4):
        shutil.rmtree(first.directory / "checkpoints" / f"step_{step:08d}")
    with (first.directory / "samples.jsonl").open("a") as file:
        file.write('{"step": 5, "pro')  # cut off by a kill
    run_in(config)
    assert samples_of(first.directory) == before
    assert [record["step"] for record in before] == [2, 2, 2, 4, 4, 4]


def test_tensorboard_has_the_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = run_in(configure(tmp_path, train={"steps": 2}, log={"loggers": ["tensorboard"]}))
    board = EventAccumulator(str(summary.directory / "tensorboard"))
    board.Reload()
    record = samples_of(summary.directory)[0]
    (event,) = board.Tensors("samples/0")
    assert event.step == 2
    text = event.tensor_proto.string_val[0].decode()
    assert text == "    " + (record["prompt"] + record["text"]).replace("\n", "\n    ")


def test_tokens_of_unknown_origin_need_a_tokenizer(tmp_path: Path) -> None:
    synthetic = {"source": "synthetic"}
    with pytest.raises(
        UserError, match=r"^samples.every=2: the tokenizer of data.source=synthetic .*set data.tokenizer"
    ):
        Trainer(configure(tmp_path, data=synthetic))
    assert not list(tmp_path.iterdir())
    assert Trainer(configure(tmp_path, data=synthetic, samples={**GREEDY, "tokenizer": "bytes"})).text_prompts
    for name, content in hf_tokenizer_files(TokenizerSpec("bytes")).items():
        (tmp_path / name).write_bytes(content)
    path = str(tmp_path / "tokenizer.json")
    prompts = Trainer(configure(tmp_path, data={**synthetic, "tokenizer": path})).text_prompts
    assert prompts
    assert prompts.tokens[0] == list(b"To be")


def test_a_run_that_starts_from_a_checkpoint_uses_its_tokenizer(tmp_path: Path) -> None:
    first = run_in(configure(tmp_path, checkpoint={"every": 4, "export_hf": True}))
    for source in (first.exported_weights, first.last_checkpoint):
        start = {"init_from": str(source)}
        trainer = Trainer(configure(tmp_path, data={"source": "synthetic"}, checkpoint=start))
        assert trainer.text_prompts
        assert trainer.text_prompts.tokens == [list(b"To be"), [256], list(b"Hi")]


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ("bert", {"data": {"source": "synthetic"}}, "samples.every=2: bert does not continue text; nearest: 0"),
        ("llama", {"samples": {**GREEDY, "prompts": ["x" * 16]}}, "samples.prompts: 'xxxxxxxxxxxxxxxx' has 16 tokens"),
        ("llama", {"samples": {**GREEDY, "prompts": []}}, "samples.prompts"),
        ("llama", {"samples": {**GREEDY, "top_p": 0.0}}, "samples.top_p"),
        ({**configs.LLAMA, "vocab": 200},
         {"data": {"source": "synthetic"}, "samples": {**GREEDY, "tokenizer": "bytes"}},
         "model.vocab=200: the tokenizer for samples.prompts has 257 tokens; nearest: 257"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(model: Any, sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        Trainer(configure(tmp_path, model, **sections))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_console_shows_one_safe_line_per_sample(capsys: pytest.CaptureFixture[str]) -> None:
    console = TrainConsole(Console(width=300))
    text = "\x1b[31mred\nline\x9b2J\u202eleft [bold]ü" + "x" * 500
    console.on_samples(None, [{"step": 3, "prompt": "a\tb", "text": text, "tokens": []}])  # type: ignore[arg-type]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(r"sample at step 3 | a\tb | \x1b[31mred\nline\x9b2J\u202eleft [bold]ü")
    assert len(line) < 170
    assert terminal_safe("é\ud800", "ascii") == r"\xe9\ud800"


def test_dry_runs_do_not_sample(tmp_path: Path) -> None:
    config = configure(tmp_path, data={"source": "tokens", "paths": ["missing"]})
    assert without_io(config).samples.every == 0
