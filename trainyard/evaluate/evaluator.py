"""Evaluates checkpoints on data sets. The Evaluator holds the model on one rank of any layout, without an optimizer,
and uses the code that evaluates during training."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from trainyard import models
from trainyard.checkpoint.weights import WeightSource, local_values
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.batch import Batch
from trainyard.core.world import World
from trainyard.data.loading.loader import BatchLoader
from trainyard.data.loading.text_stream import tokenizer_spec
from trainyard.data.text.tokenizer import Tokenizer, load_tokenizer
from trainyard.evaluate.by_position import LossByPosition, position_rows
from trainyard.evaluate.data_sets import DataOptions, EvaluationData, open_data
from trainyard.formats.registry import OpenedCheckpoint, read_model_files
from trainyard.inference.text.tokenizer_files import load_model_tokenizer, model_end_ids
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh
from trainyard.train import build
from trainyard.train.compile.compile_blocks import make_compile_fn
from trainyard.train.decisions import packs_batches
from trainyard.train.evaluate import PERPLEXITY_TERMS, evaluate
from trainyard.train.micro_batches.runner import MicroBatchOptions, MicroBatchRunner
from trainyard.train.micro_batches.split import rank_samples
from trainyard.train.optim.flat_state import DTYPES

BITS_PER_NAT = 1 / log(2)
OnProgress = Callable[[str, int, int], None]
"""Called with what is counted, how many are done, and their total."""


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint that an evaluation reads on one rank."""

    path: str | Path
    opened: OpenedCheckpoint
    config: Config
    """Of the evaluation."""
    world: World
    on_progress: OnProgress = lambda what, done, total: None


def evaluate_data(
    source: CheckpointSource,
    data: Sequence[str] | Mapping[str, Sequence[str]],
    tokenizer: str | None = None,
    stride: int | None = None,
    text_key: str = "text",
    seq_len_is_given: bool = False,
    by_position: int | None = None,
) -> list[dict[str, Any]]:
    """The results of each data set: of each argument, or of the arguments of each name. `tokenizer` names one; by
    default it comes with the checkpoint. `by_position`: parts of a window whose loss is reported, too. The other
    arguments are those of DataOptions. All ranks call this."""
    config, weights = source.config, source.opened.weights
    if tokenizer:
        spec = tokenizer_spec(config.data, config.model.new_tokens)._replace(name=tokenizer)
        loaded: Tokenizer | None = load_tokenizer(spec)
    else:
        files = read_model_files(weights, source.path)
        loaded = load_model_tokenizer(files, config.data.end_of_text)
        if loaded and loaded.end_id is None and (end_ids := model_end_ids(files, weights.model)):
            loaded.end_id, loaded.special_ids = end_ids[0], loaded.special_ids | {end_ids[0]}
    options = DataOptions(config.model, config.data, loaded, stride, text_key, seq_len_is_given)
    sets = data if isinstance(data, Mapping) else {argument: [argument] for argument in data}
    # A wrong path is reported before weights are read.
    opened = [open_data(name, arguments, options) for name, arguments in sets.items()]
    evaluator = Evaluator(config, weights, source.world, source.on_progress, by_position)
    return [evaluator.evaluate(each) for each in opened]


