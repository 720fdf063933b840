"""From a configuration to its training and validation datasets."""

from collections.abc import Mapping
from typing import NamedTuple

from trainyard.config.data_schema import DataSection
from trainyard.config.registries import SOURCES
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.user_code import is_user_path
from trainyard.data.loading.blend import BlendedDataset
from trainyard.data.loading.data_files import remote_files
from trainyard.data.loading.dataset import Dataset, concatenate, subset
from trainyard.data.loading.text_stream import tokenizer_spec
from trainyard.data.loading.user_dataset import CheckedDataset, find_source
from trainyard.data.text.tokenizer import load_tokenizer
from trainyard.remote.chunks.remote_path import RemoteFiles


class TrainValidDatasets(NamedTuple):
    train: Dataset
    validation: Dataset | None
    needs_shuffle: bool
    """True if the loader has to shuffle the training samples; blends and Megatron's order are shuffled already."""


def build_datasets(config: Config) -> TrainValidDatasets:
    data = config.data
    remote = remote_files(data, refresh=True)
    if data.order != "shuffled":
        return TrainValidDatasets(*find_source(data).open_in_order(config, remote), False)
    trains: list[Dataset] = []
    validations: list[Dataset] = []
    for paths in [(path,) for path in data.paths] if data.weights else [data.paths]:
        train, validation = _build_dataset(config, paths, remote)
        count = max(round(len(train) * data.validation_fraction), 1) if data.validation_fraction else 0
        if len(train) <= count:
            source = data.source if is_user_path(data.source) else ", ".join(paths) or "the built-in text"
            raise UserError(
                f"data.seq_len={data.seq_len}: {source} has no sample to train on; use more text or a shorter seq_len"
            )
        if count:
            train, validation = subset(train, 0, len(train) - count), subset(train, len(train) - count, count)
        trains.append(train)
        validations += [validation] if validation else []
    validation = concatenate(validations) if validations else None
    if data.weights:
        return TrainValidDatasets(BlendedDataset(trains, data.weights, config.train.seed), validation, False)
    return TrainValidDatasets(trains[0], validation, True)


def validation_sections(data: DataSection, sets: Mapping[str, tuple[str, ...]]) -> dict[str, DataSection]:
    """How each of evaluate.sets is read: as data.paths, but in order and as a whole."""
    as_a_whole = {"weights": (), "order": "shuffled", "split": None, "validation_fraction": 0.0}
    return {name: data.model_copy(update={**as_a_whole, "paths": paths}) for name, paths in sets.items()}


def build_validation_sets(config: Config) -> dict[str, Dataset]:
    """The dataset of each of evaluate.sets."""
    datasets: dict[str, Dataset] = {}
    for name, data in validation_sections(config.data, config.evaluate.sets).items():
        section = config.model_copy(update={"data": data})
        try:
            datasets[name], _ = _build_dataset(section, data.paths, remote_files(data, refresh=True))
        except UserError as error:
            raise UserError(f"evaluate.sets.{name}: {str(error).removeprefix('data.paths=')}") from None
        if not len(datasets[name]):
            raise UserError(f"evaluate.sets.{name}: shorter than a sample of data.seq_len={data.seq_len} tokens")
    return datasets


def _build_dataset(
    config: Config, paths: tuple[str, ...], remote: RemoteFiles | None
) -> tuple[Dataset, Dataset | None]:
    """The dataset of these paths, and the part that the source holds out for validation. What is not built in is
    checked."""
    data, model = config.data, config.model
    train, validation = find_source(data).open(config, paths, remote)
    if data.source in SOURCES.built_in:
        return train, validation
    return CheckedDataset(train, data, model), None if validation is None else CheckedDataset(validation, data, model)


def grow_vocab(config: Config) -> Config:
    """The configuration with a model.vocab that has room for model.new_tokens. It does not change a second time."""
    data, model = config.data, config.model
    if not model.new_tokens:
        return config
    if data.tokenizer == "bytes" and not (data.source == "text" or data.has_flag("has_documents")):
        raise UserError(
            f"model.new_tokens: the tokenizer of data.source={data.source} is not known; set data.tokenizer"
        )
    vocab = max(model.vocab, load_tokenizer(tokenizer_spec(data, model.new_tokens)).vocab_size)
    return config.model_copy(update={"model": model.model_copy(update={"vocab": vocab})})


def data_vocab_size(data: DataSection) -> int | None:
    """The smallest model.vocab for data.paths; None: any."""
    return find_source(data).vocab_size(data, remote_files(data))
