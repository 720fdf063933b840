"""The reference of a run on pairs: what the model of step 0 gives their answers, computed once and found again."""

import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from trainyard.core.batch import Batch
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.user_cache import user_cache
from trainyard.data.loading.fingerprint import fingerprint_file
from trainyard.formats.peft.adapter import lora_options
from trainyard.run.frozen_weights import FrozenWeights
from trainyard.run.setup import TrainSetup
from trainyard.train.pair_loss import PairLoss
from trainyard.train.reference_scores import LiveReference, ReferenceScores, log_progress, score_pairs

REFERENCE_FILE = "reference_scores.npz"


def prepare_reference(run: TrainSetup, directory: Path) -> None:
    """Give the batches of a run the scores of its reference. They come from its directory, or that of the checkpoint
    that it continues, from the cache of an earlier run that started from the same weights, or from the model, which is
    the reference until the first update."""
    loss = run.loss_fn
    if prepare_live_reference(run) or not isinstance(loss, PairLoss) or not loss.needs_reference:
        return
    files = [directory / REFERENCE_FILE]
    if key := _weights_key(run):
        files.append(user_cache("reference", is_writable=True) / f"{key}.npz")
    of_source = [Path(str(run.resumed.storage)).parent.parent / REFERENCE_FILE] if run.resumed else []
    known = run.mesh.broadcast_object(lambda: _read([*files, *of_source]), run.device)
    before, is_leader = len(known.keys), run.mesh.layout_rank == 0

    def save() -> None:
        for file in files if is_leader else ():
            file.parent.mkdir(parents=True, exist_ok=True)
            known.write(file)

    run.runner.add_reference = None
    batches, samples = _batches(run)
    if run.completed_steps:
        lacking = sum(map(known.lacks, batches))
        if any(run.mesh.all_gather_object(lacking)):
            raise UserError(
                f"{directory / REFERENCE_FILE}: lacks the scores of {counted(lacking, 'batch')} of this rank, and the "
                f"model has changed; nearest: the file of the run's first start, or its train.steps and data"
            )
    else:
        log_progress(score_pairs(run.runner, loss, known, batches), samples, save)
    if len(known.keys) > before or not files[0].exists():
        save()
    run.runner.add_reference = known.attach


def prepare_live_reference(run: TrainSetup) -> bool:
    """Let each step compute the scores of the reference, if the run wants that."""
    loss = run.loss_fn
    if not isinstance(loss, PairLoss) or not loss.is_live:
        return False
    run.runner.add_reference, loss.add_live_scores = None, LiveReference(FrozenWeights(run).in_place)
    return True


def _read(files: list[Path]) -> ReferenceScores:
    known = ReferenceScores()
    for file in files:
        found = ReferenceScores.read(file)
        known.add(found.keys, found.scores)
    return known


def _batches(run: TrainSetup) -> tuple[Iterator[Batch], int]:
    """This rank's part of all batches that the run will have, and how many samples they have over all ranks; each
    sample once, if its steps have most of them."""
    config, loader = run.config, run.loader
    samples = (config.train.steps - run.completed_steps) * config.train.global_batch
    if samples > len(loader.dataset) // 2:
        samples, train = len(loader.dataset), loader.one_epoch(run.batch_slice)
    else:
        train = (loader.batch(step, run.batch_slice) for step in range(run.completed_steps, config.train.steps))
    held_out = run.validation_loaders.values()
    batches = chain(train, *(each.one_epoch(run.batch_slice) for each in held_out))
    return batches, samples + sum(len(each.dataset) for each in held_out)


def _weights_key(run: TrainSetup) -> str | None:
    """Names the weights of step 0 and the numbers they compute; None: they are the caller's."""
    if run.base is None:
        return None
    config = run.config
    parts = [str(run.base.location), run.base.seed, config.model.model_dump(mode="json"), config.precision.model_dump()]
    adapter = lora_options(config.model)
    for source in (run.base.location, adapter.init_from if adapter else None):
        if source and (path := Path(source).expanduser()).exists():
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            parts.append([[file.name, *fingerprint_file(file)] for file in files if file.is_file()])
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
