"""`trainyard` with a model that needs no checkpoint: python -m tests.inference.serve.fake_command serve CKPT ..."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

from tests.inference.serve.fake_scheduler import FakeScheduler
from trainyard.core.world import World
from trainyard.data.text.chat_template import ChatTemplate
from trainyard.data.text.tokenizer import ByteTokenizer
from trainyard.inference.serve import server


@dataclass(frozen=True)
class InferenceOptions:
    device: str
    dtype: str | None
    max_batch: int
    max_seq_len: int | None
    fp8_weights: bool
    batch_invariant: bool
    shares_prefixes: bool
    adapters: Mapping[str, str]


def load_for_inference(source: str, options: InferenceOptions, tokenizer: str | None, world: World) -> SimpleNamespace:
    bytes_tokenizer = ByteTokenizer()
    scheduler = FakeScheduler(options.max_batch, options.max_seq_len or 10**6, step_s=0.002)
    server.DRAIN_S = 0.5
    if os.environ.get("FAKE_FAULT"):
        scheduler.fail_now.set()
        scheduler.faults = [RuntimeError("device lost")] * 9
    return SimpleNamespace(
        scheduler=scheduler,
        adapters={},
        tokenizer=None if source == "no-tokenizer" else bytes_tokenizer,
        max_seq_len=scheduler.max_seq_len,
        chat_template=ChatTemplate(),
        end_ids=frozenset({bytes_tokenizer.end_id}),
        encode_prompt=lambda text: list(text.encode()),
    )


if __name__ == "__main__":
    module = ModuleType("trainyard.inference.load")
    module.__dict__.update(
        load_for_inference=load_for_inference, InferenceOptions=InferenceOptions, check_tensor_parallel=None
    )
    sys.modules[module.__name__] = module
    from trainyard.cli.main import main

    main()
