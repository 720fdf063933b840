"""Datasets from outside the package: made by what data.source names, with checks of every sample.

A dataset only numbers samples, so order, blends, layouts and resuming are those of the built-in sources.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.config.data_schema import DataSection
from trainyard.config.registries import SOURCES
from trainyard.config.schema import Config
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.user_code import (
    check_call,
    describe_object,
    import_function,
    is_user_path,
    load_object,
    nearest_name,
    search_current_directory,
)
from trainyard.data.loading.dataset import Dataset, Indices, sample_lengths
from trainyard.data.samples import Sample
from trainyard.data.source import DataSource
from trainyard.families import ModelConfig, family_of
from trainyard.remote.chunks.remote_path import RemoteFiles

DOCUMENT_FIELDS = ("document_ids", "position_ids")
"""Fields that data.document_mask and data.packing add."""


@dataclass(frozen=True)
class FieldSpec:
    """The values that a field of a sample may have."""

    shape: tuple[int, ...]
    """Of one sample."""
    shape_keys: str
    limit: int | None
    """Values are 0 to below this."""
    limit_key: str = ""
    can_ignore: bool = False
    """IGNORE_INDEX is a value too."""


def sample_fields(data: DataSection, model: ModelConfig) -> dict[str, FieldSpec | None]:
    """The fields that samples for this model have; None: a field of a user's family, known only to it."""
    family = family_of(model)
    tokens, seq_len_key = (data.seq_len,), f"data.seq_len={data.seq_len}"
    masked, masked_key = (data.max_predictions,), f"data.max_predictions={data.max_predictions}"
    vocab = (model.vocab, f"model.vocab={model.vocab}")
    label_shape = (masked, masked_key) if "masked_positions" in family.batch_fields else (tokens, seq_len_key)
    segments = getattr(model, "segments", None)
    known = {
        "tokens": FieldSpec(tokens, seq_len_key, *vocab),
        "labels": FieldSpec(*label_shape, *vocab, can_ignore=True),
        "document_ids": FieldSpec(tokens, seq_len_key, data.seq_len, seq_len_key),
        "position_ids": FieldSpec(tokens, seq_len_key, data.seq_len, seq_len_key),
        "segment_ids": FieldSpec(tokens, seq_len_key, segments, f"model.segments={segments}"),
        "attention_mask": FieldSpec(tokens, seq_len_key, 2),
        "masked_positions": FieldSpec(masked, masked_key, data.seq_len, seq_len_key),
        "next_sentence_labels": FieldSpec((), "one number per sample", 2, can_ignore=True),
    }
    names = (*family.batch_fields, *(DOCUMENT_FIELDS if data.separates_documents else ()))
    return {name: known.get(name) for name in names}


class CheckedDataset:
    """A user's dataset that raises UserError for a sample that the model cannot take."""

    def __init__(self, dataset: Any, data: DataSection, model: ModelConfig) -> None:
        self.dataset, self.path, self.fields = dataset, data.source, sample_fields(data, model)
        self.label, self.separates_documents = f"data.source={self.path}", data.separates_documents
        for name in ("__len__", "samples"):
            if not callable(getattr(dataset, name, None)):
                raise UserError(
                    f"{self.label}: returned {describe_object(dataset)}; expected a dataset with len() and "
                    "samples(indices), or (train, validation)"
                )
        check_call(dataset.samples, ("indices",), f"{self.label}: samples")
        self.length, self.lengths = len(dataset), sample_lengths(dataset)
        self._check_ends()

    def __len__(self) -> int:
        return self.length

    def samples(self, indices: Indices) -> Sample:
        returned = self.dataset.samples(indices)
        if not isinstance(returned, dict):
            raise UserError(f"{self.label}: samples returned {describe_object(returned)}; expected arrays by field")
        if missing := [name for name in self.fields if name not in returned]:
            raise UserError(f"{self.label}: samples lack {missing[0]}; needed: {', '.join(self.fields)}")
        for name in returned:
            if name not in self.fields:
                needs_mask = name in DOCUMENT_FIELDS and not self.separates_documents
                hint = "; nearest: data.document_mask=true" if needs_mask else nearest_name(str(name), self.fields)
                raise UserError(f"{self.label}: samples have {name}, which the model does not take{hint}")
        return {name: self._checked(name, returned[name], spec, indices) for name, spec in self.fields.items()}

    def source(self, index: int) -> str:
        describe = getattr(self.dataset, "source", None)
        return str(describe(index)) if callable(describe) else f"{self.path}, sample {index}"

    def _checked(self, name: str, array: Any, spec: FieldSpec | None, indices: Indices) -> NDArray[np.int32]:
        if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.integer):
            found = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else describe_object(array)
            raise UserError(f"{self.label}: {name} is {found}; expected a numpy array of int32")
        if spec and array.shape != (shape := (len(indices), *spec.shape)):
            raise UserError(
                f"{self.label}: {name} of {counted(len(indices), 'sample')} has shape "
                f"{list(array.shape)}; expected {list(shape)} "
                f"({spec.shape_keys})"
            )
        if spec and spec.limit is not None:
            wrong = (array < 0) | (array >= spec.limit)
            if spec.can_ignore:
                wrong &= array != IGNORE_INDEX
            if wrong.any():
                at = np.argwhere(wrong)[0]
                allowed = f"0 to {spec.limit - 1}" + (f", or {IGNORE_INDEX} to ignore it" if spec.can_ignore else "")
                reason = f" ({spec.limit_key})" if spec.limit_key else ""
                found = f"{name} of sample {indices[at[0]]} has {array[tuple(at)]}"
                raise UserError(f"{self.label}: {found}; expected {allowed}{reason}")
        return array.astype(np.int32, copy=False)

    def _check_ends(self) -> None:
        """Read the first and the last sample, together and alone: a sample may depend on its index only."""
        if not self.length:
            return
        ends = np.array([0, self.length - 1], np.int64)
        together, alone = self.samples(ends), self.samples(ends[1:])
        for name in self.fields:
            if not np.array_equal(together[name][1:], alone[name]):
                raise UserError(
                    f"{self.label}: {name} of sample {ends[1]} differs from call to call; a sample must depend on its "
                    "index only"
                )


class FunctionSource(DataSource):
    """A function (config) of the user, which returns a dataset, or one for training and one for validation. Its
    data.paths need not be files."""

    reads_files = False

    def open(
        self, config: Config, paths: tuple[str, ...], remote: RemoteFiles | None
    ) -> tuple[Dataset, Dataset | None]:
        path, key = config.data.source, "data.source"
        function = import_function(path, key)
        check_call(function, ("config",), f"{key}={path}: {function.__name__}")
        returned = function(config.model_copy(update={"data": config.data.model_copy(update={"paths": paths})}))
        train, validation = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if validation is not None and config.data.validation_fraction:
            fraction = f"data.validation_fraction={config.data.validation_fraction}"
            raise UserError(f"{fraction}: {path} returns validation samples itself; nearest: 0")
        return train, validation


def find_source(data: DataSection) -> DataSource:
    """The source that data.source names. Imports code of the user."""
    if is_user_path(data.source):
        try:
            search_current_directory()
            found = load_object(data.source, "a function")
        except UserError:
            return FunctionSource()  # reports the mistake when it is opened
        return found if isinstance(found, DataSource) else FunctionSource()
    named: DataSource = SOURCES.find(data.source)
    return named
