"""Settings that cannot work, or not together: refused at the start, with the numbers and the key's path."""

from __future__ import annotations

from headrace.config.tree import Config, DecodeConfig, EngineConfig, PrefillConfig, TransferConfig, engine_of, num_ranks
from headrace.errors import ConfigError


def check(config: Config) -> None:
    """Refuses settings that cannot work together, with the numbers."""
    _check_times(config)
    if not 0.05 <= config.links.beat_s <= 60:
        raise ConfigError(f"links.beat_s = {config.links.beat_s} must lie in 0.05 .. 60 s", field="links.beat_s")
    for role in ("prefill", "decode"):
        _check_ranks(role, getattr(config, role))
    for engine in {engine_of(config, role, rank) for role, rank in _all_ranks(config)}:
        _check_transfer(config.transfer, engine)
    for path, value in (
        ("engine.num_blocks", config.engine.num_blocks),
        ("engine.max_batch_tokens", config.engine.max_batch_tokens),
        ("engine.max_batch_size", config.engine.max_batch_size),
        ("prefill.groups", config.prefill.groups),
        ("decode.groups", config.decode.groups),
        ("decode.request_credit_bytes", config.decode.request_credit_bytes),
        ("router.processes", config.router.processes),
        ("router.stream_interval", config.router.stream_interval),
        ("router.max_attempts", config.router.max_attempts),
    ):
        if value < 1:
            raise ConfigError(f"{path} = {value} must be at least 1", field=path)
    for engine in {engine_of(config, role, rank) for role, rank in _all_ranks(config)}:
        _check_formats(engine)
        _check_graphs(engine)


def _all_ranks(config: Config) -> list[tuple[str, int]]:
    return [(role, rank) for role in ("prefill", "decode") for rank in range(num_ranks(getattr(config, role)))]


def _check_ranks(role: str, part: PrefillConfig | DecodeConfig) -> None:
    if part.ranks_per_group != 1:
        raise ConfigError(
            f"{role}.ranks_per_group = {part.ranks_per_group}: ranks cannot share experts yet, only 1 is accepted; more ranks of "
            f"whole models are {role}.groups",
            field=f"{role}.ranks_per_group",
        )
    if part.devices and len(part.devices) != num_ranks(part):
        raise ConfigError(
            f"{role}.devices names {len(part.devices)} devices for {num_ranks(part)} ranks "
            f"({role}.groups = {part.groups}, {role}.ranks_per_group = {part.ranks_per_group})",
            field=f"{role}.devices",
        )


def _check_times(config: Config) -> None:
    margin_s, expiry_s = config.prefill.expiry_margin_s, config.decode.reserve_expiry_s
    if margin_s <= config.transfer.timeout_s:
        raise ConfigError(
            f"prefill.expiry_margin_s = {margin_s} must be above transfer.timeout_s = {config.transfer.timeout_s}: a write "
            "could still run when its reservation has expired",
            field="prefill.expiry_margin_s",
        )
    if margin_s >= expiry_s:
        raise ConfigError(
            f"prefill.expiry_margin_s = {margin_s} leaves nothing of decode.reserve_expiry_s = {expiry_s}",
            field="prefill.expiry_margin_s",
        )
    if config.prefill.renew_every_s > expiry_s - margin_s:
        raise ConfigError(
            f"prefill.renew_every_s = {config.prefill.renew_every_s} is longer than what a reservation has left above the "
            f"margin, {expiry_s - margin_s} s",
            field="prefill.renew_every_s",
        )
    if config.registry.lease_s <= 2 * config.registry.heartbeat_s:
        raise ConfigError(
            f"registry.lease_s = {config.registry.lease_s} must be more than two heartbeats of {config.registry.heartbeat_s} s",
            field="registry.lease_s",
        )


def _check_transfer(transfer: TransferConfig, engine: EngineConfig) -> None:
    if transfer.timeout_s < 5:
        raise ConfigError(
            f"transfer.timeout_s = {transfer.timeout_s} is below Mooncake's minimum of 5", field="transfer.timeout_s"
        )
    if transfer.backend not in ("mooncake", "local", "grpc"):
        raise ConfigError(f"transfer.backend = {transfer.backend!r}", field="transfer.backend")
    if transfer.link not in ("tcp", "nvlink_intra"):
        raise ConfigError(f"transfer.link = {transfer.link!r} is neither tcp nor nvlink_intra", field="transfer.link")
    if transfer.link == "nvlink_intra" and transfer.backend != "mooncake":
        raise ConfigError(
            f"transfer.link = 'nvlink_intra' is a link of Mooncake, and transfer.backend is {transfer.backend!r}",
            field="transfer.link",
        )
    if transfer.link == "nvlink_intra" and _on_cpu(engine):
        raise ConfigError(
            f"transfer.link = 'nvlink_intra' moves GPU memory only, and the device of a rank is {engine.device!r}",
            field="transfer.link",
        )


def _on_cpu(engine: EngineConfig) -> bool:
    return engine.device.partition(":")[0] == "cpu"


def _check_formats(engine: EngineConfig) -> None:
    """What one look at the settings tells; what the device and the checkpoint have is told when the model is loaded."""
    on_cpu = _on_cpu(engine)
    exact = on_cpu if engine.exact is None else engine.exact
    where = "in exact mode" if exact else "on a CPU" if on_cpu else "on an accelerator"
    weights = ("",) if exact or on_cpu else ("", "bf16", "fp8", "nvfp4")
    rows = ("", "fp32") if exact else ("", "fp32", "bf16") if on_cpu else ("", "bf16", "fp8")
    for path, value, known in (
        ("engine.weight_dtype", engine.weight_dtype, weights),
        ("engine.kv_dtype", engine.kv_dtype, rows),
    ):
        if value not in known:
            choice = ", ".join(name or "empty" for name in known)
            raise ConfigError(f"{path} = {value!r}: {where} it is one of {choice}", field=path)


def _check_graphs(engine: EngineConfig) -> None:
    on_cpu, sizes = _on_cpu(engine), engine.decode_graph_sizes
    if on_cpu and engine.decode_graphs:
        raise ConfigError(
            f"engine.decode_graphs = true, engine.device = {engine.device!r} has no graphs",
            field="engine.decode_graphs",
        )
    if on_cpu and sizes:
        raise ConfigError(
            f"engine.decode_graph_sizes = {list(sizes)}, engine.device = {engine.device!r} has no graphs",
            field="engine.decode_graph_sizes",
        )
    if engine.decode_graphs and engine.exact:
        raise ConfigError(
            "engine.decode_graphs = true, engine.exact = true runs kernel by kernel", field="engine.decode_graphs"
        )
    if sizes and engine.decode_graphs is False:
        raise ConfigError(
            "engine.decode_graph_sizes are given, engine.decode_graphs = false", field="engine.decode_graph_sizes"
        )
    if any(not 1 <= size <= engine.max_batch_size for size in sizes):
        raise ConfigError(
            f"engine.decode_graph_sizes = {list(sizes)} must lie in 1 .. engine.max_batch_size = {engine.max_batch_size}",
            field="engine.decode_graph_sizes",
        )


def check_separate(config: Config) -> None:
    """Refuses settings that only one process for prefill and decode could have."""
    if config.transfer.backend == "local":
        raise ConfigError(
            "transfer.backend = 'local' moves rows within one process: use it with --aggregated, or choose mooncake or grpc",
            field="transfer.backend",
        )
