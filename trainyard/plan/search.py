"""Every layout that a number of ranks allows, ranked: those that fit, fastest first.

What is varied changes neither the loss nor the batch: tp, pp, vpp, cp, micro batch, recompute and ZeRO. The time is
worked out for all; memory, which takes longer to know, for the fastest of each (tp, pp, cp) until one fits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.models import family_of
from trainyard.parallel.layout import Layout
from trainyard.plan.group_rules import config_as_run, group_problems
from trainyard.plan.hardware.spec import Hardware
from trainyard.plan.report import MEMORY_FILL_LIMIT, max_rank_memory
from trainyard.plan.time.step_time import fitted_efficiency, predict_step

LONG_SEQUENCE_TOKENS = 8192
"""Tokens of a sequence beyond which splitting it is tried; a file that splits it is tried with less, too."""
MAX_MICRO_BATCH_TOKENS = 16384
"""Of a micro batch on a rank; more are tried only where the file has more."""
VIRTUAL_STAGE_BUBBLE = 0.03
"""Part of the step from which on virtual stages are tried against the bubble."""
MAX_MEMORY_CHECKS = 120
"""Memory is looked at for so many, at most."""
DTYPE_BYTES = {"fp32": 4, "bf16": 2}
SEARCHED_KEYS = (
    "layout.tp",
    "layout.pp",
    "layout.vpp",
    "layout.cp",
    "layout.zero",
    "train.micro_batch",
    "recompute.kind",
)

SearchPoint = tuple[int | str, ...]
"""Values of KEYS."""


@dataclass(frozen=True)
class RankedLayout:
    point: SearchPoint
    config: Config
    layout: Layout
    seconds: float
    memory: int
    """Bytes of the rank that holds most."""
    is_file: bool
    """The file as it is."""

    def overrides(self, file: Config) -> list[str]:
        """Overrides that turn the file into this one."""
        out = [
            f"{name}={value}"
            for name, value, mine in zip(SEARCHED_KEYS, self.point, search_point(file), strict=True)
            if value != mine
        ]
        if self.config.layout.cp_method != file.layout.cp_method:
            out.append(f"layout.cp_method={self.config.layout.cp_method}")
        if self.config.layout.sequence_parallel != file.layout.sequence_parallel:
            out.append(f"layout.sequence_parallel={str(self.config.layout.sequence_parallel).lower()}")
        if file.recompute.modules and not self.config.recompute.modules:
            out.append("recompute.modules=[]")
        if file.layout.pipeline_cuts and not self.config.layout.pipeline_cuts:
            out.append("layout.pipeline_cuts=[]")
        return out


@dataclass(frozen=True)
class LayoutRanking:
    layouts: list[RankedLayout]
    """Those that fit, fastest first."""
    file_layout: RankedLayout | None
    """The file itself, whether or not it fits; None where its layout is not possible at all."""
    timed_count: int
    """Layouts whose time was worked out."""


def search_point(config: Config) -> SearchPoint:
    layout = config.layout
    return (
        layout.tp, layout.pp, layout.vpp, layout.cp, layout.zero, config.train.micro_batch, config.recompute.kind
    )  # fmt: skip


def search_layouts(
    config: Config, hardware: Hardware, count: int, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> LayoutRanking:
    """The best `count`. `show` is told how many of how many layouts have been timed."""
    e, file = fitted_efficiency(hardware), search_point(config)
    keys = list(dict.fromkeys((file, *_search_points(config, hardware))))
    timed: list[tuple[float, SearchPoint, Config, Layout]] = []
    for number, key in enumerate(keys):
        on_progress(number, len(keys))
        other = config_as_run(config if key == file else _config_at(config, key), hardware)
        try:
            layout = Layout.from_config(other, hardware.ranks)
        except UserError:
            continue
        timed.append((predict_step(other, layout, hardware, e).seconds, key, other, layout))
    timed.sort(key=lambda each: each[0])
    found: dict[SearchPoint, RankedLayout] = {}
    own: RankedLayout | None = None
    tries = 0
    for seconds, key, other, layout in timed:
        shape, mine = (layout.tp, layout.pp, layout.cp), key == file
        if not mine and (shape in found or len(found) == count or tries == MAX_MEMORY_CHECKS):
            continue
        refused = any(problem.fatal for problem in group_problems(layout, hardware))
        if refused and not mine:
            continue
        tries += 1
        one = RankedLayout(key, other, layout, seconds, max_rank_memory(other, layout, hardware.entry.kind), mine)
        own = one if mine else own
        if (
            one.memory <= (1 if mine else MEMORY_FILL_LIMIT) * hardware.memory
            and not refused
            and shape not in found
            and len(found) < count
        ):
            found[shape] = one
    return LayoutRanking(list(found.values()), own, len(timed))


def _search_points(config: Config, hardware: Hardware) -> Iterator[SearchPoint]:
    """What may be possible; `Layout.of` says what is. The cheap rules come first: its errors take time to write."""
    model, train, ranks, sequence = config.model, config.train, hardware.ranks, config.data.seq_len
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    longest = max(config.layout.cp, 8 if sequence > LONG_SEQUENCE_TOKENS else 1)
    tensor = [
        tp for tp in divisors if tp <= hardware.ranks_per_node and model.heads % tp == 0 and model.ffn_size % tp == 0
    ]
    context = [cp for cp in divisors if cp <= longest and (cp == 1 or sequence % (2 * cp) == 0)]
    kinds = list(dict.fromkeys((config.recompute.kind, "none", "attention", "full")))
    for tp, pp, cp in product(tensor, divisors, context):
        dp = ranks // (tp * pp * cp)
        if tp * pp * cp * dp != ranks or pp > model.layers or (tp > 1 and sequence // cp % tp):
            continue
        most = max(MAX_MICRO_BATCH_TOKENS * cp, train.micro_batch * sequence)
        micros = [2**n for n in range(12) if 2**n == 1 or 2**n * sequence <= most]
        zeros = [zero for zero in (0, 1, 3) if zero == config.layout.zero or (zero == 1) or (zero == 3 and pp == 1)]
        for micro, zero in product(dict.fromkeys((train.micro_batch, *micros)), zeros):
            count, rest = divmod(train.global_batch, micro * dp)
            if rest or count < pp or (zero and dp * cp == 1):
                continue
            virtual = (1, 2, 4) if (pp - 1) / count > VIRTUAL_STAGE_BUBBLE else (1,)
            for vpp, kind in product(dict.fromkeys((*virtual, config.layout.vpp if pp > 1 else 1)), kinds):
                even = vpp == 1 or (model.layers % (pp * vpp) == 0 and count % pp == 0)
                if even and _memory_lower_bound(config, tp, pp, cp, dp, zero, micro, kind) <= hardware.memory:
                    yield tp, pp, vpp, cp, zero, micro, kind


def _memory_lower_bound(config: Config, tp: int, pp: int, cp: int, dp: int, zero: int, micro: int, kind: str) -> float:
    """Bytes below which no rank can stay: its state, and what backward needs of the blocks."""
    model, precision = config.model, config.precision
    compute, gradients = DTYPE_BYTES[precision.compute_dtype], DTYPE_BYTES[precision.grad_accum_dtype]
    shards = dp * cp
    state = 8 + (4 if precision.kind != "bf16_sr" else 0)  # moments and master weights
    each = (compute + gradients) / (shards if zero >= 2 else 1) + state / (shards if zero else 1)
    weights = family_of(model).blueprint(model).parameter_count() / (tp * pp)
    kept = {"full": model.hidden, "selective": 2 * model.hidden}.get(kind, 4 * model.hidden + model.ffn_size)
    # The first stage holds as many micro batches as there are stages: together all layers of one.
    tokens = micro * config.data.seq_len / cp
    return weights * each + model.layers * tokens * kept * compute / tp


def _config_at(config: Config, point: SearchPoint) -> Config:
    """The file with these values. Where ranks share matrices they share tokens too: it is never slower."""
    tp, pp, vpp, cp, zero, micro, kind = point
    cuts = config.layout.pipeline_cuts if (pp, vpp) == (config.layout.pp, config.layout.vpp) else ()
    layout = config.layout.model_copy(
        update={
            "tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "zero": zero, "pipeline_cuts": cuts, "sequence_parallel": tp != 1,
            "pipeline_schedule": "1f1b" if vpp != config.layout.vpp or zero == 3 else config.layout.pipeline_schedule,
        }
    )  # fmt: skip
    parts = config.recompute.modules if kind == config.recompute.kind else ()
    return config.model_copy(
        update={
            "layout": layout,
            "train": config.train.model_copy(update={"micro_batch": micro}),
            "recompute": config.recompute.model_copy(update={"kind": kind, "modules": parts}),
        }
    )
