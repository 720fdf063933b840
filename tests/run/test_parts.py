"""The order in which a run calls its parts and the user's callbacks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import tiny_config
from trainyard import Callback, Trainer
from trainyard.run.callbacks import METHODS, Part, TrainerView
from trainyard.run.checkpointing.saver import Saver
from trainyard.run.run_log import RunLog


def recorded_part(name: str, calls: list[tuple[str, str]], fail_at: str = "") -> Part:
    """A part that records which of its methods are called. `fail_at` raises."""

    def method(event: str) -> Any:
        def call(self: Part, *arguments: Any) -> Any:
            calls.append((name, event))
            if event == fail_at:
                raise ValueError(event)
            return arguments[1] if event == "add_status" else None

        return call

    events = [event for event, value in vars(Part).items() if callable(value)]
    return type("RecordedPart", (Part,), {event: method(event) for event in events})()


def test_parts_begin_in_order_and_end_in_reverse_order(tmp_path: Path) -> None:
    calls: list[tuple[str, str]] = []
    parts = [recorded_part(name, calls) for name in "ab"]
    Trainer(tiny_config(train={"steps": 1}, log={"directory": str(tmp_path)}), callbacks=parts).run()
    events = [event for name, event in calls if name == "a"]
    assert events == [
        *("open", "begin_run", "begin_step", "add_status", "handle_status", "end_step", "add_metrics"),
        *("complete_step", "finish", "end_run", "close"),
    ]
    for event in events:
        nests = event in ("end_step", "complete_step", "end_run", "end_at_deadline", "close")
        assert [name for name, each in calls if each == event] == (["b", "a"] if nests else ["a", "b"])


@pytest.mark.parametrize("event", ["open", "begin_run", "begin_step", "handle_status", "complete_step", "finish"])
def test_all_parts_close_after_an_error(tmp_path: Path, event: str) -> None:
    calls: list[tuple[str, str]] = []
    parts = [recorded_part("a", calls), recorded_part("b", calls, fail_at=event), recorded_part("c", calls)]
    trainer = Trainer(tiny_config(train={"steps": 1}, log={"directory": str(tmp_path)}), callbacks=parts)
    with pytest.raises(ValueError, match=event):
        trainer.run()
    assert [name for name, each in calls if each == "close"] == ["c", "b", "a"]
    assert [name for name, each in calls if each == "end_run"] == ([] if event == "open" else ["c", "b", "a"])


@pytest.mark.parametrize("event", ["on_log", "on_evaluate", "on_checkpoint"])
def test_a_record_is_in_the_log_when_a_callback_fails(tmp_path: Path, event: str) -> None:
    def fail(self: Callback, trainer: TrainerView, record: dict[str, Any]) -> None:
        raise ValueError(event)

    callback = type("Fail", (Callback,), {event: fail})()
    config = tiny_config(
        data={"source": "text", "seq_len": 16, "validation_fraction": 0.01},
        train={"steps": 1},
        evaluate={"every": 1, "batches": 1},
        checkpoint={"every": 1, "blocking": True},
        log={"directory": str(tmp_path)},
    )
    trainer = Trainer(config, callbacks=[callback])
    with pytest.raises(ValueError, match=event):
        trainer.run()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    field = {"on_log": "grad_norm", "on_evaluate": "evaluate/loss", "on_checkpoint": "checkpoint"}[event]
    assert field in records[-1]
    assert (trainer.last_checkpoint is not None) == (event == "on_checkpoint")
    assert trainer.part(RunLog)
    assert trainer.part(Saver)


def test_callbacks_of_the_user_have_no_method_of_a_part() -> None:
    """A helper method of a user's callback, such as `close`, is never called by the trainer."""
    assert all(name.startswith("on_") for name in METHODS)
    assert not any(name in vars(Callback) for name in vars(Part) if not name.startswith("_"))
