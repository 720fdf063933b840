"""The Trainer: reproducible losses, micro batches, recompute, compilation, user functions, records and signals."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support import configs
from trainyard import Callback, Trainer
from trainyard.core.errors import RunStopped, UserError
from trainyard.devices.base import CompileOptions
from trainyard.devices.cpu import CpuDevice
from trainyard.train.cross_entropy import chunked_cross_entropy


def losses_of(config, tmp_path: Path, **arguments) -> list[float]:
    """Losses of all logged steps of a run."""
    trainer = Trainer(
        config.model_copy(update={"log": config.log.model_copy(update={"directory": str(tmp_path)})}), **arguments
    )
    summary = trainer.run()
    lines = [json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def with_dropout(family: str) -> dict:
    return {**configs.TINY_MODELS[family], **({} if family == "llama" else DROPOUT)}


PRECISIONS = ["fp32", "bf16", "bf16_sr"]
RECOMPUTE = [{"kind": "attention"}, {"kind": "full"}, {"kind": "selective", "modules": ["mlp", "norm"]}]


def paired_fast(values: list) -> list:
    """All combinations of families and values; the fast tier has one family for each value."""
    fast = list(zip(configs.TINY_MODELS, values, strict=True))
    return [
        pytest.param(family, value, marks=() if (family, value) in fast else pytest.mark.nightly)
        for family in configs.TINY_MODELS
        for value in values
    ]


@pytest.mark.parametrize(("family", "kind"), paired_fast(PRECISIONS))
def test_same_seed_gives_bitwise_equal_losses(family: str, kind: str, tmp_path: Path) -> None:
    config = configs.tiny_config(with_dropout(family), precision={"kind": kind})
    first, second = losses_of(config, tmp_path), losses_of(config, tmp_path)
    assert first == second
    assert len(first) == 4
    other = configs.tiny_config(with_dropout(family), precision={"kind": kind}, train={"seed": 5})
    assert losses_of(other, tmp_path) != first


@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_losses_do_not_depend_on_the_micro_batch_size(family: str, tmp_path: Path) -> None:
    """With dropout: masks are a function of the sample, and the loss is a global sum over a global count."""
    runs = [
        losses_of(configs.tiny_config(with_dropout(family), train={"micro_batch": size}), tmp_path)
        for size in (1, 2, 4)
    ]
    for other in runs[1:]:
        assert other == pytest.approx(runs[0], rel=1e-5)


@pytest.mark.parametrize(("family", "recompute"), paired_fast(RECOMPUTE))
def test_losses_do_not_depend_on_recompute(family: str, recompute: dict, tmp_path: Path) -> None:
    plain = losses_of(configs.tiny_config(with_dropout(family)), tmp_path)
    assert losses_of(configs.tiny_config(with_dropout(family), recompute=recompute), tmp_path) == plain


def test_precisions_learn_and_agree_roughly(tmp_path: Path) -> None:
    sections = {
        "train": {"steps": 30, "global_batch": 8, "micro_batch": 4},
        "optimizer": {"lr": 1e-2},
        "data": {"source": "text", "seq_len": 32},
    }
    runs = {
        kind: losses_of(configs.tiny_config(**sections, precision={"kind": kind}), tmp_path)
        for kind in ("fp32", "bf16", "bf16_sr")
    }
    for run in runs.values():
        assert run[-1] < run[0] - 1.0
        assert run[0] == pytest.approx(runs["fp32"][0], rel=2e-3)
        assert run[-1] == pytest.approx(runs["fp32"][-1], rel=0.1)


COMPILED = [("llama", "fp32"), ("gpt", "bf16"), pytest.param("bert", "bf16_sr", marks=pytest.mark.nightly)]


@pytest.fixture
def aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without code generation: traces the same graphs and starts no C++ compiler."""
    monkeypatch.setattr(CpuDevice, "compile_options", lambda self: CompileOptions("aot_eager"))


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize(("family", "kind"), COMPILED)
def test_traced_graphs_equal_eager(family: str, kind: str, tmp_path: Path) -> None:
    check_compiled_equals_eager(family, kind, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "kind"), COMPILED)
