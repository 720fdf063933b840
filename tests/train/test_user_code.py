"""Code of the user by `module:name`: data, update rules, schedules and callbacks. The examples of the guide train,
rules equal those of torch, a resumed run equals an uninterrupted one, and each mistake is one line."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.sgd import sgd

from tests.support import configs, user_code
from tests.train.test_optimizers import gradient, make_optimizer, master, set_gradients, state_tensors, update, weights
from trainyard import Callback, Trainer
from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.config.schema import Config
from trainyard.config.smoke import smoke_config
from trainyard.core.errors import UserError
from trainyard.data.loading.build import build_datasets
from trainyard.formats.registry import open_weights
from trainyard.preflight.dryrun.dry_run import without_io
from trainyard.remote.storage import open_storage
from trainyard.run.callbacks import build_callbacks
from trainyard.train.optim.load_rule import load_update_rule
from trainyard.train.optim.lr_schedule import learning_rate

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "customize.md"
OURS = "tests.support.user_code"


@pytest.fixture
def user_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, from which modules are imported, and forgotten after the test."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file may change twice in a second
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (sys.modules[name].__dict__.get("__file__") or "").startswith(str(tmp_path)):
            del sys.modules[name]


def write_module(directory: Path, text: str, name: str = "mine") -> None:
    (directory / f"{name}.py").write_text(text)
    sys.modules.pop(name, None)


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory: Path) -> list[float]:
    return [record["loss"] for record in records(directory) if "loss" in record]


def test_examples_of_the_guide_train(user_directory: Path) -> None:
    modules = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in modules] == ["mine", "my_data", "my_optim", "my_schedule", "my_callbacks"]
    for name, text in modules:
        write_module(user_directory, text, name)
    np.savetxt(user_directory / "numbers.txt", np.arange(2000) % 250, fmt="%d")
    config = configs.tiny_config(
        train={"steps": 6, "loss": "mine:loss", "callbacks": ["my_callbacks:StopWhenDone"]},
        data={"source": "my_data:make_dataset", "paths": ["numbers.txt"], "validation_fraction": 0.1},
        optimizer={"kind": "my_optim:Lion", "lr": 0.01, "options": {"beta2": 0.98}},
        schedule={"kind": "my_schedule:one_cycle", "warmup_steps": 2},
        evaluate={"every": 3, "batches": 1, "metrics": {"accuracy": "mine:accuracy"}},
    )
    trainer = Trainer(config)
    summary = trainer.run()
    logged = [record for record in records(summary.directory) if "loss" in record]
    assert [record["lr"] for record in logged] == pytest.approx(
        [0.005, 0.01, 0.00853553, 0.005, 0.00146447, 0], abs=1e-8
    )
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.3
    assert set(summary.evaluation) == {"loss", "accuracy"}
    assert trainer.loader.dataset.source(3) == "numbers 48 and following"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rule_equals_torch(precision: str) -> None:
    _, optimizer = make_optimizer(precision, f"{OURS}:Momentum", options={"momentum": 0.8}, max_grad_norm=1.0)
    copies, buffers = weights(optimizer), dict[str, torch.Tensor | None].fromkeys(optimizer.state.names)
    for step in range(1, 4):
        set_gradients(optimizer, step)
        gradients = {name: gradient(optimizer, name).clone() for name in copies}
        norm = torch.cat([value.flatten() for value in gradients.values()]).norm()
        update(optimizer, step)
        for name, copy in copies.items():
            momentum_buffers = [buffers[name]]
            options = {"lr": 1e-2, "momentum": 0.8, "weight_decay": 0.1 if copy.ndim > 1 else 0.0, "dampening": 0.0}
            sgd([copy], [gradients[name] / norm], momentum_buffers, **options, nesterov=False, maximize=False)
            buffers[name] = momentum_buffers[0]
    for name, copy in copies.items():
        assert torch.allclose(master(optimizer, name), copy, 1e-5, 1e-7)
    state = optimizer.state
    assert state.buffers.keys() == {"momentum_buffer"}
    assert torch.equal(state.weights.float(), state.master_weights.to(state.weights.dtype).float())


@pytest.mark.parametrize("precision", ["fp32", "bf16_sr"])
def test_rule_equals_the_built_in_one(precision: str) -> None:
    (_, ours), (_, built_in) = make_optimizer(precision, f"{OURS}:AdamW"), make_optimizer(precision)
    for step in range(1, 4):
        for optimizer in (ours, built_in):
            set_gradients(optimizer, step)
            update(optimizer, step)
    for a, b in zip(state_tensors(ours), state_tensors(built_in), strict=True):
        if precision == "bf16_sr":
            assert torch.equal(a, b)  # the same random bits, too
        assert torch.allclose(a.float(), b.float(), 1e-5, 1e-7)
    before = state_tensors(ours)
    set_gradients(ours, 4)
    gradient(ours, ours.state.names[0]).fill_(float("nan"))
    update(ours, 4)
    assert all(map(torch.equal, state_tensors(ours), before))  # skipped


def test_parts_of_a_shard_are_updated_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for elements in (1 << 24, 1000):
        monkeypatch.setattr("trainyard.train.optim.updates.elementwise.CHUNK_ELEMENTS", elements)
        _, optimizer = make_optimizer(rule=f"{OURS}:AdamW")
        set_gradients(optimizer, 1)
        update(optimizer, 1)
        results.append(optimizer.state.master_weights)
    assert torch.equal(*results)


def configure(directory: Path, rule: str = "Momentum", **sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "train": {"steps": 5},
        "data": {"source": f"{OURS}:make_dataset"},
        "optimizer": {"kind": rule if rule == "adamw" else f"{OURS}:{rule}", "lr": 1e-2},
        "schedule": {"kind": f"{OURS}:triangle"},
        "checkpoint": {"every": 3, "export_hf": False},
        "log": {"directory": str(directory)},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {*base, *sections}}
    return configs.tiny_config("llama", **merged)


@pytest.mark.parametrize("rule", ["Momentum", "PlainSgd"])
def test_resume_is_bitwise(tmp_path: Path, rule: str) -> None:
    directory = Trainer(configure(tmp_path, rule)).run().directory
    step_3 = directory / "checkpoints" / "step_00000003"
    resumed = Trainer(configure(tmp_path, rule, checkpoint={"resume": str(step_3)})).run()
    assert losses(resumed.directory) == losses(directory)[3:]
    with Checkpoint(open_storage(step_3)) as checkpoint:
        assert set(checkpoint.dtypes) == ({"weights", "momentum_buffer"} if rule == "Momentum" else {"weights"})
    opened = open_weights(step_3)
    assert opened.open_state is not None
    assert opened.open_state().counters["step"] == 3


def test_resume_needs_the_state_of_the_rule(tmp_path: Path) -> None:
    directories = {
        rule: str(Trainer(configure(tmp_path, rule, train={"steps": 3})).run().directory)
        for rule in ("Momentum", "adamw")
    }
    for rule, before, missing in (("adamw", "Momentum", "first"), ("Momentum", "adamw", "momentum_buffer")):
        with pytest.raises(
            UserError, match=rf"^optimizer.kind=\S*{rule}: .* has no state {missing}; nearest: \S*{before}"
        ):
            Trainer(configure(tmp_path, rule, checkpoint={"resume": directories[before]}))
    Trainer(configure(tmp_path, "AdamW", log={"name": "b"}, checkpoint={"resume": directories["adamw"]}))  # same state


def test_validation_and_blends(tmp_path: Path) -> None:
    train, validation, needs_shuffle = build_datasets(configure(tmp_path, data={"source": f"{OURS}:make_both"}))
    assert validation is not None
    assert (len(train), len(validation), needs_shuffle) == (40, 5, True)
    train, validation, _ = build_datasets(configure(tmp_path, data={"validation_fraction": 0.1}))
    assert validation is not None
    assert (len(train), len(validation)) == (36, 4)
    blend = {"paths": ["a", "b"], "weights": [3.0, 1.0]}
    assert not build_datasets(configure(tmp_path, data=blend)).needs_shuffle
    config = configure(tmp_path, data={"source": f"{OURS}:make_both", "validation_fraction": 0.1})
    with pytest.raises(
        UserError, match=r"^data.validation_fraction=0.1: .*make_both returns validation samples itself"
    ):
        build_datasets(config)
    with pytest.raises(UserError, match=r"^evaluate.every=2: data.source=.*make_dataset leaves no validation samples"):
        Trainer(configure(tmp_path, evaluate={"every": 2}))


def test_each_path_of_a_blend_makes_a_dataset(user_directory: Path) -> None:
    write_module(
        user_directory,
        f"from {OURS} import Powers\n"
        "def make(config):\n"
        "    (path,) = config.data.paths\n"
        "    return Powers(int(path), config.data.seq_len, 10)\n",
    )
    data = {"source": "mine:make", "paths": ["11", "200"], "weights": [1.0, 1.0]}
    batch = build_datasets(configure(user_directory, data=data)).train.samples(np.arange(8))
    assert {int(row.max()) < 10 for row in batch["tokens"]} == {True, False}


def test_smoke_replaces_data_unless_named(tmp_path: Path) -> None:
    notes: list[str] = []
    config = configure(tmp_path)
    small = smoke_config(config, warn=notes.append)
    assert small.data.source == "text"
    assert notes == [
        f"note: --smoke does not use data.source={OURS}:make_dataset (but built-in text); keys named on the command "
        "line are kept"
    ]
    assert (small.optimizer, small.schedule.kind) == (config.optimizer, config.schedule.kind)
    named = smoke_config(config, overrides=[f"data.source={OURS}:make_both"], warn=notes.append)
    assert (named.data.source, named.data.seq_len, named.model.vocab) == (f"{OURS}:make_both", 64, 260)


def test_a_configuration_imports_nothing() -> None:
    config = configs.tiny_config(
        train={"callbacks": ["no_such_module:A"]},
        data={"source": "no_such_module:f"},
        optimizer={"kind": "no_such_module:A", "options": {"x": [1, 2.5]}},
        schedule={"kind": "no_such_module:f"},
    )
    assert config.optimizer.options == {"x": [1, 2.5]}


def test_dry_runs_use_neither_data_nor_callbacks(tmp_path: Path) -> None:
    sections = {"data": {"source": "absent:f"}, "evaluate": {"every": 2}, "train": {"callbacks": ["absent:A"]}}
    config = without_io(configure(tmp_path, **sections))
    assert (config.data.source, config.data.validation_fraction, config.train.callbacks) == ("synthetic", 0.05, ())
    assert config.optimizer.kind == f"{OURS}:Momentum"


SECTIONS: dict[str, tuple[str, str]] = {
    "train.loss": ("train", "loss"),
    "data.source": ("data", "source"),
    "optimizer.kind": ("optimizer", "kind"),
    "schedule.kind": ("schedule", "kind"),
    "train.callbacks": ("train", "callbacks"),
    "log.loggers": ("log", "loggers"),
}
EXPECTED = {
    "optimizer.kind": "a subclass of trainyard.UpdateRule",
    "train.callbacks": "a subclass of trainyard.Callback",
    "log.loggers": "a subclass of trainyard.Logger",
}


@pytest.mark.parametrize("key", SECTIONS)
def test_mistakes_have_the_same_words_everywhere(user_directory: Path, key: str) -> None:
    write_module(user_directory, "number = 3\nclass Unrelated:\n    pass\n")
    write_module(user_directory, "\n{}['x']\n", "broken")
    expected = EXPECTED.get(key, "a function")
    hint = "install it, or add its directory to PYTHONPATH, or run where it is"
    lines = {
        "absent:f": f"cannot import absent: No module named 'absent'; {hint}",
        "broken:f": f"cannot import broken: KeyError: 'x' ({user_directory}/broken.py, line 2)",
        "mine:numbr": f"expected {expected} as numbr in mine, found nothing; nearest: number",
        "mine:number": f"expected {expected} as number in mine, found an int",
        "mine:Unrelated": f"expected {expected} as Unrelated in mine, found the class Unrelated",
    }
    section, name = SECTIONS[key]
    for path, line in lines.items():
        value = [path] if name in ("callbacks", "loggers") else path
        config = configs.tiny_config(
            **{section: {name: value}}, **({} if section == "log" else {"log": {"loggers": []}})
        )
        with pytest.raises(UserError) as error:
            Trainer(config)
        assert str(error.value) == f"{key}={path}: {line}"


RULE = """
from trainyard import UpdateRule
class Rule(UpdateRule):
    state_names = ("m",)
    def __init__(self, beta=0.9): self.beta = beta
    def update(self, weight, gradient, state, lr, weight_decay, updates):
        return weight - lr * gradient, {"m": gradient}
