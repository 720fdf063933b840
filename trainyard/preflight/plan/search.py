"""Search over the layouts that a number of ranks allows: those that fit, fastest first.

It varies what changes neither the loss nor the batch: tp, pp, vpp, cp, ep, micro batch, recompute and ZeRO. Time is
predicted for all layouts; memory, which takes longer, for the fastest of each (tp, pp, cp) until one fits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import inf
from operator import attrgetter

from trainyard.config.schema import Config
from trainyard.core.constants import DTYPE_BYTES
from trainyard.core.errors import UserError
from trainyard.core.yaml_io import format_value
from trainyard.models import blueprint_of
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.group_rules import config_as_run, group_problems
from trainyard.preflight.plan.hardware.spec import Hardware
from trainyard.preflight.plan.report import MEMORY_FILL_LIMIT, max_rank_memory
from trainyard.preflight.plan.time.step_time import predict_step

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
SearchPoint = tuple[int | str, ...]
"""Values of SEARCHED_KEYS."""
search_point: Callable[[Config], SearchPoint] = attrgetter(*SEARCHED_KEYS)


@dataclass(frozen=True)
class RankedLayout:
    point: SearchPoint
    config: Config
    layout: Layout
    seconds: float
    memory: int
    """Bytes of the rank with the highest peak."""
    is_file: bool
    """True for the unchanged file."""

    def overrides(self, file: Config) -> list[str]:
        """Overrides that turn the file into this layout."""
        values = attrgetter(*OVERRIDE_KEYS)
        pairs = zip(OVERRIDE_KEYS, values(self.config), values(file), strict=True)
        return [f"{key}={format_value(value)}" for key, value, file_value in pairs if value != file_value]


@dataclass(frozen=True)
class LayoutRanking:
    layouts: list[RankedLayout]
    """Layouts that fit, fastest first."""
    file_layout: RankedLayout | None
    """The file's own layout, even if it does not fit; None if it is impossible on these ranks."""
    timed_count: int
    """Number of layouts whose time was predicted."""


