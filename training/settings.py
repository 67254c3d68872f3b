"""Every number of the training run, in two frozen records that go into the training log as they are."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The shipped model. Matrix sides are multiples of 16, and of 128 except the 160 rows of `kv_a_proj_with_mqa`."""

    vocab_size: int = 8192
    hidden_size: int = 256
    num_layers: int = 8
    num_dense_layers: int = 1
    intermediate_size: int = 768
    expert_size: int = 128
    num_experts: int = 16
    num_shared_experts: int = 1
    num_groups: int = 4
    groups_kept: int = 2
    experts_per_token: int = 4
    routed_scaling_factor: float = 2.5
    num_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    nope_dim: int = 32
    rope_dim: int = 32
    v_dim: int = 64
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6
    max_context: int = 4096

    @property
    def head_dim(self) -> int:
        """Width of one head's query and key; equal to `v_dim`, so that every fused attention takes it unpadded."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class Settings:
    """The run: times in seconds of measured training, shares of the planned time, weights of the loss."""

    seconds: float = 375.0
    mtp_seconds: float = 40.0
    seed: int = 20261129
    tokens_per_step: int = 98304
    lengths: tuple[int, ...] = (256, 1024, 4096)
    short_until: float = 0.07
    """Share of the time in which only the shortest length is trained."""
    medium_until: float = 0.21
    medium_mix: tuple[float, ...] = (0.2, 0.8, 0.0)
    long_mix: tuple[float, ...] = (0.1, 0.2, 0.7)

    muon_rate: float = 0.02
    muon_momentum: float = 0.95
    muon_decay: float = 0.08
    adam_rate: float = 3e-3
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_decay: float = 0.2
    warmup_steps: int = 80
    flat_until: float = 0.35
    final_rate: float = 0.02
    """Learning rates end at this share of their peak."""
    bias_rate: float = 2e-3
    """Step of the routers' correction bias; a quarter of it in the last fifth of the time."""

    loss_weights: tuple[float, ...] = (0.0, 0.0, 0.3, 1.0, 5.0)
    """By `headrace.evals.recall.Kind`: random content, filler, template, story, answer."""
    draws: tuple[tuple[str, float], ...] = (
        ("story", 0.46),
        ("haystack", 0.20),
        ("made_up", 0.06),
        ("dense", 0.16),
        ("chat", 0.05),
        ("copy", 0.05),
        ("count", 0.02),
    )
    eval_seconds: tuple[float, ...] = (40.0, 100.0, 200.0, 300.0)
    cases_per_length: int = 1536
    cases_between: int = 384

    def rate(self, step: int, progress: float) -> float:
        """Share of the peak learning rate at this step and share of the time."""
        if progress <= self.flat_until:
            return min(1.0, (step + 1) / self.warmup_steps)
        left = (1.0 - progress) / (1.0 - self.flat_until)
        return max(self.final_rate, self.final_rate + (1.0 - self.final_rate) * left)

    def length_mix(self, progress: float) -> tuple[float, ...]:
        """How often each of `lengths` is drawn at this share of the time."""
        if progress < self.short_until:
            return (1.0, 0.0, 0.0)
        return self.medium_mix if progress < self.medium_until else self.long_mix

    def bias_step(self, progress: float) -> float:
        return self.bias_rate * (1.0 if progress < 0.8 else 0.25)
