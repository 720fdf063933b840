"""Search over the layouts that a number of ranks allows: those that fit, fastest first.

It varies what changes neither the loss nor the batch: tp, pp, vpp, cp, ep, micro batch, recompute and ZeRO. Time is
predicted for all layouts; memory, which takes longer, for the fastest of each (tp, pp, cp) until one fits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd, inf
from operator import attrgetter
from typing import Any, NamedTuple

from trainyard.config.schema import Config
from trainyard.core.constants import DTYPE_BYTES
from trainyard.core.errors import UserError
from trainyard.core.yaml_io import format_value
from trainyard.models import blueprint_of
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.group_rules import group_problems, layout_as_run
from trainyard.preflight.plan.hardware.spec import Hardware
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.report import MEMORY_FILL_LIMIT, max_rank_memory
from trainyard.preflight.plan.time.step_time import predict_step
from trainyard.train.optim.stored_weights import bits_per_weight

LONG_SEQUENCE_TOKENS = 8192
"""Longest sequence for which context parallelism is not tried, unless the file uses it."""
MAX_MICRO_BATCH_TOKENS = 16384
"""Most tokens of a micro batch on a rank, unless the file has more."""
VIRTUAL_STAGE_BUBBLE = 0.03
"""Bubble, as a share of the step, above which virtual stages are tried."""
MAX_MEMORY_CHECKS = 120
"""Most layouts whose memory is estimated."""
SEARCHED_KEYS = (
    *("layout.tp", "layout.pp", "layout.vpp", "layout.cp", "layout.ep", "layout.zero"),
    *("train.micro_batch", "recompute.kind"),
)
OVERRIDE_KEYS = (
    *SEARCHED_KEYS,
    *("layout.cp_method", "layout.sequence_parallel", "layout.pipeline_schedule"),
    *("layout.pipeline_cuts", "recompute.modules"),
)
"""Keys that a layout of the search may change."""
override_values: Callable[[Config], tuple[Any, ...]] = attrgetter(*OVERRIDE_KEYS)


class SearchPoint(NamedTuple):
    """Values of SEARCHED_KEYS."""

    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    zero: int
    micro_batch: int
    recompute: str


@dataclass(frozen=True)
class RankedLayout:
    point: SearchPoint
    values: tuple[Any, ...]
    """Values of OVERRIDE_KEYS."""
    layout: Layout
    seconds: float
    memory: int
    """Bytes of the rank with the highest peak."""
    is_file: bool
    """True for the unchanged file."""

    def overrides(self, file_values: tuple[Any, ...]) -> list[str]:
        """Overrides that turn a file with `file_values`, of OVERRIDE_KEYS, into this layout."""
        pairs = zip(OVERRIDE_KEYS, self.values, file_values, strict=True)
        return [f"{key}={format_value(value)}" for key, value, file_value in pairs if value != file_value]


@dataclass(frozen=True)
class LayoutRanking:
    layouts: list[RankedLayout]
    """Layouts that fit, fastest first."""
    file_layout: RankedLayout | None
    """The file's own layout, even if it does not fit; None if it is impossible on these ranks."""
    timed_count: int
    """Number of layouts whose time was predicted."""


