"""Settings: one tree (`tree`), one loader (`load`), one list of what cannot work (`check`), one door to the environment."""

from headrace.config.check import check, check_separate
from headrace.config.environment import (
    CHECKOUT,
    THREAD_ENVIRONMENT,
    apply_environment,
    child_environment,
    environment_value,
    find_own_programs,
    model_directory,
    run_directory,
)
from headrace.config.load import load
from headrace.config.tree import (
    Config,
    DecodeConfig,
    EngineConfig,
    KvStoreConfig,
    LinksConfig,
    MeshConfig,
    ModelSettings,
    PrefillConfig,
    RegistryConfig,
    RouterConfig,
    TelemetryConfig,
    TransferConfig,
    engine_of,
    num_ranks,
)

__all__ = [
    "Config",
    "DecodeConfig",
    "EngineConfig",
    "KvStoreConfig",
    "LinksConfig",
    "MeshConfig",
    "ModelSettings",
    "PrefillConfig",
    "RegistryConfig",
    "RouterConfig",
    "CHECKOUT",
    "THREAD_ENVIRONMENT",
    "TelemetryConfig",
    "TransferConfig",
    "apply_environment",
    "check",
    "check_separate",
    "child_environment",
    "engine_of",
    "environment_value",
    "find_own_programs",
    "load",
    "model_directory",
    "num_ranks",
    "run_directory",
]
