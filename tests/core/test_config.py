"""Settings: four sources in order, wrong ones named, nothing written to afterwards."""

from __future__ import annotations

import dataclasses
import re
import shutil
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import config
from headrace.config import environment
from headrace.errors import ConfigError


def write(directory: Path, text: str) -> Path:
    """A TOML file."""
    path = directory / "mesh.toml"
    path.write_text(text)
    return path


def test_without_any_source_the_defaults_hold():
    assert config.load(environment={}) == config.Config()


def test_each_source_is_stronger_than_the_one_before(tmp_path):
    path = write(tmp_path, "[engine]\nnum_blocks = 1\nmax_batch_size = 1\nmax_batch_tokens = 1\n")
    environment = {"HEADRACE__ENGINE__MAX_BATCH_SIZE": "2", "HEADRACE__ENGINE__MAX_BATCH_TOKENS": "2"}
    engine = config.load(path, ["engine.max_batch_tokens=3"], environment).engine
    assert (engine.num_blocks, engine.max_batch_size, engine.max_batch_tokens) == (1, 2, 3)
    assert engine.output_chunk == config.EngineConfig().output_chunk


def test_the_last_of_two_equal_flags_wins():
    assert config.load(flags=["mesh.name=a", "mesh.name=b"], environment={}).mesh.name == "b"


def test_the_file_may_be_named_by_the_environment(tmp_path):
    path = write(tmp_path, 'faults = ["decode.step:fail"]\n[mesh]\nname = "x"\n')
    loaded = config.load(environment={"HEADRACE_CONFIG": str(path), "HOME": "/", "OTHER__ENGINE__X": "1"})
    assert (loaded.mesh.name, loaded.faults) == ("x", ("decode.step:fail",))


@pytest.mark.parametrize(
    ("flag", "path"),
    [
        ("engin.num_blocks=1", "engin"),
        ("engine.num_block=1", "engine.num_block"),
        ("engine.num_blocks=many", "engine.num_blocks"),
        ("engine.num_blocks=1.5", "engine.num_blocks"),
        ("engine.exact=perhaps", "engine.exact"),
        ("decode.reserve_expiry_s=soon", "decode.reserve_expiry_s"),
        ("engine=1", "engine"),
        ("engine.num_blocks.deep=1", "engine.num_blocks"),
        ("engine.num_blocks", "engine.num_blocks"),
    ],
)
def test_unknown_keys_and_bad_values_are_named_by_their_path(flag, path):
    with pytest.raises(ConfigError) as caught:
        config.load(flags=[flag], environment={})
    assert caught.value.field == path
    assert path in caught.value.message


def test_the_environment_is_checked_as_strictly_as_the_file():
    with pytest.raises(ConfigError) as caught:
        config.load(environment={"HEADRACE__DECODE__MAX_BACH": "1"})
    assert caught.value.field == "decode.max_bach"


@pytest.mark.parametrize(
    "text", ['[engine]\nnum_blocks = "64"', "[engine]\nexact = 1", "[mesh]\nname = 1", "[engine]\nnum_blocks = true"]
)
def test_a_file_states_types_exactly(tmp_path, text):
    with pytest.raises(ConfigError):
        config.load(write(tmp_path, text), environment={})


