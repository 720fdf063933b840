"""The `layout` section of the configuration. Checks that need the number of ranks live in parallel/layout.py."""

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, model_validator

from trainyard.core.section import PositiveInt, Section


class LayoutSection(Section):
    """Parallelism of the model and the batch. The data parallel size is ranks / (tp * pp * cp)."""

    tp: PositiveInt = 1
    """Tensor parallel ranks."""
    sequence_parallel: bool = False
    """Shard activations over the tp ranks outside attention and MLP."""
    pp: PositiveInt = 1
    """Pipeline parallel ranks."""
    vpp: PositiveInt = 1
    """Virtual stages per pipeline rank (interleaved schedule)."""
    pipeline_cuts: Annotated[tuple[int, ...], Strict(False)] = ()
    """Last layer of each pipeline stage except the last. Default: even stages."""
    pipeline_schedule: Literal["1f1b", "zero_bubble", "zbv"] = "1f1b"
    """Order of micro batches in the pipeline. 1f1b: one forward, one backward (interleaved if vpp is above 1);
    zero_bubble: splits the backward pass and fills the bubbles with weight gradients; zbv: the same with two stages per
    rank, placed in a V (needs vpp=2)."""
    cp: PositiveInt = 1
    """Context parallel ranks (the sequence is sharded)."""
    cp_method: Literal["ring", "all_gather"] = "ring"
    """Exchange of keys and values among context parallel ranks: ring attention, or one all-gather. Trainium always
    uses the all-gather."""
    ep: PositiveInt = 1
    """Expert parallel ranks: this many of the data x context parallel ranks divide the experts of a mixture of experts,
    and send each token to the ranks of its experts."""
    zero: int = Field(0, ge=0, le=3)
    """State sharded over data parallel ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""
    bucket_mib: PositiveInt = 256
    """MiB of gradients per data parallel reduction, which overlaps the backward pass."""
    ranks: PositiveInt | None = None
    """Number of ranks the file was written for. Default: the ranks of the run."""

    @model_validator(mode="after")
    def _check_pipeline(self) -> Self:
        stages = self.pp * self.vpp
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp={self.vpp}: virtual stages need pp above 1; nearest: 1")
        if self.pipeline_schedule != "1f1b" and self.zero >= 2:
            raise ValueError(
                f"zero={self.zero}: reduces gradients during the backward pass, which "
                f"pipeline_schedule={self.pipeline_schedule} splits; nearest: zero=1, or pipeline_schedule=1f1b"
            )
        if self.pipeline_schedule == "zbv" and self.vpp != 2:
            raise ValueError(f"vpp={self.vpp}: pipeline_schedule=zbv has two stages per rank; nearest: 2")
        cuts = list(self.pipeline_cuts)
        if cuts and (len(cuts) != stages - 1 or cuts != sorted(set(cuts))):
            raise ValueError(
                f"pipeline_cuts={cuts}: needs {stages - 1} increasing layer numbers for pp={self.pp} x vpp={self.vpp}; "
                "nearest: leave it out for even stages"
            )
        return self