class LayoutSearch:
    """The search for the layouts of one configuration on one hardware."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        self.config, self.hardware = config, hardware
        self.file_point = SearchPoint(*attrgetter(*SEARCHED_KEYS)(config))
        blueprint = blueprint_of(config.model)
        self.weights = blueprint.trained_count
        self.expert_weights = blueprint.parameter_count(lambda spec: bool(spec.experts and spec.trained))
        self.stored_weights = blueprint.parameter_count(lambda spec: bool(spec.storage))
        storage = {spec.storage for spec in blueprint.specs} - {""}
        self.stored_bits = bits_per_weight(*storage) if storage else 0.0
        self.frozen_weights = blueprint.parameter_count() - self.weights - self.stored_weights

    def best(self, count: int, on_progress: Callable[[int, int], None] = lambda done, total: None) -> LayoutRanking:
        """The best `count` layouts. `on_progress` is called with the number of layouts timed and their total."""
        hardware, timed = self.hardware, self._timed_layouts(on_progress)
        best: dict[tuple[int, int, int], RankedLayout] = {}
        file_layout: RankedLayout | None = None
        checks = 0
        for seconds, point, values, run in timed:
            layout, is_file = run.layout, point == self.file_point
            shape = (layout.tp, layout.pp, layout.cp)
            if not is_file and (shape in best or len(best) == count or checks == MAX_MEMORY_CHECKS):
                continue
            refused = any(problem.fatal for problem in group_problems(layout, hardware))
            if refused and not is_file:
                continue
            checks += 1
            limit = (1 if is_file else MEMORY_FILL_LIMIT) * hardware.memory
            memory = max_rank_memory(run, inf if is_file else limit)
            ranked = RankedLayout(point, values, layout, seconds, memory, is_file)
            file_layout = ranked if is_file else file_layout
            fits = memory <= limit
            if fits and not refused and shape not in best and len(best) < count:
                best[shape] = ranked
        return LayoutRanking(list(best.values()), file_layout, len(timed))

    def _timed_layouts(
        self, on_progress: Callable[[int, int], None]
    ) -> list[tuple[float, SearchPoint, tuple[Any, ...], PlannedRun]]:
        """All possible layouts with the predicted time of a step, fastest first."""
        hardware, efficiency = self.hardware, self.hardware.entry.kind.efficiency
        points = list(dict.fromkeys((self.file_point, *self._points())))
        timed: list[tuple[float, SearchPoint, tuple[Any, ...], PlannedRun]] = []
        for done, point in enumerate(points):
            on_progress(done, len(points))
            candidate = self._config_at(point)
            try:
                layout = Layout.from_config(candidate, hardware.ranks)
            except UserError:
                continue
            run = PlannedRun(candidate, layout, hardware.entry.kind)
            seconds = predict_step(run, hardware, efficiency).seconds
            timed.append((seconds, point, override_values(candidate), run))
        return sorted(timed, key=lambda entry: entry[0])

    def _points(self) -> Iterator[SearchPoint]:
        """Points that may be valid; `Layout.from_config` decides. Cheap rules come first, because its errors are
        slow."""
        config, hardware = self.config, self.hardware
        model, train, ranks, seq_len = config.model, config.train, hardware.ranks, config.data.seq_len
        divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
        seq_lens_gcd = gcd(*config.data.seq_lens)
        max_cp = max(config.layout.cp, 8 if seq_len > LONG_SEQUENCE_TOKENS else 1)
        head_sizes = (model.heads, *model.ffn_sizes.values())
        tp_sizes = [
            tp for tp in divisors if tp <= hardware.ranks_per_node and all(size % tp == 0 for size in head_sizes)
        ]
        cp_sizes = [cp for cp in divisors if cp <= max_cp and (cp == 1 or seq_lens_gcd % (2 * cp) == 0)]
        recompute_kinds = list(dict.fromkeys((config.recompute.kind, "none", "attention", "full")))
        for tp, pp, cp in product(tp_sizes, divisors, cp_sizes):
            dp = ranks // (tp * pp * cp)
            if tp * pp * cp * dp != ranks or pp > model.layers or (tp > 1 and seq_lens_gcd // cp % tp):
                continue
            max_tokens = max(MAX_MICRO_BATCH_TOKENS * cp, train.micro_batch * seq_len)
            sizes = [2**power for power in range(12) if power == 0 or 2**power * seq_len <= max_tokens]
            zeros = [zero for zero in (0, 1, 3) if zero == config.layout.zero or zero == 1 or (zero == 3 and pp == 1)]
            ep_sizes = self._expert_sizes(tp, dp * cp)
            for micro_batch, zero in product(dict.fromkeys((train.micro_batch, *sizes)), zeros):
                count, rest = divmod(train.global_batch, micro_batch * dp)
                if rest or count < pp or (zero and dp * cp == 1):
                    continue
                virtual = (1, 2, 4) if (pp - 1) / count > VIRTUAL_STAGE_BUBBLE else (1,)
                vpp_sizes = dict.fromkeys((*virtual, config.layout.vpp if pp > 1 else 1))
                for vpp, recompute, ep in product(vpp_sizes, recompute_kinds, ep_sizes):
                    even = vpp == 1 or (model.layers % (pp * vpp) == 0 and count % pp == 0)
                    point = SearchPoint(tp, pp, vpp, cp, ep, zero, micro_batch, recompute)
                    if even and self._memory_lower_bound(point) <= hardware.memory:
                        yield point

    def _expert_sizes(self, tp: int, data_ranks: int) -> list[int]:
        """Sizes of expert parallelism to try: none, the largest inside an instance, the largest, and that of the
        file."""
        experts = self.config.model.num_experts
        sizes = [ep for ep in range(1, experts + 1) if experts % ep == 0 and data_ranks % ep == 0] or [1]
        inside = [ep for ep in sizes if ep * tp <= self.hardware.ranks_per_node] or [1]
        return sorted({1, inside[-1], sizes[-1], *({self.config.layout.ep} & set(sizes))})

    def _memory_lower_bound(self, point: SearchPoint) -> float:
        """Bytes that every rank needs at least: its state, and what the blocks save for backward."""
        model, precision = self.config.model, self.config.precision
        tp, pp, _, cp, ep, zero, micro_batch, recompute = point
        compute, gradients = DTYPE_BYTES[precision.compute_dtype], DTYPE_BYTES[precision.grad_accum_dtype]
        shards = self.hardware.ranks // (tp * pp)
        state = 8 + (4 if precision.kind != "bf16_sr" else 0)  # moments and master weights
        per_weight = (compute + gradients) / (shards if zero >= 2 else 1) + state / (shards if zero else 1)
        experts = self.expert_weights / (tp * pp)
        weights = self.weights / (tp * pp) - experts
        if ep > 1:  # each rank has fewer experts, which fewer ranks shard
            ratio = (compute + gradients) / (shards if zero >= 2 else ep) + state / (shards if zero else ep)
            weights += experts * ratio / per_weight
        else:
            weights += experts
        saved = {"full": model.hidden, "selective": 2 * model.hidden}.get(recompute, 4 * model.hidden + model.ffn_size)
        # The first stage has one micro batch in flight for each stage: together all layers of one micro batch.
        tokens = micro_batch * self.config.data.seq_len / cp
        frozen = self.frozen_weights * compute / (tp * pp * ep) / (shards // ep if zero >= 2 else 1)
        frozen += self.stored_weights * self.stored_bits / 8 / (tp * pp)
        return frozen + weights * per_weight + model.layers * tokens * saved * compute / tp

    def _config_at(self, point: SearchPoint) -> Config:
        """The file with the values of `point`, as the hardware runs it. Tensor parallelism implies sequence
        parallelism, which is never slower."""
        config, section = self.config, self.config.layout
        changes: dict[str, Any] = {}
        if point != self.file_point:
            tp, pp, vpp, cp, ep, zero, micro_batch, kind = point
            section = section.model_copy(update={
                "tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "zero": zero, "sequence_parallel": tp != 1,
                "pipeline_cuts": section.pipeline_cuts if (pp, vpp) == (section.pp, section.vpp) else (),
                "pipeline_schedule": "1f1b" if vpp != section.vpp or zero == 3 else section.pipeline_schedule,
            })  # fmt: skip
            modules = config.recompute.modules if kind == config.recompute.kind else ()
            changes = {
                "train": config.train.model_copy(update={"micro_batch": micro_batch}),
                "recompute": config.recompute.model_copy(update={"kind": kind, "modules": modules}),
            }
        return config.model_copy(update={"layout": layout_as_run(section, self.hardware), **changes})
