"""The tokenizer's files, which a run saves with its checkpoints, and the export of its weights with them."""

import logging
from functools import partial
from pathlib import Path

from trainyard.checkpoint.checkpoint import Checkpoint, latest_checkpoint
from trainyard.checkpoint.shard_file import CorruptCheckpoint
from trainyard.config.data_schema import DataSection
from trainyard.core.errors import UserError
from trainyard.data.loading.text_stream import tokenizer_spec
from trainyard.data.loading.user_dataset import find_source
from trainyard.data.text.tokenizer import add_new_tokens, model_tokenizer_files, read_json
from trainyard.families import ModelConfig
from trainyard.formats.hf import InMemoryWeights, read_model_files, save_hf
from trainyard.formats.peft.adapter import RUN_FOLDER, lora_options
from trainyard.formats.peft.write_adapter import absolute_base, write_adapter
from trainyard.formats.registry import check_export, find_tokenizer_files
from trainyard.parallel.rank_context import RankContext
from trainyard.remote.local_copies import is_remote_model
from trainyard.remote.storage import open_storage
from trainyard.train.optim.gather_full import gather_full_parameter
from trainyard.train.optim.optimizer import Optimizer

logger = logging.getLogger(__name__)


def run_model_files(
    data: DataSection, model: ModelConfig, weights_from: str | None, resumed: Checkpoint | None
) -> dict[str, bytes]:
    """Contents by file name: those of data.tokenizer, or of the checkpoint from which the run resumes or starts, with
    the model.new_tokens.

    Empty if the tokenizer is not known, as for tokens that were prepared elsewhere. Those of a resumed checkpoint are
    compared with their checksums even if they are not used, so that the user learns of a damaged file.
    """
    return add_new_tokens(_model_files(data, model, weights_from, resumed), model.new_tokens)


def _model_files(
    data: DataSection, model: ModelConfig, weights_from: str | None, resumed: Checkpoint | None
) -> dict[str, bytes]:
    saved = _saved_files(resumed) if resumed else {}
    if data.has_flag("makes_tokens") or data.tokenizer != "bytes":
        files = model_tokenizer_files(tokenizer_spec(data, ()))
        generation = read_json(files, "generation_config.json")
        if model.eos_token_id is not None:
            files.pop("generation_config.json", None)  # config.json has the ids
        return files | find_source(data).model_files(data, model, generation)
    if saved or not weights_from:
        return saved
    if not is_remote_model(weights_from) and (latest := latest_checkpoint(open_storage(weights_from))):
        return _saved_files(Checkpoint(latest))
    found = find_tokenizer_files(weights_from)
    return read_model_files(found[0].parent) if found else {}


def check_run_export(model: ModelConfig) -> None:
    """Raise UserError if the run cannot export its weights, as checkpoint.export_hf asks."""
    try:
        check_export(model)
    except UserError as error:
        raise UserError(f"checkpoint.export_hf=true: {error}; nearest: false") from None


def export_weights(
    run_directory: Path,
    model: ModelConfig,
    weights_from: str | None,
    optimizer: Optimizer,
    context: RankContext,
    model_files: dict[str, bytes],
) -> Path:
    """Write the final weights in Hugging Face format, or the adapter of a model that has one, in the dtype of its
    master weights. `weights_from` is what the run started from. All ranks call this together, the first one writes."""
    exported, dtype = run_directory / "model", optimizer.state.compute_dtype
    read = partial(gather_full_parameter, optimizer.state, context.blueprint, context.mesh)
    if lora_options(model):
        exported, dtype = run_directory / RUN_FOLDER, optimizer.state.master_weights.dtype
        weights, base = InMemoryWeights(model, read, dtype), absolute_base(weights_from)
        write_adapter(exported, weights, base, model_files=model_files, is_writer=context.mesh.layout_rank == 0)
        return exported
    save_hf(exported, model, read, dtype, context.mesh.layout_rank == 0, model_files)
    return exported


def _saved_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files of the tokenizer in a checkpoint. Its weights can be used without them."""
    try:
        return checkpoint.read_model_files()
    except CorruptCheckpoint as error:
        logger.warning("the files of the tokenizer in the checkpoint are not used: %s", error)
        return {}
