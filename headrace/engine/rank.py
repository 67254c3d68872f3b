"""What a prefill and a decode process share: one model, one pool of rows, one engine thread, one KV layout."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace import config as configuration
from headrace.cache.blocks import BlockPool
from headrace.cache.latent import LatentPool
from headrace.cache.rows import Rows
from headrace.config import Config, TransferConfig
from headrace.engine.exact import exact_self_test
from headrace.engine.offline import EngineParts, load_configured
from headrace.engine.runner import Runner
from headrace.engine.streams import use_own_stream
from headrace.engine.thread import EngineThread
from headrace.errors import ConfigError
from headrace.model.base import Model
from headrace.observe import logs
from headrace.protocol.common import (
    KvLayout,
    KvRegion,
    NumberFormat,
    RopeOrder,
    TransferBackend,
    WorkerIdentity,
    WorkerInfo,
    WorkerRole,
)
from headrace.transfer import mooncake_environment

log = logs.get(__name__)

_FORMATS = {
    torch.float32: NumberFormat.FP32,
    torch.bfloat16: NumberFormat.BF16,
    torch.float8_e4m3fn: NumberFormat.FP8,
}
EXACT_PROFILE = "exact-1"
"""Numeric profile of exact mode: ranks of other arithmetic would not write the same rows."""


@dataclass
class Worker:
    """The parts of one worker process, made from its settings by `open_worker`."""

    config: Config
    transformer: Model
    latent: LatentPool
    blocks: BlockPool
    runner: Runner
    engine: EngineThread
    layout: KvLayout
    max_context_tokens: int
    model_name: str

    @property
    def rows(self) -> Rows:
        """The pool as transfer code sees it; each thread that reads or copies rows takes its own."""
        return Rows(self.latent)

    def info(self, role: WorkerRole, identity: WorkerIdentity, transfer: str) -> WorkerInfo:
        """What this worker says of itself. `transfer` is a name of `transfer.backend`."""
        engine = self.config.engine
        return WorkerInfo(
            identity=identity,
            role=role,
            model=self.model_name,
            layout=self.layout,
            block_count=self.blocks.num_blocks,
            max_context_tokens=self.max_context_tokens,
            max_batch_tokens=engine.max_batch_tokens if role is WorkerRole.PREFILL else 0,
            max_batch_size=engine.max_batch_size if role is WorkerRole.DECODE else 0,
            exact=self.transformer.exact,
            transfer=TransferBackend[transfer.upper()],
            vocabulary_size=self.transformer.config.vocab_size,
        )


def open_worker(config: Config, *, engine: EngineThread | None = None, transformer: Model | None = None) -> Worker:
    """Loads the model and makes its pool; blocks for seconds. A second worker of one process shares `engine` and
    `transformer` and gets a pool of its own. Raises ConfigError and CheckpointError."""
    transformer = transformer or load_model(config)
    try:
        parts = EngineParts.over(transformer, config.engine, max_context_tokens=config.model.max_context_tokens)
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError when memory is short, on any device
        why = str(error).partition("\n")[0]
        text = f"engine.num_blocks = {config.engine.num_blocks}: no pool of that size can be made: {why}"
        raise ConfigError(text, field="engine.num_blocks") from error
    (region,), latent = transformer.kv_regions, parts.pool
    directory = configuration.model_directory(config)
    layout = KvLayout(
        regions=(KvRegion(region.name, region.num_layers, region.row_width, _FORMATS[latent.rows.dtype]),),
        block_size=latent.block_size,
        rope_order=RopeOrder.INTERLEAVED,
        model_fingerprint=model_fingerprint(directory),
        numeric_profile=EXACT_PROFILE if transformer.exact else "",
    )
    return Worker(
        config=config,
        transformer=transformer,
        latent=latent,
        blocks=parts.blocks,
        runner=parts.runner,
        engine=engine or EngineThread(prepare=functools.partial(use_own_stream, transformer.device)),
        layout=layout,
        max_context_tokens=parts.max_context,
        model_name=directory.name,
    )


def transfer_environment(config: TransferConfig) -> dict[str, str]:
    """What Mooncake reads from the environment when it loads; apply it at the start of a process."""
    return mooncake_environment(
        min_port=config.min_port, max_port=config.max_port, timeout_s=config.timeout_s, link=config.link
    )


def load_model(config: Config) -> Model:
    """The checkpoint in the mode the settings ask for; exact mode is proved on this host or refused."""
    transformer = load_configured(configuration.model_directory(config), config.engine)
    if transformer.exact and (reason := exact_self_test(transformer)) is not None:
        raise ConfigError(reason, field="engine.exact")
    log.info("model loaded", exact=transformer.exact, precision=transformer.precision_table())
    return transformer


def model_fingerprint(directory: Path) -> str:
    """32 hexadecimal digits over config.json and the names and sizes of all weight files."""
    digest = hashlib.blake2b(digest_size=16)
    config = json.loads((directory / "config.json").read_text())
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(65536))
    return digest.hexdigest()
