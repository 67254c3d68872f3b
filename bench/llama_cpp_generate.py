"""llama.cpp on our weights, as a child process of `headrace bench engine --against llama.cpp`.

Runs under an interpreter that has `xllamacpp` and `gguf` (`make llama` makes .venv-llama), never under ours. It converts
the checkpoint to GGUF with every value unchanged (bf16 fits f32 and bf16 exactly; f16 is offered because llama.cpp is
fast with it, and loses what f16 cannot hold), then serves lines of JSON on stdin as `transformers_generate.py` does. A
dtype is converted and loaded when it is first asked for, which is not part of the answer's seconds:

    {"dtype": "f32", "prompts": [[ids]], "output_tokens": n} -> {"seconds", "cpu_seconds", "token_ids"}

All prompts of a line are in flight at once, one slot each, as llama.cpp's own server runs them.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

DTYPES = {
    "f32": (np.float32, gguf.LlamaFileType.ALL_F32),
    "f16": (np.float16, gguf.LlamaFileType.MOSTLY_F16),
}
SIGMOID_GATE = 2  # llama.cpp's number for it
SLOT_TOKENS = 256


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of the directory's safetensors files as fp32."""
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                tensors[name] = _fp32(data[start:end], entry["dtype"]).reshape(entry["shape"])
    return tensors


def _fp32(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)


def named(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Their names and shapes for ours; the next-token layer is left out."""
    yield "token_embd.weight", tensors["model.embed_tokens.weight"]
    yield "output_norm.weight", tensors["model.norm.weight"]
    yield "output.weight", tensors["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        for name, value in _layer(config, own):
            yield f"blk.{layer}.{name}", value


def _layer(config: dict[str, Any], own: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    plain = {
        "input_layernorm.weight": "attn_norm.weight",
        "self_attn.q_a_proj.weight": "attn_q_a.weight",
        "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
        "self_attn.q_b_proj.weight": "attn_q_b.weight",
        "self_attn.q_proj.weight": "attn_q.weight",
        "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
        "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
        "self_attn.o_proj.weight": "attn_output.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "mlp.gate.weight": "ffn_gate_inp.weight",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    }
    yield from ((theirs, own[ours]) for ours, theirs in plain.items() if ours in own)
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    per_head = own["self_attn.kv_b_proj.weight"].reshape(heads, -1, config["kv_lora_rank"])
    yield "attn_k_b.weight", per_head[:, :nope].transpose(0, 2, 1)
    yield "attn_v_b.weight", per_head[:, nope:]
    for part in ("gate", "up", "down"):
        if f"mlp.{part}_proj.weight" in own:
            yield f"ffn_{part}.weight", own[f"mlp.{part}_proj.weight"]
            continue
        yield f"ffn_{part}_shexp.weight", own[f"mlp.shared_experts.{part}_proj.weight"]
        experts = range(config["n_routed_experts"])
        yield f"ffn_{part}_exps.weight", np.stack([own[f"mlp.experts.{e}.{part}_proj.weight"] for e in experts])


def write_gguf(directory: Path, target: Path, dtype: str) -> None:
    """The whole checkpoint as one file; norms, biases and the router stay f32, as llama.cpp wants them."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config.get("rope_scaling"):
        raise SystemExit("only checkpoints without rope scaling are converted")
    made, kind = DTYPES[dtype]
    writer = gguf.GGUFWriter(target, "deepseek2")
    writer.add_file_type(kind)
    _describe(writer, config)
    _vocabulary(writer, config, json.loads((directory / "tokenizer.json").read_text(encoding="utf-8")))
    for name, value in named(config, read_tensors(directory)):
        wide = value.ndim == 1 or name.endswith("ffn_gate_inp.weight")
        writer.add_tensor(name, np.ascontiguousarray(value, np.float32 if wide else made))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    nope, rope, latent = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(rope)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(nope + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType(SIGMOID_GATE))


def _vocabulary(writer: gguf.GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    tokens = [f"<unused{i}>" for i in range(config["vocab_size"])]
    kinds = [gguf.TokenType.UNUSED] * len(tokens)
    for token, place in tokenizer["model"]["vocab"].items():
        tokens[place], kinds[place] = token, gguf.TokenType.NORMAL
    for entry in tokenizer["added_tokens"]:
        tokens[entry["id"]], kinds[entry["id"]] = entry["content"], gguf.TokenType.CONTROL
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")  # unused: prompts are ids
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def open_server(path: Path, threads: int, slots: int) -> xllamacpp.Server:
    """One slot a stream, nothing cached between requests, no template."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = slots
    params.n_ctx = slots * SLOT_TOKENS
    params.n_batch = params.n_ubatch = 2048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.warmup = False  # whoever measures warms up with what it measures
    params.fit_params = False  # no trial loads to find out what fits
    params.verbosity = 0
    return xllamacpp.Server(params)


def generate(server: xllamacpp.Server, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
    """Greedy, end tokens ignored, all prompts at once."""

    def one(prompt: list[int]) -> list[int]:
        asked = {
            "prompt": prompt,
            "n_predict": output_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "verbose": True,  # its OpenAI form of an answer holds the ids only there
        }
        answer = server.handle_completions(asked)
        answer = json.loads(answer) if isinstance(answer, str) else answer
        if "__verbose" not in answer:
            raise SystemExit(f"llama.cpp answered {str(answer)[:300]}")
        return answer["__verbose"]["tokens"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        start, cpu = time.perf_counter(), time.process_time()
        made = list(pool.map(one, prompts))
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu,
            "token_ids": made,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, default=32)
    arguments = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as scratch:
        servers: dict[str, xllamacpp.Server] = {}
        about = {
            "xllamacpp": xllamacpp.__version__,
            "threads": arguments.threads,
            "system": xllamacpp.get_system_info(),
        }
        print(json.dumps(about), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["dtype"] not in servers:
                path = Path(scratch) / f"{asked['dtype']}.gguf"
                write_gguf(arguments.directory, path, asked["dtype"])
                servers[asked["dtype"]] = open_server(path, arguments.threads, arguments.slots)
            answer = generate(servers[asked["dtype"]], asked["prompts"], asked["output_tokens"])
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