def test_compiled_code_equals_eager(family: str, kind: str, tmp_path: Path) -> None:
    check_compiled_equals_eager(family, kind, tmp_path)


def check_compiled_equals_eager(family: str, kind: str, tmp_path: Path) -> None:
    eager = losses_of(configs.tiny_config(with_dropout(family), precision={"kind": kind}), tmp_path)
    compiled = losses_of(
        configs.tiny_config(with_dropout(family), precision={"kind": kind}, compile={"enabled": True}), tmp_path
    )
    assert compiled == pytest.approx(eager, rel=1e-5 if kind == "fp32" else 5e-3)


@pytest.mark.usefixtures("aot_eager")
def test_blocks_share_one_compiled_graph(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    Trainer(
        configs.tiny_config(
            {**configs.GPT, **DROPOUT, "layers": 6}, compile={"enabled": True}, log={"directory": str(tmp_path)}
        )
    ).run()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # a block, and the softmax of the loss
    assert not torch._dynamo.utils.counters["graph_break"]


def test_user_loss_is_divided_by_its_count(tmp_path: Path) -> None:
    calls = []

    def half(output, batch):
        calls.append(output.logits().shape)
        labels = batch["labels"].long()[:, ::2]
        logits = output.logits()[:, ::2]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()

    config = configs.tiny_config(train={"steps": 1})
    user_losses = losses_of(config, tmp_path, loss=half)
    assert calls == [(2, 16, 260)] * 2
    assert user_losses != losses_of(config, tmp_path)
    # Gradients, too: one large micro batch gives the same update as two small ones.
    weights = []
    for size in (2, 4):
        trainer = Trainer(
            configs.tiny_config(train={"steps": 1, "micro_batch": size}, log={"directory": str(tmp_path)}), loss=half
        )
        trainer.run()
        weights.append(trainer.optimizer.state.master_weights.clone())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


def test_user_loss_equal_to_the_built_in_loss_gives_the_same_run(tmp_path: Path) -> None:
    def same(output, batch):
        return chunked_cross_entropy(output, batch["labels"]), (batch["labels"] != -100).sum()

    config = configs.tiny_config()
    assert losses_of(config, tmp_path, loss=same) == pytest.approx(losses_of(config, tmp_path), rel=1e-5)


USER_MODULE = """
import torch

def loss(output, batch):
    return output.hidden.float().square().sum() * 0 + 42.0 * batch["labels"].numel(), batch["labels"].numel()

def accuracy(output, batch):
    hit = output.logits().argmax(-1) == batch["labels"]
    return hit.sum(), hit.numel()

def evaluation(trainer):
    return {"answer": 41.0 + trainer.completed_steps * 0.01}
"""


def test_config_names_user_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_1.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    config = configs.tiny_config(
        train={"loss": "mine_1:loss", "steps": 2},
        data={"validation_fraction": 0.001},
        evaluate={"every": 1, "batches": 2, "metrics": {"accuracy": "mine_1:accuracy"}},
    )
    assert losses_of(config, tmp_path) == [42.0, 42.0]
    trainer = Trainer(config)
    result = trainer.evaluate()
    assert result["loss"] == 42.0
    assert 0 <= result["accuracy"] <= 1
    config = configs.tiny_config(evaluate={"every": 2, "function": "mine_1:evaluation"})
    trainer = Trainer(config.model_copy(update={"log": config.log.model_copy(update={"directory": str(tmp_path)})}))
    assert trainer.run().evaluation == {"answer": 41.04}


def test_evaluation_is_exact_over_tokens(tmp_path: Path) -> None:
    """Compared with one plain pass over the same samples, of which the last batch is incomplete."""
    config = configs.tiny_config(
        data={"source": "text", "seq_len": 16, "validation_fraction": 0.0005},
        train={"global_batch": 8, "micro_batch": 4},
        evaluate={"every": 1, "batches": 100},
    )

    def accuracy(output, batch):
        counts = batch["labels"] != -100
        return ((output.logits().argmax(-1) == batch["labels"]) & counts).sum(), counts.sum()

    trainer = Trainer(config, metrics={"accuracy": accuracy})
    result = trainer.evaluate()
    held = trainer.validation_loaders[""].dataset
    assert len(held) % 8
    samples = held.samples(torch.arange(len(held)).numpy())
    tokens, labels = torch.from_numpy(samples["tokens"].copy()), torch.from_numpy(samples["labels"].copy()).long()
    with torch.no_grad():
        logits = trainer.model.eval()({"tokens": tokens}).logits()
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert result["loss"] == pytest.approx(plain.item(), rel=1e-5)
    assert result["perplexity"] == pytest.approx(plain.exp().item(), rel=1e-4)
    assert result["accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item(), rel=1e-6)


def write_sets(directory: Path) -> dict[str, list[str]]:
    """Two validation sets, of one and of two files, with incomplete last batches and samples."""
    sets = {"web": ["the cat sat on the mat " * 9], "code": ["def f(x):\n    return x\n" * 7, "import os\n" * 5]}
    for name, texts in sets.items():
        for index, text in enumerate(texts):
            (directory / f"{name}-{index}.txt").write_text(text)
    return {name: [str(directory / f"{name}-{index}.txt") for index in range(len(sets[name]))] for name in sets}


def test_named_validation_sets_are_evaluated_each(tmp_path: Path) -> None:
    """Each loss is that of one plain pass over the bytes of the set, with 256 as the end of each file."""
    sets = write_sets(tmp_path)
    config = configs.tiny_config(
        {**configs.LLAMA, "vocab": 257},
        data={"source": "text", "seq_len": 16, "validation_fraction": 0.0005},
        train={"global_batch": 8, "micro_batch": 4},
        evaluate={"every": 1, "batches": 100, "sets": sets},
    )
    trainer = Trainer(config)
    result = trainer.evaluate()
    assert list(result) == ["loss", "perplexity", "web/loss", "web/perplexity", "code/loss", "code/perplexity"]
    for name, files in sets.items():
        stream = [token for file in files for token in [*Path(file).read_bytes(), 256]]
        total = count = 0.0
        for start in range(0, len(stream) - 1, 16):
            tokens, labels = stream[start : start + 16], stream[start + 1 : start + 17]
            with torch.no_grad():
                padded = torch.tensor([tokens + [0] * (16 - len(tokens))], dtype=torch.int32)
                logits = trainer.model.eval()({"tokens": padded}).logits()[0, : len(labels)]
            total += F.cross_entropy(logits, torch.tensor(labels), reduction="sum").item()
            count += len(labels)
        assert count == len(stream) - 1
        assert result[f"{name}/loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"web": "nowhere.txt"}, r"evaluate\.sets\.web: nowhere\.txt: no such file"),
        ({"web": "short.txt"}, r"evaluate\.sets\.web: shorter than a sample of data\.seq_len=16 tokens"),
    ],
)
def test_wrong_validation_set_is_one_line(
    sets: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("short")
    data = {"source": "text", "seq_len": 16}
    config = configs.tiny_config({**configs.LLAMA, "vocab": 257}, data=data, evaluate={"every": 1, "sets": sets})
    with pytest.raises(UserError, match=message):
        Trainer(config)


def test_evaluation_needs_validation_samples() -> None:
    with pytest.raises(UserError, match=r"data\.validation_fraction=0"):
        Trainer(configs.tiny_config()).evaluate()


def test_bert_reports_both_loss_terms(tmp_path: Path) -> None:
    config = configs.tiny_config("bert", log={"directory": str(tmp_path)})
    trainer = Trainer(config)
    trainer.run()
    assert trainer.last_record["loss"] == pytest.approx(
        trainer.last_record["loss/mlm"] + trainer.last_record["loss/nsp"], rel=1e-6
    )


class EventRecorder(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_start(self, trainer):
        self.events.append("start")

    def on_step(self, trainer, step):
        self.events.append(f"step {step}")

    def on_log(self, trainer, record):
        self.events.append(f"log {record['step']}")

    def on_evaluate(self, trainer, record):
        self.events.append(f"evaluate {record['step']}")

    def on_end(self, trainer):
        self.events.append("end")


def test_callbacks_are_called_in_order(tmp_path: Path) -> None:
    recorder = EventRecorder()
    config = configs.tiny_config(
        data={"validation_fraction": 0.0001},
        evaluate={"every": 2, "batches": 1},
        log={"every": 2, "directory": str(tmp_path)},
    )
    Trainer(config, callbacks=[recorder]).run()
    assert recorder.events == [
        "start", "step 1", "log 1", "step 2", "log 2", "evaluate 2", "step 3", "step 4", "log 4", "evaluate 4", "end",
    ]  # fmt: skip


FIELDS = {
    "step", "consumed_samples", "ms_per_iteration", "lr", "global_batch", "loss", "grad_norm", "param_norm",
    "tokens_per_second", "sequences_per_second", "mfu", "mfu_causal", "skipped",
}  # fmt: skip


def test_contents_of_the_run_directory(tmp_path: Path) -> None:
    from trainyard.config.load import load

    config = configs.tiny_config(
        log={"directory": str(tmp_path), "loggers": ["tensorboard"], "every": 2}, checkpoint={"export_hf": True}
    )
    first, second = Trainer(config).run(), Trainer(config).run()
    assert (first.directory.name, second.directory.name) == ("run", "run-2")
    assert load(first.directory / "config.yaml") == config
    lines = [json.loads(line) for line in (first.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 4]
    assert all(set(line) >= FIELDS for line in lines)
    assert [line["consumed_samples"] for line in lines] == [4, 8, 16]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(first.directory / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 4]
    assert not [path.name for path in first.directory.iterdir() if path.name.startswith(".")]


def test_nonfinite_steps_are_skipped_counted_named_and_finally_stop_the_run(tmp_path: Path) -> None:
    broken = {"on": False}

    def fragile(output, batch):
        total = chunked_cross_entropy(output, batch["labels"])
        return (total * float("nan") if broken["on"] else total), (batch["labels"] != -100).sum()

    class BreakSomeSteps(Callback):
        def on_log(self, trainer, record):
            broken["on"] = record["step"] in (2, 5, 6, 7)

    config = configs.tiny_config(
        train={"steps": 20, "max_skipped_steps": 3}, log={"directory": str(tmp_path), "every": 1}
    )
    trainer = Trainer(config, loss=fragile, callbacks=[BreakSomeSteps()])
    with pytest.raises(RunStopped, match=r"step 8: 3 steps in a row.*not finite.*gradient of"):
        trainer.run()
    lines = [json.loads(line) for line in (trainer.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0, 0, 1, 1, 1, 2, 3]
    assert "not_finite" in lines[2]
    assert lines[2]["loss"] == "nan"
    assert "not_finite" not in lines[3]
    assert torch.isfinite(trainer.optimizer.state.master_weights).all()


def test_signal_ends_the_run_after_its_step(tmp_path: Path) -> None:
    class Interrupt(Callback):
        def on_step(self, trainer, number):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)

    config = configs.tiny_config(
        train={"steps": 50}, log={"directory": str(tmp_path), "every": 10}, checkpoint={"export_hf": True}
    )
    summary = Trainer(config, callbacks=[Interrupt()]).run()
    assert summary.interrupted
    assert summary.steps == 3
    assert summary.exported_weights
    assert (summary.exported_weights / "model.safetensors").is_file()
    lines = [json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_impossible_layout_is_one_line() -> None:
    for layout, message in (
        ({"tp": 2}, "multiple of 2 ranks, this run has 1"),
        ({"tp": 3}, r"layout\.tp=3: does not divide model\.heads=4; nearest on 1 rank: tp=1 pp=1 cp=1"),
        ({"pp": 4}, r"layout\.pp=4.*2 layers"),
    ):
        with pytest.raises(UserError, match=message):
            Trainer(configs.tiny_config(layout=layout))


def test_copies_in_memory_are_gone_with_the_run(tmp_path: Path) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    seen: set[str] = set()

    class Look(Callback):
        def on_step(self, trainer, step) -> None:
            seen.update(path.name for path in memory.rglob("*") if path.is_file())

    copies = {"every": 100, "memory_every": 1, "memory_directory": str(memory)}
    config = configs.tiny_config(train={"steps": 8}, log={"directory": str(tmp_path)}, checkpoint=copies)
    Trainer(config, callbacks=[Look()]).run()
    assert {"host", "rank_00000.safetensors"} <= seen
    assert [path for path in memory.rglob("*") if path.is_file()] == []