"""
RULE_MISTAKES = [
    ('("m",)', '"m"', "state_names must be a tuple of names"),
    ('("m",)', '("weights",)', "state_names has 'weights': not a name of its own"),
    ("lr, weight_decay, updates)", "lr)", r"update\(weight, gradient, state, lr\): must take \(weight, .*, updates\)"),
    ("weight - lr * gradient, {", "weight * 1, {'x': 1, ", "returned the state of x, m; state_names has m"),
    ('return weight - lr * gradient, {"m": gradient}', "return weight", r"returned a Tensor; expected \(weight, {"),
    ("return weight", "return weight[:2]", r"returned weight as torch.float32 \[12\]|size of tensor"),
    (
        '{"m": gradient}',
        '{"m": gradient.double()}',
        r"returned m as torch.float64 \[12\]; expected torch.float32 \[12\]",
    ),
    ("lr * gradient,", "lr * gradient / gradient.norm(),", "not elementwise: weight of an element depends on other"),
    ('{"m": gradient}', '{"m": gradient - gradient.mean()}', "not elementwise: m of an element"),
    ("weight - lr", 'state["m"].add_(1) * 0 + weight - lr', "changes its arguments in place; return new tensors"),
    ("weight - lr", "weight + 1 - lr", "moves a weight of 0 whose gradient is 0"),
    ("lr * gradient,", "lr * gradient / gradient.abs(),", "moves a weight of 0 whose gradient is 0"),
]


@pytest.mark.parametrize(("old", "new", "message"), RULE_MISTAKES)
def test_mistakes_in_a_rule(user_directory: Path, old: str, new: str, message: str) -> None:
    write_module(user_directory, RULE)
    assert load_update_rule(configs.tiny_config(optimizer={"kind": "mine:Rule"}).optimizer)
    write_module(user_directory, RULE.replace(old, new, 1))
    with pytest.raises((UserError, RuntimeError), match=message):
        load_update_rule(configs.tiny_config(optimizer={"kind": "mine:Rule"}).optimizer)


def test_options_of_a_rule(user_directory: Path) -> None:
    write_module(user_directory, RULE)
    section = configs.tiny_config(optimizer={"kind": "mine:Rule", "options": {"betta": 0.1}}).optimizer
    with pytest.raises(UserError, match=r"^optimizer.options.betta: mine:Rule takes beta; nearest: beta$"):
        load_update_rule(section)
    with pytest.raises(UserError, match=r"^optimizer.options=.*: kind=adamw has none; nearest: kind=my_module:MyRule$"):
        configs.tiny_config(optimizer={"options": {"beta": 0.1}})


DATASET = """
import numpy as np
class Samples:
    def __len__(self): return 9
    def samples(self, indices):
        tokens = indices[:, None] + np.arange(16)
        return {"tokens": tokens, "labels": tokens + 1}