@pytest.mark.parametrize("text", ["[engine", "engine = 1", "[engine.num_blocks]\nx = 1", "faults = 5"])
def test_a_file_that_is_no_tree_of_settings_is_refused(tmp_path, text):
    with pytest.raises(ConfigError):
        config.load(write(tmp_path, text), environment={})


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "settings.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=re.escape("settings.toml")):
        config.load(tmp_path / "settings.toml", environment={})


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape("none.toml")):
        config.load(tmp_path / "none.toml", environment={})


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        (["prefill.expiry_margin_s=5"], "prefill.expiry_margin_s"),
        (["prefill.expiry_margin_s=10"], "prefill.expiry_margin_s"),
        (["prefill.renew_every_s=5"], "prefill.renew_every_s"),
        (["transfer.timeout_s=4"], "transfer.timeout_s"),
        (["transfer.backend=pigeon"], "transfer.backend"),
        (["transfer.link=pigeon"], "transfer.link"),
        (["transfer.link=nvlink_intra"], "transfer.link"),
        (["transfer.link=nvlink_intra", "engine.device=cpu:0"], "transfer.link"),
        (["transfer.link=nvlink_intra", "transfer.backend=grpc", "engine.device=cuda"], "transfer.link"),
        (["transfer.link=nvlink_intra", "transfer.backend=local", "engine.device=cuda"], "transfer.link"),
        (["registry.lease_s=2"], "registry.lease_s"),
        (["engine.num_blocks=0"], "engine.num_blocks"),
        (["decode.groups=0"], "decode.groups"),
        (["mesh.decode_ranks=2"], "mesh.decode_ranks"),
        (["prefill.ranks_per_group=2"], "prefill.ranks_per_group"),
        (["prefill.ranks_per_group=0"], "prefill.ranks_per_group"),
        (["decode.groups=2", "decode.devices=cpu"], "decode.devices"),
        (["decode.devices=cuda:0", "engine.weight_dtype=fp8"], "engine.weight_dtype"),
        (["router.max_attempts=-1"], "router.max_attempts"),
        (["decode.reserve_expiry_s=nan"], "decode.reserve_expiry_s"),
        (["decode.quarantine_max_s=inf"], "decode.quarantine_max_s"),
        (["registry.heartbeat_s=-1"], "registry.heartbeat_s"),
        (["engine.num_threads=-2"], "engine.num_threads"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(flags, path):
    with pytest.raises(ConfigError) as caught:
        config.load(flags=flags, environment={})
    assert caught.value.field == path
    assert path in caught.value.message


@pytest.mark.parametrize(
    ("text", "wanted"), [("true", True), ("1", True), ("Off", False), ("no", False), ("auto", None), ("none", None)]
)
def test_switches_that_may_be_left_open_take_words(text, wanted):
    assert config.load(flags=[f"engine.exact={text}"], environment={}).engine.exact is wanted


def test_settings_are_never_written_to():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.load(environment={}).engine.num_blocks = 1  # type: ignore[misc]


@pytest.mark.parametrize("text", ["1,8,64", "1; 8;64", "[1, 8, 64]"])
def test_a_list_of_numbers_is_a_list_in_toml_and_separated_text_elsewhere(tmp_path, text):
    if text.startswith("["):
        loaded = config.load(
            write(tmp_path, f'[engine]\ndevice = "cuda"\ndecode_graph_sizes = {text}\n'), environment={}
        )
    else:
        loaded = config.load(flags=["engine.device=cuda", f"engine.decode_graph_sizes={text}"], environment={})
    assert loaded.engine.decode_graph_sizes == (1, 8, 64)


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        (["engine.kv_dtype=bf16"], "engine.kv_dtype"),  # exact, the default on a CPU
        (["engine.kv_dtype=fp8", "engine.exact=false"], "engine.kv_dtype"),
        (["engine.kv_dtype=fp32", "engine.device=cuda"], "engine.kv_dtype"),
        (["engine.kv_dtype=int4", "engine.device=cuda:1"], "engine.kv_dtype"),
        (["engine.weight_dtype=fp8"], "engine.weight_dtype"),
        (["engine.weight_dtype=nvfp4", "engine.device=cuda", "engine.exact=true"], "engine.weight_dtype"),
        (["engine.weight_dtype=int4", "engine.device=cuda"], "engine.weight_dtype"),
        (["engine.decode_graphs=true"], "engine.decode_graphs"),
        (["engine.decode_graphs=true", "engine.device=cuda", "engine.exact=true"], "engine.decode_graphs"),
        (["engine.decode_graph_sizes=8"], "engine.decode_graph_sizes"),  # on a CPU
        (
            ["engine.device=cuda", "engine.decode_graphs=false", "engine.decode_graph_sizes=8"],
            "engine.decode_graph_sizes",
        ),
        (
            ["engine.device=cuda", "engine.decode_graph_sizes=8,65", "engine.max_batch_size=64"],
            "engine.decode_graph_sizes",
        ),
        (["engine.device=cuda", "engine.decode_graph_sizes=0"], "engine.decode_graph_sizes"),
        (["engine.decode_graph_sizes=8,x"], "engine.decode_graph_sizes"),
    ],
)
def test_formats_and_graphs_that_cannot_be_are_refused_by_name(flags, path):
    with pytest.raises(ConfigError) as caught:
        config.load(flags=flags, environment={})
    assert caught.value.field == path and path in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["engine.kv_dtype=fp32"],
        ["engine.kv_dtype=bf16", "engine.exact=false"],
        ["engine.kv_dtype=fp8", "engine.weight_dtype=nvfp4", "engine.device=cuda"],
        ["engine.async_scheduling=true"],
        ["engine.decode_graphs=true", "engine.decode_graph_sizes=1,64", "engine.device=cuda"],
    ],
)
def test_formats_and_graphs_that_can_be_are_taken(flags):
    config.load(flags=flags, environment={})


