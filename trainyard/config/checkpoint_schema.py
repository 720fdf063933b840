"""The `checkpoint` section of the configuration."""

from typing import Literal, Self

from pydantic import Field, model_validator

from trainyard.core.section import NonNegativeInt, PositiveInt, Section


class CheckpointSection(Section):
    """Checkpoints: what a run starts from, saves and exports."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0: none by steps. If this or every_minutes is set, the run also saves at its end and
    when a signal stops it."""
    every_minutes: float = Field(0.0, ge=0)
    """Minutes between checkpoints; 0: none by time."""
    keep: NonNegativeInt = 3
    """Number of latest checkpoints to keep; 0: all."""
    directory: str | None = None
    """Checkpoint directory: a path shared by all hosts, or an fsspec URL such as s3://bucket/name. Default:
    checkpoints/ in the run directory."""
    resume: str = "none"
    """auto: resume from the latest complete checkpoint of the run log.name, or start from step 0 if it has none; a
    path: resume from that checkpoint, or from the latest one in that directory or run; none: start from step 0."""
    accept_changed_data: bool = False
    """Resume although data files have changed since the checkpoint. Default: refuse."""
    weights_only: bool = False
    """Load only the weights of checkpoint.resume and start at step 0 with a fresh optimizer."""
    init_from: str | None = None
    """Initial weights of a fresh run, in any format that `trainyard convert` reads (continued pre-training): a path, a
    URL (s3://, https://), or a model on the Hub (OWNER/NAME, hf://OWNER/NAME@REVISION). Default: random
    initialization."""
    blocking: bool = False
    """Wait until a checkpoint is written. Default: training continues while a copy in host memory is written."""
    writers_per_host: PositiveInt | None = None
    """Maximum ranks per host that stage and write a checkpoint concurrently. Lower it if host memory is short; training
    blocks for all but the last group. Default: all ranks."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Action if a checkpoint cannot be written, for example on a full disk: warn and continue, or stop."""
    memory_every: NonNegativeInt = 0
    """Steps between copies of the training state in the memory of this host and of the next one, from which the run
    continues after the loss of a host; 0: none. They need about four times the memory of the state on each host."""
    memory_directory: str = "/dev/shm"
    """File system in memory for these copies, on each host."""
    stop_grace_s: float = Field(10.0, ge=0)
    """Seconds for the step in progress to end after a signal asked for the end of the run. A step that takes longer is
    abandoned, and the one before it is saved."""
    export_hf: bool = True
    """Write the final weights in Hugging Face format (config.json, model.safetensors) to the run directory."""

    @property
    def saving_enabled(self) -> bool:
        """True if the run writes checkpoints."""
        return bool(self.every or self.every_minutes)

    @property
    def weights_from(self) -> str | None:
        """Where a run that starts at step 0 reads its weights; None: it initializes them."""
        return self.resume if self.weights_only else self.init_from

    @model_validator(mode="after")
    def _check_memory_copies(self) -> Self:
        if self.memory_every and not self.saving_enabled:
            raise ValueError(
                f"memory_every={self.memory_every}: needs checkpoints to fall back to; set checkpoint.every or "
                "checkpoint.every_minutes"
            )
        return self

    @model_validator(mode="after")
    def _check_weight_sources(self) -> Self:
        if self.weights_only and self.resume in ("auto", "none"):
            raise ValueError(f"weights_only=true: requires the path of a checkpoint; found resume={self.resume}")
        if self.weights_only and self.init_from:
            raise ValueError(
                f"init_from={self.init_from}: weights_only=true sets the initial weights too; set only one"
            )
        return self
