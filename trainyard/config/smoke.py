"""`--smoke`: the same recipe, tiny. Structure and features stay (family, grouped heads, fused parts, rope scaling,
recompute, precision, schedule, optimizer); sizes, steps and layout shrink to what a laptop does in seconds."""

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
    """A small trial of `config` on the ranks at hand."""
    data: dict[str, Any] = config.model_dump(mode="json")
    model, layout = data["model"], data["layout"]
    bert = model["family"] == "bert"
    group = model["heads"] // (model.get("kv_heads") or model["heads"])
    model["heads"] = group * 2 if group > 1 else 4
    if model.get("kv_heads"):
        model["kv_heads"] = model["heads"] // group
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
    data["data"] |= {
        "source": "synthetic" if bert else "text",
        "paths": [],
        "weights": [],
        "order": "shuffled",
        "split": None,
        "tokenizer": "bytes",
        "vocab_file": None,
        "merges_file": None,
        "end_of_text": None,
        "seq_len": SMOKE_SEQ_LEN,
        "max_predictions": SMOKE_PREDICTIONS,
    }
    accumulate = max(min(config.train.global_batch // config.train.micro_batch, 2), layout["pp"])
    micro = min(config.train.micro_batch, 4)
    dp = ranks // prod(layout[axis] for axis in ("tp", "pp", "cp"))
    data["train"] |= {"steps": SMOKE_STEPS, "micro_batch": micro, "global_batch": micro * accumulate * dp}
    data["schedule"] |= {"warmup_steps": min(config.schedule.warmup_steps, 2), "decay_steps": None}
    if data["evaluate"]["every"]:
        data["evaluate"] |= {"every": SMOKE_STEPS // 2, "batches": 2}
        data["data"]["validation_fraction"] = (
            config.data.validation_fraction or SMOKE_VALIDATION_FRACTION
        )  # instead of data.split's documents
    if config.checkpoint.saving_enabled:
        data["checkpoint"] |= {"every": SMOKE_STEPS // 2, "every_minutes": 0.0, "keep": 1}
    # Another model: nothing that was saved fits it.
    data["checkpoint"] |= {"directory": None, "resume": "none", "weights_only": False, "init_from": None}
    data["log"] |= {"every": 1, "name": f"{config.log.name}-smoke"}
    return parse(data)


def fit_to_ranks(config: Config, ranks: int) -> Config:
    """The same model and batch, the layout shrunk to `ranks`: as many of its axes as they allow."""
    data: dict[str, Any] = config.model_dump(mode="json")
    data["layout"] |= _fitted_layout(data["layout"], ranks, config.model.heads)
    return parse(data)


def _fitted_layout(layout: dict[str, Any], ranks: int, heads: int) -> dict[str, Any]:
    asked = {axis: layout[axis] for axis in ("tp", "pp", "cp")}
    asked["dp"] = max((layout["ranks"] or ranks) // prod(asked.values()), 1)
    small: dict[str, Any] = {**_shrink_axes(asked, ranks, heads)}
    piped = small["pp"] > 1
    same = small["pp"] == layout["pp"]
    return small | {
        "vpp": layout["vpp"] if piped else 1,
        "pipeline_schedule": layout["pipeline_schedule"] if piped else "1f1b",
        "pipeline_cuts": layout["pipeline_cuts"] if same else [],
        "ranks": None,
    }


def _shrink_axes(asked: dict[str, int], ranks: int, heads: int) -> dict[str, int]:
    """A small layout with as many of the asked-for axes as `ranks` allow: each in turn gets a factor."""
    out = dict.fromkeys(asked, 1)
    left, grown = ranks, True
    while grown:
        grown = False
        for axis in out:
            factor = next((p for p in range(2, left + 1) if left % p == 0), 1)
            fits = axis != "tp" or heads % (out[axis] * factor) == 0
            if factor > 1 and out[axis] * factor <= asked[axis] and fits:
                out[axis] *= factor
                left //= factor
                grown = True
    del out["dp"]
    return out
