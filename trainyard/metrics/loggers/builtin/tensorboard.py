"""TensorBoard event files in the run directory: scalars, text samples, events, and the configuration as text and
hyperparameters. Written with TensorBoard's own writer; torch's would import torch into the process of the loggers."""

import struct
import time
from collections import deque
from pathlib import Path
from typing import Any

import yaml

from trainyard.metrics.loggers.base import LoggedRun, Logger, event_text, flat_config, scalar_tags

DIRECTORY = "tensorboard"
TAIL_EVENTS = 256
"""Last events of a file among which that of the last step is found."""
RECORD_HEADER = struct.Struct("<QI")
"""Length and checksum of an event; another checksum follows the event."""
CHECKSUM_BYTES = 4


class TensorBoardLogger(Logger):
    """Writes a new event file for each start of the run."""

    def __init__(self) -> None:
        import tensorboard.plugins.hparams.metadata
        import tensorboard.plugins.text.metadata
        import tensorboard.summary.writer.event_file_writer  # noqa: F401

        self.writer: Any = None

    def start(self, run: LoggedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.hparams import metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory = run.directory / DIRECTORY
        first_step = min(last_logged_step(directory), run.resumed_step + 1)
        self.writer = EventFileWriter(str(directory))
        # At every start but the first, TensorBoard drops what older files say from this step on.
        start = Event(wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
        start.step = first_step if run.continues else 0
        self.writer.add_event(start)
        self._add_text("config", yaml.safe_dump(run.config, sort_keys=False), run.resumed_step)
        hparams = _session_start(flat_config(run.config), run.directory.name)
        self._add(0, _hparams_value(metadata.SESSION_START_INFO_TAG, session_start_info=hparams))
        run.replay(self, first_step)
        self.writer.flush()

    def log(self, step: int, record: dict[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = (Summary.Value(tag=tag, simple_value=value) for tag, value in scalar_tags(record).items())
        self._add(step, *values, wall_time=record.get("time"))
        self.writer.flush()

    def log_samples(self, step: int, records: list[dict[str, Any]]) -> None:
        for index, record in enumerate(records):
            self._add_text(f"samples/{index}", record["prompt"] + record["text"], step)
        self.writer.flush()

    def log_event(self, step: int, event: dict[str, Any]) -> None:
        self._add_text(f"events/{event['event']}", event_text(event), step, event["time"])
        self.writer.flush()

    def close(self, outcome: str) -> None:
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        if self.writer:
            status = api_pb2.STATUS_SUCCESS if outcome == "completed" else api_pb2.STATUS_FAILURE
            end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
            self._add(0, _hparams_value(metadata.SESSION_END_INFO_TAG, session_end_info=end))
            self.writer.close()

    def _add(self, step: int, *values: Any, wall_time: float | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.writer.add_event(Event(wall_time=wall_time or time.time(), step=step, summary=Summary(value=values)))

    def _add_text(self, tag: str, text: str, step: int, wall_time: float | None = None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.plugins.text.metadata import create_summary_metadata

        block = "    " + text.replace("\n", "\n    ")  # TensorBoard renders Markdown; it shows such a block as it is
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[block.encode()], tensor_shape=shape)
        metadata = create_summary_metadata(display_name=tag, description="")
        self._add(step, Summary.Value(tag=tag, metadata=metadata, tensor=tensor), wall_time=wall_time)


LOGGER = TensorBoardLogger


def _session_start(values: dict[str, Any], name: str) -> Any:
    """The hyperparameters of a run for TensorBoard's HParams tab."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import SessionStartInfo

    start = SessionStartInfo(group_name=name, start_time_secs=time.time())
    for key, value in values.items():
        kind = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
        setattr(start.hparams[key], kind, value)
    return start


def _hparams_value(tag: str, **content: Any) -> Any:
    """A summary value of the HParams tab; `content` is one field of HParamsPluginData."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    summary_metadata = metadata.create_summary_metadata(HParamsPluginData(**content))
    return Summary.Value(tag=tag, metadata=summary_metadata, tensor=metadata.NULL_TENSOR)


def last_logged_step(directory: Path) -> int:
    """The last step in the event files of a directory; 0 if there is none. It may be logged incompletely."""
    for path in sorted(directory.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if step := max((_scalar_step(event) for event in _last_events(path)), default=0):
            return step
    return 0


def _last_events(path: Path) -> deque[bytes]:
    """The last complete events of a file. Only these are decoded: there are millions of events in a long run."""
    events: deque[bytes] = deque(maxlen=TAIL_EVENTS)
    with path.open("rb") as file:
        while len(header := file.read(RECORD_HEADER.size)) == RECORD_HEADER.size:
            length, _ = RECORD_HEADER.unpack(header)
            content = file.read(length + CHECKSUM_BYTES)
            if len(content) < length + CHECKSUM_BYTES:
                break
            events.append(content[:length])
    return events


def _scalar_step(serialized: bytes) -> int:
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event.FromString(serialized)
    return event.step if any(value.HasField("simple_value") for value in event.summary.value) else 0
