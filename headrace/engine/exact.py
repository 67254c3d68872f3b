"""Does exact mode hold on this host? Tried with the loaded model itself, in well under two seconds for a small one.

Matrix libraries choose kernels by shape, thread count and processor, so bit-equality is proved here and not assumed.
"""

from __future__ import annotations

import torch

from headrace.cache.latent import LatentPool
from headrace.engine.steps.replayed import RecordedSteps
from headrace.model.base import ForwardBatch, Model, Phase, Stepping
from kernels.attention.mla_decode import KEY_CHUNK

PROMPT_LEN = KEY_CHUNK + 11
BLOCK_SIZE = 16
SHORT_LENS = (
    1,
    5,
    35,
    KEY_CHUNK - 1,
)  # 35: two multiples of the 16 rows that torch's products are padded to, and three
DECODE_STEPS = 6


def exact_self_test(model: Model) -> str | None:
    """None when the same request gives the same bits alone, in a crowd and token by token; else one sentence."""
    if not model.exact:
        return "the model was not loaded in exact mode"
    trial = _Trial(model)
    expected = trial.prefill([PROMPT_LEN], seed=0)[0]
    crowd = trial.prefill([*SHORT_LENS, PROMPT_LEN - DECODE_STEPS], seed=1)
    for length, got in zip((*SHORT_LENS, PROMPT_LEN - DECODE_STEPS), crowd, strict=True):
        if not torch.equal(got, expected[:length]):
            return _sentence(f"prefill of {length} tokens in a batch of five")
    for step in range(DECODE_STEPS):
        got = trial.decode()
        if not torch.equal(got, expected[trial.lengths - 1]):
            return _sentence(f"decode step {step} of five requests")
    return None


def _sentence(what: str) -> str:
    return (
        f"exact mode is not available on this host: {what} differs in its bits from one prefill alone "
        f"({torch.get_num_threads()} threads, torch {torch.__version__})"
    )


class _Trial:
    """Prefixes of one random text, in a pool of their own."""

    def __init__(self, model: Model):
        self.model = model
        self.recorded = RecordedSteps(model) if model.stepping is Stepping.REPLAYED else None
        draw = torch.Generator().manual_seed(0)
        self.text = torch.randint(model.vocab_size, (PROMPT_LEN,), generator=draw).to(model.device)
        self.lengths = torch.empty(0, dtype=torch.int64)

    def prefill(self, lengths: list[int], *, seed: int) -> list[torch.Tensor]:
        """Logits of all positions of each prefix, packed in one batch over freshly shuffled blocks."""
        self.lengths = torch.tensor(lengths)
        per_sequence = -(-PROMPT_LEN // BLOCK_SIZE)
        shuffled = torch.randperm(len(lengths) * per_sequence, generator=torch.Generator().manual_seed(seed))
        self.tables = shuffled.view(len(lengths), per_sequence)
        (region,), device = self.model.kv_regions, self.model.device
        self.pool = LatentPool(region.num_layers, len(shuffled), BLOCK_SIZE, region.row_width, torch.float32, device)
        positions = torch.cat([torch.arange(length) for length in lengths])
        owners = torch.arange(len(lengths)).repeat_interleave(self.lengths)
        starts = [0, *self.lengths.cumsum(0).tolist()]
        return list(self._forward(positions, owners, starts, "prefill").split(lengths))

    def decode(self) -> torch.Tensor:
        """One more token of the text for every sequence."""
        positions, owners = self.lengths, torch.arange(len(self.lengths))
        self.lengths = self.lengths + 1
        return self._forward(positions, owners, list(range(len(owners) + 1)), "decode")

    def _forward(self, positions: torch.Tensor, owners: torch.Tensor, starts: list[int], phase: Phase) -> torch.Tensor:
        device = self.model.device
        slots = self.tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = ForwardBatch(
            token_ids=self.text[positions.to(device)],
            positions=positions.to(device),
            slots=slots.to(device),
            block_tables=self.tables.int().to(device),
            query_starts=starts,
            context_lens=self.lengths.tolist(),
            logit_indices=torch.arange(len(positions), device=device),
        )
        if phase == "decode" and self.recorded is not None:  # as the engine steps
            return self.recorded.logits(batch, self.pool)
        return self.model.forward(batch, self.pool, phase=phase)
