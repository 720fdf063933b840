"""Small versions of a configuration: `--smoke` trials, and layouts for fewer ranks.

A smoke trial keeps the features (family, grouped-query attention, fused projections, RoPE scaling, recompute,
precision, schedule, optimizer) and shrinks sizes, steps and layout to what a laptop runs in seconds. Keys that the
command line names keep their values, and what they depend on follows.
"""

from collections.abc import Callable, Collection, Iterable
from math import gcd, lcm, prod
from typing import Any

from trainyard.config.load import apply_overrides, check_keys, parse, plain_sections, warn_on_stderr
from trainyard.config.registries import SOURCES
from trainyard.config.schema import Config
from trainyard.core.user_code import is_user_path
from trainyard.core.yaml_io import format_value
from trainyard.families import find_family

SMOKE_SEQ_LEN = 64
SMOKE_CHAT_SEQ_LEN = 256
SMOKE_PREDICTIONS = 8
SMOKE_STEPS = 8
SMOKE_NEW_TOKENS = 16
SMOKE_HEAD_DIM = 16
SMOKE_REWARD = "trainyard.run.rollouts.rewards:matching"
SMOKE_VOCAB = 320
SMOKE_EXPERTS = 8
SMOKE_VALIDATION_FRACTION = 0.05
AXES = ("tp", "pp", "cp")
CHECKPOINT_DEFAULTS = {"directory": None, "resume": "none", "weights_only": False, "init_from": None}
"""Existing checkpoints do not fit the smaller model."""


