"""The training code: documents are what they claim, the fast forms equal the obvious ones."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from headrace.evals import recall
from training import data, evaluate, export
from training.model import ExpertLayer, Operations, TinyModel, choose_experts, expert_half, rms_norm
from training.muon import Muon, orthogonalise
from training.settings import ModelShape, Settings
from training.skills import BEGIN_ID, FactSource, Writer, log_uniform

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
_TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
SMALL = ModelShape(
    hidden_size=32,
    num_layers=2,
    intermediate_size=48,
    expert_size=16,
    num_experts=8,
    num_groups=4,
    groups_kept=2,
    experts_per_token=3,
    num_heads=2,
    q_lora_rank=32,
    kv_lora_rank=16,
    nope_dim=8,
    rope_dim=8,
    v_dim=16,
)


def encode(text: str) -> list[int]:
    return _TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> data.Corpus:
    """Six made-up works of the children tier and one that is held out."""
    rng = random.Random(1)
    lines = []
    for index in range(7):
        paragraphs = ["".join(recall.filler_sentence(rng) for _ in range(12)).strip() for _ in range(20)]
        title = "held out" if index == 6 else f"work {index}"
        lines.append(data_line(title, "\n\n".join(paragraphs)))
    path = tmp_path_factory.mktemp("corpus") / "stories.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    loaded = data.load(path, _TOKENIZER, seed=1)
    return replace(loaded, words=list(recall.ADJECTIVES + recall.NOUNS))  # six works have too few words of their own


def data_line(title: str, text: str) -> str:
    import json

    from training.corpus import is_held_out

    number = 0
    while is_held_out(title + str(number)) != (title == "held out"):
        number += 1
    return json.dumps({"title": title + str(number), "tier": "children", "text": text})


@pytest.fixture()
def writer(corpus) -> Writer:
    return data.make_writer(corpus, encode, "test")


def test_held_out_works_are_in_no_document(corpus):
    assert len(corpus.held_out) == 1
    trained = _TOKENIZER.decode(corpus.stories.tokens.tolist())
    assert corpus.held_out[0][:200] not in trained


@pytest.mark.parametrize("kind", [name for name, _ in Settings.draws])
def test_a_document_has_the_ids_of_its_own_text(writer, kind):
    for index in range(12):
        page = writer.document(kind, random.Random(index).choice([100, 256, 700]), index % 2 == 0)
        text = _TOKENIZER.decode(page.ids, skip_special_tokens=False)
        assert encode(text) == page.ids
        assert len(page.ids) == len(page.kinds)
        assert page.ids[0] == BEGIN_ID and page.ids.count(BEGIN_ID) == 1


@pytest.mark.parametrize("kind", ["haystack", "made_up", "dense", "chat"])
def test_every_answer_was_stated_before_it_was_asked(writer, kind):
    answers = 0
    for _ in range(12):
        page = writer.document(kind, 600, False)
        for begin, end in spans(page.kinds, recall.Kind.ANSWER):
            value = _TOKENIZER.decode(page.ids[begin : end - 1])
            assert value in _TOKENIZER.decode(page.ids[: begin - 3]), value
            answers += 1
    assert answers > 10


def spans(kinds: list[int], wanted: int) -> list[tuple[int, int]]:
    """Runs of one kind as (begin, end)."""
    borders = np.flatnonzero(np.diff([0, *(kind == wanted for kind in kinds), 0]))
    return list(zip(borders[::2], borders[1::2], strict=True))


def test_training_never_uses_a_held_out_key(corpus):
    for seed in range(60):
        source = FactSource(random.Random(seed), corpus.words, corpus.letter_strings)
        facts = [source.draw() for _ in range(40)]
        assert not any(recall.is_held_out(fact.key) for fact in facts)
        assert len({(fact.attribute, fact.key) for fact in facts}) == 40


def test_a_batch_is_filled_to_the_last_place(writer):
    settings = replace(Settings(), tokens_per_step=2048)
    ids, kinds = data.pack(writer, settings, 256, 8)
    assert ids.shape == kinds.shape == (8, 258)
    assert (ids[:, 0] == BEGIN_ID).all() and kinds.max() <= max(recall.Kind)


def test_log_uniform_stays_in_its_range():
    rng = random.Random(1)
    drawn = [log_uniform(rng, 2, 40) for _ in range(2000)]
    assert min(drawn) == 2 and max(drawn) == 40
    assert sum(value < 9 for value in drawn) > 700


def test_routing_by_counting_is_group_limited_top_k():
    torch.manual_seed(0)
    scores, bias = torch.rand(500, 8), torch.randn(8) * 0.1
    chosen = choose_experts(scores, bias, SMALL)
    for row, picked in zip(scores + bias, chosen, strict=True):
        groups = row.view(4, 2).sum(-1).topk(2).indices
        allowed = torch.zeros(8, dtype=torch.bool)
        for group in groups:
            allowed[2 * group : 2 * group + 2] = True
        best = row.masked_fill(~allowed, -1e9).topk(3).indices
        assert set(best.tolist()) == set(picked.nonzero()[:, 0].tolist())


@torch.no_grad()
def test_one_wide_swiglu_is_the_mixture_of_experts():
    torch.manual_seed(0)
    layer = ExpertLayer(SMALL, 1.0)
    x, mixed = torch.randn(40, 32), torch.randn(40, 32)
    got, load = expert_half(x, mixed, layer)
    x = x + mixed @ layer.attention.o.T
    h = rms_norm(x, layer.attention.post_norm, 1e-6)
    scores = (h @ layer.router.T).sigmoid()
    chosen = choose_experts(scores, layer.correction_bias, SMALL)
    wanted = x.clone()
    for token in range(40):
        total = scores[token][chosen[token]].sum()
        weights = {int(e): scores[token, e] / total * 2.5 for e in chosen[token].nonzero()[:, 0]} | {8: 1.0}
        for expert, weight in weights.items():
            gate, up, down = layer.gate[expert], layer.up[expert], layer.down[expert]
            hidden = torch.nn.functional.silu(gate @ h[token]) * (up @ h[token])
            wanted[token] += weight * (hidden @ down)
    assert torch.allclose(got, wanted, atol=1e-4)
    assert load.sum() == 40 * 3


def test_orthogonalised_matrices_have_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((3, 64, 32), (3, 32, 64), (1, 48, 48)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
        assert 0.3 < values.min() and values.max() < 1.4


def test_muon_treats_a_transposed_parameter_as_its_matrix():
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.randn(2, 64, 16))
    mirror = torch.nn.Parameter(matrix.detach().mT.clone())
    matrix.grad = torch.randn(2, 64, 16)
    mirror.grad = matrix.grad.mT.clone()
    Muon([matrix], set(), 0.95).step(0.1, 0.1)
    Muon([mirror], {mirror}, 0.95).step(0.1, 0.1)
    assert torch.allclose(matrix.mT, mirror, atol=2e-2)


def test_training_learns_a_sentence_and_the_export_names_every_tensor():
    torch.manual_seed(0)
    model = TinyModel(SMALL, Operations.make(compiled=False), torch.float32)
    ids = torch.tensor([encode("The code of silver pony is 48213. The boy went home and slept.")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        stream, loads = model.trunk(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(model.logits(stream, model.head.norm), ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1 and len(loads) == 1
    written = evaluate.continue_prompts(model, [ids[0, :6].tolist()], 5, evaluate.Sampling(), 1)
    assert written[0] == ids[0, 6:11].tolist()
    named = export.named_tensors(model)
    assert sum(tensor.numel() for tensor in named.values()) == sum(p.numel() for p in model.parameters()) + 2 * 8
    assert named["model.layers.2.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert torch.equal(named["model.layers.1.mlp.experts.3.down_proj.weight"], model.layers[1].down[3].T.bfloat16())
