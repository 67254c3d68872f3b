"""Golden values from transformers, for random models (`cases.py`) and for a shipped checkpoint.

    python tests/golden/make_golden.py                      every random case -> tests/golden/random_<case>.npz
    python tests/golden/make_golden.py --model models/tiny  -> tests/golden/tiny.npz

Run it in an environment of its own that holds torch, numpy, safetensors and transformers; Headrace itself is not
imported (only its numpy checkpoint writer, by path). `golden.json` keeps the versions and the command beside the values.

prompt [P] int64; greedy [G] int64; logits [R, vocab] fp32 for the sequence positions in `rows` (teacher-forced on
prompt ++ greedy); top_gap [G] best minus second logit where greedy[i] was chosen; expert_gap [G] the smallest margin,
over the MoE layers, by which any expert or expert group was chosen while computing that token and those before it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import cases  # noqa: E402


def checkpoint_writer():
    path = HERE.parents[1] / "headrace" / "model" / "random_checkpoint.py"
    spec = importlib.util.spec_from_file_location("random_checkpoint", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(directory: Path) -> transformers.PreTrainedModel:
    config = json.loads((directory / "config.json").read_text())
    kind = transformers.DeepseekV3ForCausalLM
    kind._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config['num_hidden_layers']}\..*"]
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


class ExpertGaps:
    """Watches every router and keeps, per token, the smallest margin of its choices over the layers."""

    def __init__(self, model):
        self.layers: list[torch.Tensor] = []
        for module in model.modules():
            if type(module).__name__ == "DeepseekV3TopkRouter":
                module.register_forward_hook(self._watch)

    def _watch(self, router, _inputs, output) -> None:
        choice = output[0].sigmoid() + router.e_score_correction_bias
        gaps = torch.full((len(choice),), torch.inf)
        if router.topk_group < router.num_group:
            grouped = choice.view(len(choice), router.num_group, -1)
            scores, order = grouped.topk(2, -1)[0].sum(-1).sort(-1, descending=True)
            gaps = torch.minimum(gaps, scores[:, router.topk_group - 1] - scores[:, router.topk_group])
            dropped = order[:, router.topk_group :]
            grouped.scatter_(1, dropped[..., None].expand(-1, -1, grouped.shape[-1]), -torch.inf)
        ranked = choice.sort(-1, descending=True)[0]
        if router.top_k < ranked.shape[-1]:
            gaps = torch.minimum(gaps, ranked[:, router.top_k - 1] - ranked[:, router.top_k])
        self.layers.append(gaps)

    def take(self) -> torch.Tensor:
        gaps = torch.stack(self.layers).amin(0)
        self.layers.clear()
        return gaps


@torch.no_grad()
def golden(model, prompt: list[int], num_greedy: int, rows: list[int]) -> dict[str, np.ndarray]:
    gaps = ExpertGaps(model)
    model.generation_config = transformers.GenerationConfig()  # plain arg-max: no penalties a checkpoint may suggest
    ids = torch.tensor([prompt])
    made = model.generate(ids, max_new_tokens=num_greedy, min_new_tokens=num_greedy, do_sample=False)
    assert made.shape[1] == len(prompt) + num_greedy
    gaps.layers.clear()
    logits = model(made).logits[0].float()
    smallest = gaps.take().cummin(0)[0]
    chosen_at = slice(len(prompt) - 1, len(prompt) - 1 + num_greedy)
    best = logits[chosen_at].topk(2, -1)[0]
    return {
        "prompt": np.array(prompt, np.int64),
        "greedy": made[0, len(prompt) :].numpy(),
        "rows": np.array(rows, np.int64),
        "logits": logits[rows].numpy(),
        "top_gap": (best[:, 0] - best[:, 1]).numpy(),
        "expert_gap": smallest[chosen_at].numpy(),
    }


def save(path: Path, values: dict[str, np.ndarray]) -> None:
    np.savez_compressed(path, **values)
    record_path = HERE / "golden.json"
    record = json.loads(record_path.read_text()) if record_path.exists() else {}
    record[path.name] = {
        "command": " ".join(["python", "tests/golden/make_golden.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "dtype": "float32",
        "attention": "eager",
        "smallest_top_gap": float(values["top_gap"].min()),
        "smallest_expert_gap": float(values["expert_gap"].min()),
    }
    record_path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(path.name, path.stat().st_size, record[path.name])


def random_cases(names: list[str]) -> None:
    for case in names:
        with tempfile.TemporaryDirectory() as directory:
            where = checkpoint_writer().write_random_checkpoint(
                directory, cases.config_of(case), seed=cases.seed_of(case)
            )
            model = load(where)
            draw = np.random.Generator(np.random.PCG64(cases.seed_of(case) + 1000))
            prompt = draw.integers(0, model.config.vocab_size, cases.PROMPT_TOKENS).tolist()
            rows = list(range(cases.PROMPT_TOKENS)) + list(range(cases.PROMPT_TOKENS, cases.PROMPT_TOKENS + 252, 4))
            save(HERE / f"random_{case}.npz", golden(model, prompt, cases.GREEDY_TOKENS, rows))


def shipped(directory: Path, prompt: list[int]) -> None:
    rows = sorted({0, 1, 2, 7, 15, 16, 31, len(prompt) - 1, len(prompt), len(prompt) + 100, len(prompt) + 254})
    save(HERE / f"{directory.name}.npz", golden(load(directory), prompt, cases.GREEDY_TOKENS, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint directory; default: the random cases")
    parser.add_argument(
        "--text", default="Once upon a time there was a little girl who lived in a wood. The code of silver"
    )
    parser.add_argument("--case", action="append", choices=list(cases.CASES))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.model is None:
        random_cases(arguments.case or list(cases.CASES))
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    config = json.loads((arguments.model / "config.json").read_text())
    prompt = [config["bos_token_id"], *tokenizer.encode(arguments.text, add_special_tokens=False)]
    shipped(arguments.model, prompt)


if __name__ == "__main__":
    main()
