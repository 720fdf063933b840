"""The tokenizer's files, which a run saves with its checkpoints and exports with its weights."""

import logging

from trainyard.checkpoint.formats.hf import read_model_files
from trainyard.checkpoint.io.storage import open_storage
from trainyard.checkpoint.native.checkpoint import Checkpoint
from trainyard.checkpoint.native.shard_file import CorruptCheckpoint
from trainyard.checkpoint.registry import find_tokenizer_files, latest_checkpoint
from trainyard.config.schema import Config
from trainyard.data.loading.text_stream import tokenizer_spec
from trainyard.data.text.hf_tokenizer import hf_tokenizer_files
from trainyard.remote.local_copies import is_remote_model, local_tokenizer

logger = logging.getLogger(__name__)


def run_model_files(config: Config, resumed: Checkpoint | None) -> dict[str, bytes]:
    """Contents by file name: those of data.tokenizer, or of the checkpoint from which the run resumes or starts.

    Empty if the tokenizer is not known, as for tokens that were prepared elsewhere. Those of a resumed checkpoint are
    compared with their checksums even if they are not used, so that the user learns of a damaged file.
    """
    saved = _saved_files(resumed) if resumed else {}
    if config.data.source == "text" or config.data.tokenizer != "bytes":
        files = _tokenizer_files(config)
        if config.model.eos_token_id is not None:
            files.pop("generation_config.json", None)  # config.json has the ids
        return files
    init_from = config.checkpoint.resume if config.checkpoint.weights_only else config.checkpoint.init_from
    if saved or not init_from:
        return saved
    if not is_remote_model(init_from) and (latest := latest_checkpoint(open_storage(init_from))):
        return _saved_files(Checkpoint(latest))
    found = find_tokenizer_files(init_from)
    return read_model_files(found[0].parent) if found else {}


def _saved_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files of the tokenizer in a checkpoint. Its weights can be used without them."""
    try:
        return checkpoint.read_model_files()
    except CorruptCheckpoint as error:
        logger.warning("the files of the tokenizer in the checkpoint are not used: %s", error)
        return {}


def _tokenizer_files(config: Config) -> dict[str, bytes]:
    """The files next to the tokenizer, such as its chat template, and those that are missing there."""
    files = hf_tokenizer_files(tokenizer_spec(config))
    path = local_tokenizer(config.data.tokenizer)
    directory = path if path.is_dir() else path.parent
    if path.is_dir() or path.name in ("tokenizer.json", "tokenizer.model"):
        files |= read_model_files(directory)
    return files