def make(config): return Samples()
"""
DATA_MISTAKES = [
    ('"tokens": tokens, ', "", "samples lack tokens; needed: tokens, labels"),
    ('"labels": tokens + 1', '"labels": tokens, "label": tokens', "samples have label, which the model .*: labels"),
    ('"labels"', '"document_ids": tokens, "labels"', "which the model does not take; nearest: data.document_mask=true"),
    (
        "np.arange(16)",
        "np.arange(15)",
        r"tokens of 2 samples has shape \[2, 15\]; expected \[2, 16\] \(data.seq_len=16\)",
    ),
    ("tokens + 1", "tokens + 1.0", "labels is an array of float64; expected a numpy array of int32"),
    ("tokens + 1", "tokens.tolist()", "labels is a list; expected a numpy array"),
    ("np.arange(16)", "np.arange(16) * 17", r"tokens of sample 8 has 263; expected 0 to 259 \(model.vocab=260\)"),
    ("tokens + 1", "tokens - 2", "labels of sample 0 has -2; expected 0 to 259, or -100 to ignore it"),
    ("indices[:, None]", "np.random.randint(9)", "sample 8 differs from call to call|tokens of 2 samples has shape"),
    ("tokens + 1", "tokens * 0 + len(indices)", "labels of sample 8 differs from call to call"),
    ("return {", "return tokens, {", "samples returned a tuple; expected arrays by field"),
    ("samples(self, indices)", "samples(self)", r"samples\(\): must take \(indices\)"),
    ("make(config)", "make()", r"make\(\): must take \(config\)"),
    ("return Samples()", "return [1]", r"returned a list; expected a dataset with len\(\) and samples\(indices\)"),
    ("return 9", "return 0", "^data.seq_len=16: mine:make has no sample to train on"),
]


@pytest.mark.parametrize(("old", "new", "message"), DATA_MISTAKES)
def test_mistakes_in_samples(user_directory: Path, old: str, new: str, message: str) -> None:
    config = configs.tiny_config(data={"source": "mine:make"})
    write_module(user_directory, DATASET)
    assert len(build_datasets(config).train) == 9
    write_module(user_directory, DATASET.replace(old, new))
    with pytest.raises(UserError, match=message) as error:
        build_datasets(config)
    assert "mine:make" in str(error.value)


def test_bert_samples_are_checked(user_directory: Path) -> None:
    write_module(
        user_directory,
        "from trainyard.data.loading.synthetic import SyntheticSentencePairs\n"
        "class Pairs(SyntheticSentencePairs):\n"
        "    wrong = None\n"
        "    def samples(self, indices):\n"
        "        sample = super().samples(indices)\n"
        "        return sample | ({Pairs.wrong: sample[Pairs.wrong] + 99} if Pairs.wrong else {})\n"
        "def make(config): return Pairs(config.data, config.model.vocab, config.train.seed)\n",
    )
    config = configs.tiny_config("bert", data={"source": "mine:make"})
    synthetic = build_datasets(configs.tiny_config("bert")).train.samples(np.arange(3))
    ours = build_datasets(config).train.samples(np.arange(3))
    assert all(np.array_equal(ours[name], array) for name, array in synthetic.items())
    for field in ("segment_ids", "attention_mask", "masked_positions", "next_sentence_labels"):
        sys.modules["mine"].Pairs.wrong = field
        with pytest.raises(UserError, match=rf"^data.source=mine:make: {field} of sample 0 has \d+; expected 0 to"):
            build_datasets(config)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f(step): return 1.0", r"^schedule.kind=mine:f: f\(step\): must take \(step, config\)$"),
        ("def f(step, config): return None", "returned None for step 1; expected a factor on optimizer.lr"),
        ("def f(step, config): return -0.5", "returned -0.5 for step 1; "),
        ("def f(step, config): return float('nan') if step > 1 else 1", "returned nan for step 4; "),
    ],
)
def test_mistakes_in_a_schedule(user_directory: Path, body: str, message: str) -> None:
    write_module(user_directory, body)
    with pytest.raises(UserError, match=message):
        Trainer(configs.tiny_config(schedule={"kind": "mine:f"}))


def test_schedule_is_a_factor() -> None:
    config = configs.tiny_config(schedule={"kind": f"{OURS}:triangle"}, optimizer={"lr": 0.5})
    assert [learning_rate(config, step) for step in (1, 2, 4)] == [
        0.5 * user_code.triangle(step, config) for step in (1, 2, 4)
    ]


def test_misspelled_callbacks_are_refused(user_directory: Path) -> None:
    class Misspelled(Callback):
        def on_steps(self, trainer: Any, step: int) -> None: ...

    class Short(Callback):
        def on_step(self, trainer: Any) -> None: ...  # type: ignore[override]

    class Longer(Callback):
        def on_step(self, trainer: Any, *more: Any, note: str = "") -> None: ...

        def onward(self) -> None: ...

    mistakes: list[tuple[object, str]] = [
        (
            Misspelled(),
            r"^Misspelled.on_steps: no method of trainyard.Callback, so nothing calls it; nearest: on_step$",
        ),
        (Short(), r"^Short.on_step\(trainer: Any\) -> None: must take \(trainer, step\)$"),
        (object(), r"^callbacks: expected an object of a subclass of trainyard.Callback, found an object$"),
        (Callback, r"^callbacks: expected an object of .*, found the class Callback$"),
    ]
    for callback, message in mistakes:
        with pytest.raises(UserError, match=message):
            Trainer(configs.tiny_config(), callbacks=[callback])  # type: ignore[list-item]
    build_callbacks([Longer(), Callback()], [])
    write_module(
        user_directory,
        "from trainyard import Callback\n"
        "class Wrong(Callback):\n    def on_zzzzzzzzzzzz(self): ...\n"
        "class Needs(Callback):\n    def __init__(self, limit): ...\n",
    )
    with pytest.raises(
        UserError, match=r"^train.callbacks=mine:Wrong: Wrong.on_zzzzzzzzzzzz: no method .* one of on_start, "
    ):
        build_callbacks([], ["mine:Wrong"])
    with pytest.raises(UserError, match=r"^train.callbacks=mine:Needs: must work without arguments: missing .*'limit'"):
        build_callbacks([], ["mine:Needs"])