class Evaluator:
    """One rank of an evaluation."""

    def __init__(
        self,
        config: Config,
        weights: WeightSource,
        world: World | None = None,
        on_progress: OnProgress = lambda what, done, total: None,
        by_position: int | None = None,
    ) -> None:
        """Build the stages of this rank and read its part of `weights`."""
        self.config, self.on_progress = config, on_progress
        self.world = world = world or World.from_environment()
        self.layout = Layout.from_config(config, world.size)
        self.device = build.build_device(config.device, config.precision, world)
        rank_order = self.device.rank_order(self.layout.tp, world.size)
        self.mesh = Mesh.create(self.layout, self.device, world, rank_order)
        compile_fn = make_compile_fn(config.compile, self.device, world.local_rank)
        model, precision = config.model, config.precision
        self.context = context = build.build_rank_context(model, config.device, self.device, self.mesh)
        self.loss_fn = build.build_loss(config, None, context, compile_fn)
        self.metrics = build.build_metrics(config.evaluate.metrics, None, self.loss_fn)
        if by_position:
            self.loss_fn = LossByPosition(self.loss_fn, by_position)
        self.models = build.build_stages(model, precision, context, config.data.seq_len, config.train)
        """This rank's pipeline stages; without a pipeline, the full model alone."""
        self._load(weights)
        self.padding_free = packs_batches(config.model, self.layout, context.kernels.has_varlen_attention)
        mode = config.compile.mode
        build.wrap_blocks(self.models, config.recompute, mode, context, compile_fn, self.padding_free)
        for stage in self.models:
            stage.eval()
        self._runners: dict[tuple[int, int | None], MicroBatchRunner] = {}

    def _load(self, weights: WeightSource) -> None:
        read = local_values(weights, self.mesh.model_shard)
        total = sum(len(list(model.parameters())) for model in self.models)
        done = 0
        dtype = DTYPES[self.config.precision.compute_dtype]

        def value(name: str) -> Tensor:
            nonlocal done
            done += 1
            self.on_progress("tensors", done, total)
            return read(name).to(self.device.torch_device, dtype)

        for model in self.models:
            models.fill_parameters(model, value, dtype)

    def evaluate(self, data: EvaluationData) -> dict[str, Any]:
        """Loss, perplexity, loss terms, metrics, the number of tokens and, if they can be decoded, bits per byte.

        All ranks call this and get the same result, except that only the first one counts bytes.
        """
        start = perf_counter()
        global_batch = self.config.train.global_batch
        loader = BatchLoader(data.dataset, global_batch, self.config.train.seed, shuffle=False)
        batches = loader.one_epoch(rank_samples(global_batch, self.layout.dp, self.mesh.coords["dp"]))
        total = -(-len(data.dataset) // global_batch)
        runner = self._runner(data.seq_len, data.max_predictions)
        totals = evaluate(runner, self.loss_fn, self.metrics, self._counted(batches, total))
        main_term = next((name for name in totals.term_names if name in PERPLEXITY_TERMS), totals.term_names[0])
        by_position = self.loss_fn.part_names if isinstance(self.loss_fn, LossByPosition) else ()
        result: dict[str, Any] = {
            "data": data.name,
            **{name: mean for name, mean in totals.means().items() if name not in by_position},
            "tokens": round(totals.counts[main_term]),
            "seq_len": data.seq_len,
        }
        if isinstance(self.loss_fn, LossByPosition):
            result["by_position"] = position_rows(self.loss_fn, totals, data.seq_len)
        if data.count_bytes and main_term == "lm" and self.mesh.layout_rank == 0 and (count := data.count_bytes()):
            result |= {"bytes": count, "bits_per_byte": totals.sums[main_term] * BITS_PER_NAT / count}
        return result | {"seconds": perf_counter() - start}

    def _runner(self, seq_len: int, max_predictions: int | None) -> MicroBatchRunner:
        """A runner for samples of this shape."""
        shape = (seq_len, max_predictions)
        if shape not in self._runners:
            keys = self.config.model_dump(mode="json")
            keys["data"] |= {"seq_len": seq_len} | ({"max_predictions": max_predictions} if max_predictions else {})
            config = parse(keys)
            Layout.from_config(config, self.world.size)  # its rules depend on seq_len
            options = MicroBatchOptions(
                config.train.micro_batch,
                seq_len,
                config.model.hidden,
                DTYPES[config.precision.compute_dtype],
                self.padding_free,
                config.compile.cuda_graphs,
                config.device.attention,
            )
            self._runners[shape] = MicroBatchRunner(self.models, self.context, options)
        for model in self.models:
            model.max_seq_len = seq_len
        return self._runners[shape]

    def _counted(self, batches: Iterable[Batch], total: int) -> Iterator[Batch]:
        report = partial(self.on_progress, "batches")
        for index, batch in enumerate(batches):
            report(index, total)
            yield batch
        report(total, total)