def test_the_run_directory_follows_the_state_directory_and_the_name(tmp_path):
    loaded = config.load(flags=["mesh.name=blue"], environment={})
    assert config.run_directory(loaded, {"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "headrace" / "blue"
    named = config.load(flags=[f"mesh.run_directory={tmp_path}/x"], environment={})
    assert config.run_directory(named, {}) == tmp_path / "x"


def leaves() -> list[tuple[str, type, object]]:
    """Every int, float and str setting: (path, type, default)."""
    hints = typing.get_type_hints(config.Config)
    parts = [(entry.name, hints[entry.name]) for entry in dataclasses.fields(config.Config)]
    return [
        (f"{part}.{entry.name}", typing.get_type_hints(kind)[entry.name], entry.default)
        for part, kind in parts
        if dataclasses.is_dataclass(kind)
        for entry in dataclasses.fields(kind)
    ]


@pytest.mark.parametrize(
    ("path", "kind", "default"), leaves(), ids=lambda value: str(value) if "." in str(value) else ""
)
def test_every_setting_can_be_given_as_text_in_both_ways(path, kind, default):
    text = "" if default in (None, ()) else str(default)
    variable = "HEADRACE__" + path.upper().replace(".", "__")
    assert config.load(flags=[f"{path}={text}"], environment={}) == config.Config()
    assert config.load(environment={variable: text}) == config.Config()


@given(st.dictionaries(st.sampled_from(["engine.num_blocks", "router.max_attempts"]), st.integers(1, 10**9)))
def test_numbers_arrive_as_they_were_written(values):
    loaded = config.load(flags=[f"{path}={value}" for path, value in values.items()], environment={})
    for path, value in values.items():
        part, name = path.split(".")
        assert getattr(getattr(loaded, part), name) == value


def test_the_settings_that_are_shipped_load():
    loaded = config.load(Path(__file__).resolve().parents[2] / "compose" / "h200.toml", environment={})
    assert loaded.engine.device == "cuda:0" and loaded.transfer.link == "tcp"
    assert config.load(flags=["transfer.link=nvlink_intra", "engine.device=cuda:0"]).transfer.link == "nvlink_intra"


def test_programs_beside_python_are_found_after_all_others_and_added_once(tmp_path, monkeypatch):
    own = tmp_path / "bin"
    own.mkdir()
    (own / "ninja-of-ours").touch(0o755)
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda name: str(own))
    monkeypatch.setenv("PATH", "/first:/second")
    config.find_own_programs()
    config.find_own_programs()
    assert config.environment_value("PATH") == f"/first:/second:{own}"
    assert shutil.which("ninja-of-ours") == str(own / "ninja-of-ours")


def test_each_rank_computes_on_its_own_device():
    loaded = config.load(flags=["prefill.groups=2", "prefill.devices=cpu;cuda:1", "engine.device=cpu"], environment={})
    assert [config.engine_of(loaded, "prefill", rank).device for rank in range(2)] == ["cpu", "cuda:1"]
    assert config.engine_of(loaded, "decode", 0) == loaded.engine and config.num_ranks(loaded.prefill) == 2
