"""Small versions of a configuration: `--smoke` trials, and layouts for fewer ranks.

A smoke trial keeps the features (family, grouped-query attention, fused projections, RoPE scaling, recompute,
precision, schedule, optimizer) and shrinks sizes, steps and layout to what a laptop runs in seconds.
"""

from math import prod
from typing import Any

from trainyard.config.load import parse
from trainyard.config.schema import Config

SMOKE_SEQ_LEN = 64
SMOKE_PREDICTIONS = 8
SMOKE_STEPS = 8
SMOKE_HEAD_DIM = 16
SMOKE_VALIDATION_FRACTION = 0.05


def smoke_config(config: Config, ranks: int = 1) -> Config:
    """Return a small trial of `config` for the given number of ranks."""
    data: dict[str, Any] = config.model_dump(mode="json")
    model, layout = data["model"], data["layout"]
    heads_per_kv = model["heads"] // (model.get("kv_heads") or model["heads"])
    model["heads"] = heads_per_kv * 2 if heads_per_kv > 1 else 4
    if model.get("kv_heads"):
        model["kv_heads"] = model["heads"] // heads_per_kv
    if model.get("head_dim"):
        model["head_dim"] = SMOKE_HEAD_DIM
    model["hidden"] = model["heads"] * SMOKE_HEAD_DIM
    model["ffn"] = 4 * model["hidden"] if model.get("ffn") else None
    layout |= _fitted_layout(layout, ranks, model["heads"]) | {"pipeline_cuts": []}
    model["layers"] = max(2, layout["pp"] * layout["vpp"])
    model["vocab"] = 320
    model["max_positions"] = 2 * SMOKE_SEQ_LEN
    scaling = model.get("rope_scaling")
    if scaling and "original_max_positions" in scaling:
        scaling["original_max_positions"] = SMOKE_SEQ_LEN
    kept = {key: data["data"][key] for key in ("document_mask", "mask_eod_loss", "validation_fraction")}
    source = "synthetic" if model["family"] == "bert" else "text"
    data["data"] = {"source": source, "seq_len": SMOKE_SEQ_LEN, "max_predictions": SMOKE_PREDICTIONS, **kept}
    micro_batches = max(min(config.train.global_batch // config.train.micro_batch, 2), layout["pp"])
    micro_batch = min(config.train.micro_batch, 4)
    dp = ranks // prod(layout[axis] for axis in ("tp", "pp", "cp"))
    global_batch = micro_batch * micro_batches * dp
    data["train"] |= {"steps": SMOKE_STEPS, "micro_batch": micro_batch, "global_batch": global_batch}
    data["schedule"] |= {"warmup_steps": min(config.schedule.warmup_steps, 2), "decay_steps": None}
    if data["evaluate"]["every"]:
        data["evaluate"] |= {"every": SMOKE_STEPS // 2, "batches": 2}
        # data.split is gone, so a fraction of the samples is held out instead of its documents.
        data["data"]["validation_fraction"] = config.data.validation_fraction or SMOKE_VALIDATION_FRACTION
    if config.checkpoint.saving_enabled:
        data["checkpoint"] |= {"every": SMOKE_STEPS // 2, "every_minutes": 0.0, "keep": 1}
    # Existing checkpoints do not fit the smaller model.
    data["checkpoint"] |= {"directory": None, "resume": "none", "weights_only": False, "init_from": None}
    data["log"] |= {"every": 1, "name": f"{config.log.name}-smoke"}
    return parse(data)


def fit_to_ranks(config: Config, ranks: int) -> Config:
    """Return the same model and batch with a layout for `ranks` ranks that keeps as many parallel axes as possible."""
    data: dict[str, Any] = config.model_dump(mode="json")
    data["layout"] |= _fitted_layout(data["layout"], ranks, config.model.heads)
    return parse(data)


def _fitted_layout(layout: dict[str, Any], ranks: int, heads: int) -> dict[str, Any]:
    sizes = {axis: layout[axis] for axis in ("tp", "pp", "cp")}
    sizes["dp"] = max((layout["ranks"] or ranks) // prod(sizes.values()), 1)
    fitted: dict[str, Any] = {**_shrink_axes(sizes, ranks, heads)}
    has_pipeline = fitted["pp"] > 1
    return fitted | {
        "vpp": layout["vpp"] if has_pipeline else 1,
        "pipeline_schedule": layout["pipeline_schedule"] if has_pipeline else "1f1b",
        "pipeline_cuts": layout["pipeline_cuts"] if fitted["pp"] == layout["pp"] else [],
        "ranks": None,
    }


def _shrink_axes(sizes: dict[str, int], ranks: int, heads: int) -> dict[str, int]:
    """Distribute the prime factors of `ranks` over the axes in turn, none above its size in the full layout."""
    shrunk = dict.fromkeys(sizes, 1)
    left, grown = ranks, True
    while grown:
        grown = False
        for axis in shrunk:
            factor = next((p for p in range(2, left + 1) if left % p == 0), 1)
            divides_heads = axis != "tp" or heads % (shrunk[axis] * factor) == 0
            if factor > 1 and shrunk[axis] * factor <= sizes[axis] and divides_heads:
                shrunk[axis] *= factor
                left //= factor
                grown = True
    del shrunk["dp"]
    return shrunk