def smoke_config(
    config: Config, ranks: int = 1, overrides: Iterable[str] = (), warn: Callable[[str], None] | None = None
) -> Config:
    """Return a small trial of `config` with `overrides` for the given number of ranks.

    `warn` receives one line about data, checkpoints and layout of the file that the trial does not use.
    """
    data: dict[str, Any] = plain_sections(config)
    named = apply_overrides(data, overrides)
    lora = data.get("lora") or {}
    adapter = None if {"lora", "lora.init_from"} & named else lora.get("init_from")
    if adapter:
        lora["init_from"] = None  # it does not fit the smaller model
    if "model.from_hf" in named:  # an entire section
        named.add("model")
    data = check_keys(data)

    def shrink(section: str, **values: Any) -> None:
        """Set values, except those of keys that the command line names."""
        data[section] |= {key: value for key, value in values.items() if not {section, f"{section}.{key}"} & named}

    model, layout, train = data["model"], data["layout"], data["train"]
    heads_per_kv = config.model.heads // config.model.num_kv_heads
    named_tp = layout["tp"] if "layout.tp" in named else 1
    shrink("model", heads=lcm(heads_per_kv * 2 if heads_per_kv > 1 else 4, named_tp))
    heads = model["heads"]
    if model.get("kv_heads"):
        shrink("model", kv_heads=max(heads // heads_per_kv, 1))
    if model.get("head_dim"):
        shrink("model", head_dim=SMOKE_HEAD_DIM)
    shrink("model", hidden=heads * SMOKE_HEAD_DIM)
    latents = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    shrink("model", **{key: min(size, SMOKE_HEAD_DIM) for key in latents if (size := model.get(key))})
    if model.get("ffn"):
        shrink("model", ffn=(1 if model.get("experts") else 4) * model["hidden"])
    if model.get("experts"):
        shrink("model", experts=min(model["experts"], SMOKE_EXPERTS), top_k=min(model["top_k"], SMOKE_EXPERTS // 2))
        for key in ("shared_ffn", "dense_ffn"):
            shrink("model", **({key: model["hidden"]} if model[key] else {}))
        shrink("model", dense_layers="0" if model["dense_layers"] else None)
        groups = min(model["expert_groups"], 2)  # of which one has enough experts
        shrink("model", expert_groups=groups, top_k_groups=1 if groups > 1 else model["top_k_groups"])
    if "attention_layers" in model:
        shrink("model", attention_layers="odd")
    shrink("layout", **_fitted_layout(layout, ranks, heads, named) | {"pipeline_cuts": []})
    shrink("model", layers=max(2, layout["pp"] * layout["vpp"]))
    if not _names_own_data(data["data"], named) and "data" not in named:
        data["data"] = _smoke_data(data, named)
        shrink("model", vocab=SMOKE_VOCAB)
        sets = data["evaluate"]["sets"].items()
        shrink("evaluate", sets={name: paths for name, paths in sets if f"evaluate.sets.{name}" in named})
    elif is_user_path(data["data"]["source"]) or not SOURCES.find(data["data"]["source"]).has_fixed_length:
        seq_len = _document_sample_length(data["data"]["source"])
        shrink("data", seq_len=seq_len or SMOKE_SEQ_LEN)
        if seq_len and data["data"]["chat"]["too_long"] == "error" and "data.chat.too_long" not in named:
            data["data"]["chat"]["too_long"] = "drop" if data["train"]["objective"] else "truncate"
    if buckets := data["data"].get("buckets"):
        if "data.buckets" in named:
            shrink("data", seq_len=buckets[-1])
        else:  # in the same proportions
            seq_len = data["data"]["seq_len"]
            data["data"]["buckets"] = sorted({max(length * seq_len // buckets[-1], 1) for length in buckets})
    shrink("model", max_positions=max(2 * SMOKE_SEQ_LEN, data["data"]["seq_len"]))
    scaling = model.get("rope_scaling")
    if scaling and "original_max_positions" in scaling and "model.rope_scaling" not in named:
        scaling["original_max_positions"] = SMOKE_SEQ_LEN
        head_size = model.get("head_dim") or model["hidden"] // model["heads"]
        for key in ("short_factor", "long_factor"):  # LongRoPE: one for each frequency
            if key in scaling:
                scaling[key] = scaling[key][: len(scaling[key]) * head_size // config.model.head_size]
    if model.get("experts"):
        shrink("layout", ep=gcd(layout["ep"], model["experts"], ranks // (layout["tp"] * layout["pp"]) or 1))
    micro_batches = max(min(config.train.global_batch // config.train.micro_batch, 2), layout["pp"])
    dp = max(ranks // prod(layout[axis] for axis in AXES), 1)
    micro_batch = min(config.train.micro_batch, 4)
    if "train.global_batch" in named:
        micro_batch = gcd(micro_batch, max(train["global_batch"] // dp, 1))
    shrink("train", steps=SMOKE_STEPS, micro_batch=micro_batch)
    shrink("train", global_batch=train["micro_batch"] * micro_batches * dp)
    if data["train"]["objective"] and SOURCES.find(data["data"]["source"]).has_prompts and "rollout" not in named:
        rewards = {} if "rollout.rewards" in named else {"rewards": [SMOKE_REWARD], "weights": [], "tool": None}
        shrink("rollout", **rewards, completions=2, max_new_tokens=SMOKE_NEW_TOKENS)
        shrink("train", global_batch=2 * train["global_batch"])
    shrink("schedule", warmup_steps=min(config.schedule.warmup_steps, 2, train["steps"]), decay_steps=None)
    half = max(train["steps"] // 2, 1)
    if data["evaluate"]["every"]:
        shrink("evaluate", every=half, batches=2)
    if data["samples"]["every"]:
        shrink("samples", every=half, max_new_tokens=min(config.samples.max_new_tokens, SMOKE_NEW_TOKENS))
    if config.checkpoint.saving_enabled:
        shrink("checkpoint", every=half, every_minutes=0.0, keep=1)
    shrink("checkpoint", **CHECKPOINT_DEFAULTS)
    if config.profile.steps and config.profile.steps[1] > train["steps"]:
        shrink("profile", steps=[])
    shrink("log", every=1, name=f"{config.log.name}-smoke")
    small = parse(data)
    if unused := _unused_parts(config, small) + ([f"lora.init_from={format_value(adapter)}"] if adapter else []):
        line = f"note: --smoke does not use {', '.join(unused)}; keys named on the command line are kept"
        (warn or warn_on_stderr)(line)
    return small


def _names_own_data(data: dict[str, Any], named: Collection[str]) -> bool:
    """True if the command line names files, or a function of the user, to train on."""
    is_named = not {"data.paths", "data.source"}.isdisjoint(named)
    return is_named and (is_user_path(data["source"]) or (bool(data["paths"]) and data["source"] != "synthetic"))


def _smoke_data(data: dict[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Built-in samples, with the features of the file's data and the keys that the command line names."""
    section, is_causal = data["data"], find_family(data["model"]["family"]).is_causal
    kept = {"mask_eod_loss", "validation_fraction"} | {key.split(".")[1] for key in named if key.startswith("data.")}
    document_length = _document_sample_length(section["source"])
    small = {
        "source": section["source"] if document_length else "text" if is_causal else "synthetic",
        "seq_len": document_length or min(SMOKE_SEQ_LEN, data["model"]["max_positions"]),
        "max_predictions": SMOKE_PREDICTIONS,
        "document_mask": not document_length and (section["document_mask"] or section["packing"]),
        **{key: section[key] for key in kept - {"packing"}},
    }
    if document_length:  # the built-in conversations have one format and fit its template
        small |= {"packing": section["packing"], "buckets": section["buckets"]}
        small |= {"chat": {**section["chat"], "format": "auto", "template": None}}
    if data["evaluate"]["every"] and not small["validation_fraction"]:
        # data.split is gone, so a fraction of the samples is held out instead of its documents.
        small["validation_fraction"] = SMOKE_VALIDATION_FRACTION
    return small


def _document_sample_length(source: str) -> int:
    """Tokens that hold most conversations, or pairs of them; 0: the source has no samples of whole documents."""
    if is_user_path(source) or not (found := SOURCES.find(source)).has_documents:
        return 0
    return 2 * SMOKE_CHAT_SEQ_LEN if found.has_pairs else SMOKE_CHAT_SEQ_LEN


def _unused_parts(config: Config, small: Config) -> list[str]:
    """Name what a trial replaced, apart from sizes."""
    unused = [
        f"layout.{axis}={size}" for axis in AXES if (size := getattr(config.layout, axis)) > getattr(small.layout, axis)
    ]
    replaced = [key for key in ("paths",) if config.data.paths and not small.data.paths]
    replaced += ["source"] if is_user_path(config.data.source) and small.data.source != config.data.source else []
    for key in replaced:
        samples = {"text": "built-in text", "chat": "built-in conversations", "preference": "built-in pairs"}.get(
            small.data.source, "synthetic samples"
        )
        unused.append(f"data.{key}={format_value(getattr(config.data, key))} (but {samples})")
    unused += [f"evaluate.sets.{name}" for name in config.evaluate.sets if name not in small.evaluate.sets]
    for key in CHECKPOINT_DEFAULTS:
        value = getattr(config.checkpoint, key)
        if isinstance(value, str) and value not in ("auto", "none", getattr(small.checkpoint, key)):
            unused.append(f"checkpoint.{key}={format_value(value)}")
    return unused


def fit_to_ranks(config: Config, ranks: int, named: Collection[str] = ()) -> Config:
    """Return the same model and batch with a layout for `ranks` ranks that keeps as many parallel axes as possible.

    The axes in `named` (such as layout.tp) keep their size. The micro batch shrinks where data parallelism needs it.
    """
    data: dict[str, Any] = config.model_dump(mode="json")
    fitted = _fitted_layout(data["layout"], ranks, config.model.heads, named)
    data["layout"] |= {key: value for key, value in fitted.items() if f"layout.{key}" not in named}
    dp = max(ranks // prod(data["layout"][axis] for axis in AXES), 1)
    if "layout.ep" not in named:
        data["layout"]["ep"] = gcd(config.layout.ep, dp * data["layout"]["cp"])
    if config.train.global_batch % dp == 0:
        data["train"]["micro_batch"] = gcd(config.train.micro_batch, config.train.global_batch // dp)
    return parse(data)


def _fitted_layout(layout: dict[str, Any], ranks: int, heads: int, named: Collection[str] = ()) -> dict[str, Any]:
    sizes = {axis: layout[axis] for axis in AXES}
    sizes["dp"] = max((layout["ranks"] or ranks) // prod(sizes.values()), 1)
    fixed = {axis for axis in AXES if f"layout.{axis}" in named}
    fitted: dict[str, Any] = {**_shrink_axes(sizes, ranks, heads, fixed)}
    has_pipeline = fitted["pp"] > 1
    return fitted | {
        "vpp": layout["vpp"] if has_pipeline else 1,
        "pipeline_schedule": layout["pipeline_schedule"] if has_pipeline else "1f1b",
        "pipeline_cuts": layout["pipeline_cuts"] if fitted["pp"] == layout["pp"] else [],
        "ranks": None,
    }


def _shrink_axes(sizes: dict[str, int], ranks: int, heads: int, fixed: Collection[str]) -> dict[str, int]:
    """Distribute the prime factors of `ranks` over the axes in turn, none above its size in the full layout."""
    shrunk = {axis: size if axis in fixed else 1 for axis, size in sizes.items()}
    left, grown = ranks // prod(shrunk.values()), True
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