def search_layouts(
    config: Config, hardware: Hardware, count: int, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> LayoutRanking:
    """The best `count` layouts. `on_progress` is called with the number of layouts timed and their total."""
    efficiency, file_point = hardware.entry.kind.efficiency, search_point(config)
    points = list(dict.fromkeys((file_point, *_search_points(config, hardware))))
    timed: list[tuple[float, SearchPoint, Config, Layout]] = []
    for done, point in enumerate(points):
        on_progress(done, len(points))
        candidate = config_as_run(config if point == file_point else _config_at(config, point), hardware)
        try:
            layout = Layout.from_config(candidate, hardware.ranks)
        except UserError:
            continue
        timed.append((predict_step(candidate, layout, hardware, efficiency).seconds, point, candidate, layout))
    timed.sort(key=lambda entry: entry[0])
    best: dict[SearchPoint, RankedLayout] = {}
    file_layout: RankedLayout | None = None
    checks = 0
    for seconds, point, candidate, layout in timed:
        shape, is_file = (layout.tp, layout.pp, layout.cp), point == file_point
        if not is_file and (shape in best or len(best) == count or checks == MAX_MEMORY_CHECKS):
            continue
        refused = any(problem.fatal for problem in group_problems(layout, hardware))
        if refused and not is_file:
            continue
        checks += 1
        limit = (1 if is_file else MEMORY_FILL_LIMIT) * hardware.memory
        memory = max_rank_memory(candidate, layout, hardware.entry.kind, inf if is_file else limit)
        ranked = RankedLayout(point, candidate, layout, seconds, memory, is_file)
        file_layout = ranked if is_file else file_layout
        fits = memory <= limit
        if fits and not refused and shape not in best and len(best) < count:
            best[shape] = ranked
    return LayoutRanking(list(best.values()), file_layout, len(timed))


def _search_points(config: Config, hardware: Hardware) -> Iterator[SearchPoint]:
    """Points that may be valid; `Layout.from_config` decides. Cheap rules come first, because its errors are slow."""
    model, train, ranks, seq_len = config.model, config.train, hardware.ranks, config.data.seq_len
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    max_cp = max(config.layout.cp, 8 if seq_len > LONG_SEQUENCE_TOKENS else 1)
    tp_sizes = [
        tp
        for tp in divisors
        if tp <= hardware.ranks_per_node and all(size % tp == 0 for size in (model.heads, *model.ffn_sizes.values()))
    ]
    cp_sizes = [cp for cp in divisors if cp <= max_cp and (cp == 1 or seq_len % (2 * cp) == 0)]
    recompute_kinds = list(dict.fromkeys((config.recompute.kind, "none", "attention", "full")))
    for tp, pp, cp in product(tp_sizes, divisors, cp_sizes):
        dp = ranks // (tp * pp * cp)
        if tp * pp * cp * dp != ranks or pp > model.layers or (tp > 1 and seq_len // cp % tp):
            continue
        max_tokens = max(MAX_MICRO_BATCH_TOKENS * cp, train.micro_batch * seq_len)
        sizes = [2**power for power in range(12) if power == 0 or 2**power * seq_len <= max_tokens]
        zeros = [zero for zero in (0, 1, 3) if zero == config.layout.zero or zero == 1 or (zero == 3 and pp == 1)]
        ep_sizes = _expert_sizes(config, hardware, tp, dp * cp)
        for micro_batch, zero in product(dict.fromkeys((train.micro_batch, *sizes)), zeros):
            count, rest = divmod(train.global_batch, micro_batch * dp)
            if rest or count < pp or (zero and dp * cp == 1):
                continue
            virtual = (1, 2, 4) if (pp - 1) / count > VIRTUAL_STAGE_BUBBLE else (1,)
            vpp_sizes = dict.fromkeys((*virtual, config.layout.vpp if pp > 1 else 1))
            for vpp, recompute, ep in product(vpp_sizes, recompute_kinds, ep_sizes):
                even = vpp == 1 or (model.layers % (pp * vpp) == 0 and count % pp == 0)
                bound = _memory_lower_bound(config, tp, pp, cp, ep, dp, zero, micro_batch, recompute)
                if even and bound <= hardware.memory:
                    yield tp, pp, vpp, cp, ep, zero, micro_batch, recompute


def _expert_sizes(config: Config, hardware: Hardware, tp: int, data_ranks: int) -> list[int]:
    """Sizes of expert parallelism to try: none, the largest inside an instance, the largest, and that of the file."""
    experts = config.model.num_experts
    sizes = [ep for ep in range(1, experts + 1) if experts % ep == 0 and data_ranks % ep == 0] or [1]
    inside = [ep for ep in sizes if ep * tp <= hardware.ranks_per_node] or [1]
    return sorted({1, inside[-1], sizes[-1], *({config.layout.ep} & set(sizes))})


def _memory_lower_bound(
    config: Config, tp: int, pp: int, cp: int, ep: int, dp: int, zero: int, micro_batch: int, recompute: str
) -> float:
    """Bytes that every rank needs at least: its state, and what the blocks save for backward."""
    model, precision = config.model, config.precision
    compute, gradients = DTYPE_BYTES[precision.compute_dtype], DTYPE_BYTES[precision.grad_accum_dtype]
    shards = dp * cp
    state = 8 + (4 if precision.kind != "bf16_sr" else 0)  # moments and master weights
    per_weight = (compute + gradients) / (shards if zero >= 2 else 1) + state / (shards if zero else 1)
    blueprint = blueprint_of(model)
    experts = blueprint.parameter_count(lambda spec: bool(spec.experts)) / (tp * pp)
    weights = blueprint.parameter_count() / (tp * pp) - experts
    if ep > 1:  # each rank has fewer experts, which fewer ranks shard
        ratio = (compute + gradients) / (shards if zero >= 2 else ep) + state / (shards if zero else ep)
        weights += experts * ratio / per_weight
    else:
        weights += experts
    saved = {"full": model.hidden, "selective": 2 * model.hidden}.get(recompute, 4 * model.hidden + model.ffn_size)
    # The first stage has one micro batch in flight for each stage: together all layers of one micro batch.
    tokens = micro_batch * config.data.seq_len / cp
    return weights * per_weight + model.layers * tokens * saved * compute / tp


def _config_at(config: Config, point: SearchPoint) -> Config:
    """The file with the values of `point`. Tensor parallelism implies sequence parallelism, which is never slower."""
    tp, pp, vpp, cp, ep, zero, micro_batch, kind = point
    section = config.layout
    layout = {
        "tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "zero": zero, "sequence_parallel": tp != 1,
        "pipeline_cuts": section.pipeline_cuts if (pp, vpp) == (section.pp, section.vpp) else (),
        "pipeline_schedule": "1f1b" if vpp != section.vpp or zero == 3 else section.pipeline_schedule,
    }  # fmt: skip
    modules = config.recompute.modules if kind == config.recompute.kind else ()
    return config.model_copy(
        update={
            "layout": section.model_copy(update=layout),
            "train": config.train.model_copy(update={"micro_batch": micro_batch}),
            "recompute": config.recompute.model_copy(update={"kind": kind, "modules": modules}),
        }
    )
