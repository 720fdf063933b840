"""The settings that a tuning search may change, their neighbors, and the configuration of each trial.

Every trial processes the same samples per step, so that the optimizer's share of a step is the same and only the tuned
settings make a difference.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trainyard import devices
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.parallel.layout import Layout
from trainyard.preflight.tune.trial import Choice
from trainyard.train.compile.compile_blocks import make_compile_fn

KEY_COMPILE, KEY_COMPILE_MODE, KEY_CUDA_GRAPHS = "compile.enabled", "compile.mode", "compile.cuda_graphs"
KEY_MICRO_BATCH, KEY_ATTENTION = "train.micro_batch", "device.attention"
KEY_RECOMPUTE, KEY_RECOMPUTE_MODULES = "recompute.kind", "recompute.modules"
COMPILE_KEYS = (KEY_COMPILE, KEY_COMPILE_MODE)
TUNED_KEYS = (
    *COMPILE_KEYS,
    *(KEY_MICRO_BATCH, KEY_RECOMPUTE, KEY_RECOMPUTE_MODULES, KEY_ATTENTION, KEY_CUDA_GRAPHS),
)
RECOMPUTE_LEVELS: tuple[Choice, ...] = (
    {KEY_RECOMPUTE: "none", KEY_RECOMPUTE_MODULES: []},
    {KEY_RECOMPUTE: "selective", KEY_RECOMPUTE_MODULES: ["activation"]},
    {KEY_RECOMPUTE: "attention", KEY_RECOMPUTE_MODULES: []},
    {KEY_RECOMPUTE: "full", KEY_RECOMPUTE_MODULES: []},
)
"""Recompute settings from fastest (keeps the most activations) to slowest (keeps the fewest)."""
MAX_TRIAL_MICRO_BATCHES = 8
"""Upper limit of micro batches per trial step, and so of the factor by which a search can grow the micro batch."""
TRIAL_OVERRIDES = (
    *("log.name=run", "log.every=1", "log.loggers=[]", "evaluate.every=0", "samples.every=0"),
    *("log.spans=false", "profile.steps=[]", "checkpoint.export_hf=false", "train.callbacks=[]"),
    *("checkpoint.init_from=null", "checkpoint.every=0", "checkpoint.every_minutes=0", "checkpoint.resume=none"),
    "checkpoint.weights_only=false",
)
"""A trial logs every step and writes nothing but its metrics."""


class SearchSpace:
    """Valid choices for a configuration on `ranks` ranks. Keys in `fixed_keys` keep their values."""

    def __init__(self, config: Config, ranks: int, fixed_keys: Collection[str] = ()) -> None:
        self.base_config, self.ranks, self.fixed_keys = config, ranks, fixed_keys
        self.layout = Layout.from_config(config, ranks)
        sections = config.model_dump(mode="json")
        self.initial_choice: Choice = {
            key: sections[section][name] for key in TUNED_KEYS for section, name in [key.split(".")]
        }
        initial_level = self._recompute_of(self.initial_choice)
        # Ring attention is never recomputed on its own. The file's own list of modules goes before full recompute.
        levels = [
            level
            for level in RECOMPUTE_LEVELS
            if level[KEY_RECOMPUTE] != "attention" or config.layout.cp == 1 or level == initial_level
        ]
        self.recompute_levels = levels if initial_level in levels else [*levels[:-1], initial_level, levels[-1]]
        self.trial_batch = self._trial_batch()

    def _trial_batch(self) -> int:
        """Samples per trial step. With a pipeline the file's: its bubble depends on the number of micro batches."""
        train, micro_batches = self.base_config.train, MAX_TRIAL_MICRO_BATCHES
        if self.layout.pp > 1:
            return train.global_batch
        while train.global_batch % (train.micro_batch * self.layout.dp * micro_batches):
            micro_batches //= 2
        return train.micro_batch * self.layout.dp * micro_batches

    def overrides(self, choice: Choice) -> list[str]:
        """The values of `choice` that differ from the file, as KEY=VALUE."""
        return [f"{key}={_to_yaml(value)}" for key, value in choice.items() if value != self.initial_choice[key]]

    def config_for(self, choice: Choice, overrides: Collection[str] = ()) -> Config:
        """The file's configuration with `choice` and then `overrides` applied."""
        return parse(self.base_config.model_dump(mode="json"), [*self.overrides(choice), *overrides])

    def trial_config(self, choice: Choice, steps: int, directory: Path) -> Config:
        """Configuration of a short run that writes its metrics to directory/run and nothing else."""
        overrides = [
            *(f"train.steps={steps}", f"train.global_batch={self.trial_batch}", f"train.max_skipped_steps={steps + 1}"),
            f"log.directory={json.dumps(str(directory))}",
        ]
        return self.config_for(choice, [*overrides, *TRIAL_OVERRIDES])

    def is_valid(self, choice: Choice) -> bool:
        """True if `choice` leaves the fixed keys alone and its configuration can run."""
        changed = {key for key, value in choice.items() if value != self.initial_choice[key]}
        if changed.intersection(self.fixed_keys):
            return False
        try:
            config = self.config_for(choice)
            Layout.from_config(config, self.ranks)
            make_compile_fn(config.compile, devices.select(config.device.name))
        except UserError:
            return False
        return True

    def larger_micro_batches(self, micro_batch: int) -> list[int]:
        """Doublings of `micro_batch` that divide the samples of a trial step."""
        samples = self.trial_batch // self.layout.dp
        doublings = (micro_batch << n for n in range(1, samples.bit_length()))
        return [size for size in doublings if samples % size == 0]

    def smaller_micro_batches(self, micro_batch: int) -> list[int]:
        """Sizes below `micro_batch` that divide the samples of a trial step, each at most half of the previous one."""
        samples = self.trial_batch // self.layout.dp
        sizes = [micro_batch]
        while sizes[-1] > 1:
            sizes.append(next(size for size in range(sizes[-1] // 2, 0, -1) if samples % size == 0))
        return sizes[1:]

    def less_recompute(self, choice: Choice) -> list[Choice]:
        """Recompute settings that keep more activations than `choice`, starting with none."""
        return self.recompute_levels[: self.recompute_levels.index(self._recompute_of(choice))]

    def more_recompute(self, choice: Choice) -> list[Choice]:
        """Recompute settings that keep fewer activations than `choice`, in order."""
        return self.recompute_levels[self.recompute_levels.index(self._recompute_of(choice)) + 1 :]

    def _recompute_of(self, choice: Choice) -> Choice:
        return {key: choice[key] for key in (KEY_RECOMPUTE, KEY_RECOMPUTE_MODULES)}

    def other_attention_kernels(self) -> list[str]:
        """Attention kernels other than the file's. Devices list the fastest first, which `auto` tries first."""
        names = devices.select(self.base_config.device.name).kind.attention_kernels
        current = self.initial_choice[KEY_ATTENTION]
        candidates = names[1:] if current == "auto" else ("auto", *names[1:]) if names else ()
        return [name for name in candidates if name != current]

    def supports_cuda_graphs(self) -> bool:
        return self.ranks == 1 and devices.select(self.base_config.device.name).supports_graphs


def _to_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
