"""The training loops: trunk first, then the MTP layer on the frozen trunk."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headrace.evals.recall import Kind
from training.data import Workers
from training.model import NUM_KINDS, ExpertLayer, TinyModel
from training.muon import Muon
from training.settings import Settings

REPORT_EVERY = 100


@dataclass
class Optimizers:
    """Muon for the matrices, AdamW for embedding, vocabulary projection, routers and norm gains."""

    muon: Muon
    adam: torch.optim.AdamW
    settings: Settings

    @classmethod
    def make(cls, part: nn.Module, settings: Settings, skip: nn.Module | None = None) -> "Optimizers":
        left_out = set(skip.parameters()) if skip else set()
        named = [(name, p) for name, p in part.named_parameters() if p not in left_out]
        gains = [p for _, p in named if p.ndim == 1]
        by_adam = [p for name, p in named if p.ndim > 1 and name.split(".")[-1] in _BY_ADAM]
        matrices = [p for name, p in named if p.ndim > 1 and name.split(".")[-1] not in _BY_ADAM]
        transposed = {module.down for module in part.modules() if isinstance(module, ExpertLayer)}
        adam = torch.optim.AdamW(
            [{"params": by_adam, "weight_decay": settings.adam_decay}, {"params": gains, "weight_decay": 0.0}],
            lr=settings.adam_rate,
            betas=settings.adam_betas,
            fused=gains[0].is_cuda,
        )
        return cls(Muon(matrices, transposed, settings.muon_momentum), adam, settings)

    def step(self, share: float) -> None:
        """Update with `share` of the peak learning rates and drop the gradients."""
        self.muon.step(self.settings.muon_rate * share, self.settings.muon_decay)
        for group in self.adam.param_groups:
            group["lr"] = self.settings.adam_rate * share
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.muon.drop_gradients()


_BY_ADAM = ("embedding", "projection", "router")


@dataclass
class Curve:
    """Mean losses by kind, and throughput, every REPORT_EVERY steps; sums stay on the device in between."""

    device: torch.device
    points: list[dict] = field(default_factory=list)

    def __post_init__(self):
        self._reset()

    def _reset(self) -> None:
        self._sums = torch.zeros(2, NUM_KINDS, device=self.device)
        self._since, self._steps, self._tokens = time.monotonic(), 0, 0

    def add(self, sums: Tensor, tokens: int) -> None:
        self._sums += sums
        self._steps += 1
        self._tokens += tokens

    def report(self, step: int, seconds: float, **more: object) -> None:
        """Write a point and print it; waits for the device."""
        nats, counts = self._sums.tolist()
        means = {kind.name.lower(): round(nats[kind] / max(1.0, counts[kind]), 4) for kind in Kind}
        speed = self._tokens / (time.monotonic() - self._since)
        self.points.append({"step": step, "seconds": round(seconds, 1), "nats": means, **more})
        print(f"step {step} {seconds:.0f} s {speed / 1e6:.2f} M tokens/s {means} {more}", flush=True)
        self._reset()


@dataclass
class Trainer:
    """Runs both phases.

    evaluate  called between steps with (trained seconds); its time is not counted as training
    """

    model: TinyModel
    workers: Workers
    settings: Settings
    planned_seconds: float
    evaluate: Callable[[float], None]

    def __post_init__(self):
        self._device = self.model.embedding.device
        self._kind_weights = torch.tensor(self.settings.loss_weights, device=self._device)
        self._rng = random.Random(self.settings.seed)
        self._expert_layers = [layer for layer in self.model.layers if isinstance(layer, ExpertLayer)]
        self.curve = Curve(self._device)
        self.steps = 0

    def batch(self, progress: float) -> tuple[Tensor, Tensor]:
        """The next batch on the device: ids and kinds [rows, length + 2] int64."""
        mix = self.settings.length_mix(progress)
        self.workers.aim(mix)
        ids, kinds = self.workers.take(self._rng.choices(range(len(mix)), mix)[0])
        return self._to_device(ids), self._to_device(kinds)

    def _to_device(self, array) -> Tensor:
        tensor = torch.from_numpy(array.astype("int64"))
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor

    def warm_up(self) -> None:
        """Compile and plan every length once, before the clock starts; leaves weights and gradients untouched."""
        for length in self.settings.lengths:
            shape = (self.settings.tokens_per_step // length, length + 2)
            ids = torch.randint(8, self.model.shape.vocab_size, shape, device=self._device)
            self._trunk_loss(ids, torch.full(shape, int(Kind.STORY), device=self._device))[0].backward()
        self.model.zero_grad(set_to_none=True)

    def _trunk_loss(self, ids: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        model = self.model
        stream, loads = model.trunk(ids[:, :-2])
        targets, target_kinds = ids[:, 1:-1].flatten(), kinds[:, 1:-1].flatten()
        loss, sums = model.operations.head_loss(
            stream, model.head, model.projection, targets, target_kinds, self._kind_weights
        )
        return loss, sums, loads

    def train_trunk(self) -> None:
        """Steps until the planned time is used."""
        optimizers = Optimizers.make(self.model, self.settings, skip=self.model.mtp)
        evals = [moment for moment in self.settings.eval_seconds if moment < 0.95 * self.planned_seconds]
        pace = Pace(self._device)
        while pace.seconds < self.planned_seconds:
            progress = pace.seconds / self.planned_seconds
            ids, kinds = self.batch(progress)
            loss, sums, loads = self._trunk_loss(ids, kinds)
            loss.backward()
            rate = self.settings.rate(self.steps, progress)
            optimizers.step(rate)
            self._balance(self._expert_layers, loads, self.settings.bias_step(progress))
            self.curve.add(sums, self.settings.tokens_per_step)
            self.steps += 1
            pace.tick()
            if self.steps % REPORT_EVERY == 0:
                self.curve.report(self.steps, pace.seconds, rate=round(rate, 4), busiest_expert=_busiest(loads))
            if evals and pace.seconds >= evals[0]:
                evals.pop(0)
                self.evaluate(pace.seconds)
                pace.resume()
        self.trained_seconds = pace.stop()

    @torch.no_grad()
    def _balance(self, layers: list[ExpertLayer], loads: list[Tensor], step: float) -> None:
        """Push each router's correction bias towards the experts that got fewer tokens than the mean."""
        for layer, load in zip(layers, loads, strict=True):
            load = load.float()
            layer.correction_bias += step * torch.sign(load.mean() - load)

    def train_mtp(self, seconds: float) -> dict:
        """Train the MTP layer on the frozen trunk; its learning rate falls linearly. Returns steps and last losses."""
        model, settings = self.model, self.settings
        projection = model.projection.detach()
        optimizers = Optimizers.make(model.mtp, settings)
        curve, pace, steps = Curve(self._device), Pace(self._device), 0
        while pace.seconds < seconds:
            progress = pace.seconds / seconds
            ids, kinds = self.batch(1.0)
            with torch.no_grad():
                hidden, _ = model.trunk(ids[:, :-2])
            stream, load = model.draft(hidden, ids[:, 1:-1])
            loss, sums = model.operations.head_loss(
                stream,
                model.mtp.head,
                projection,
                ids[:, 2:].flatten(),
                kinds[:, 2:].flatten(),
                self._kind_weights,
            )
            loss.backward()
            warm = min(1.0, (steps + 1) / settings.warmup_steps)
            optimizers.step(warm * max(settings.final_rate, 1.0 - progress))
            self._balance([model.mtp.layer], [load], settings.bias_step(progress))
            curve.add(sums, settings.tokens_per_step)
            steps += 1
            pace.tick()
            if steps % REPORT_EVERY == 0:
                curve.report(steps, pace.seconds)
        return {"steps": steps, "seconds": round(pace.stop(), 1), "curve": curve.points}

    @torch.no_grad()
    def draft_agreement(self) -> dict[str, float]:
        """How often the MTP layer's greedy draft is the trunk's greedy choice, by kind of the token drafted."""
        ids, kinds = self.batch(1.0)
        hidden, _ = self.model.trunk(ids[:, :-2])
        stream, _ = self.model.draft(hidden, ids[:, 1:-1])
        rows = ids.shape[0]
        drafted = self._greedy(stream, self.model.mtp.head.norm).view(rows, -1)[:, :-1]
        chosen = self._greedy(hidden, self.model.head.norm).view(rows, -1)[:, 1:]
        drafted_kinds = kinds[:, 2:-1]
        same = drafted == chosen
        return {kind.name.lower(): round(float(same[drafted_kinds == kind].float().mean()), 4) for kind in Kind}

    def _greedy(self, stream: Tensor, norm: Tensor) -> Tensor:
        return torch.cat([self.model.logits(part, norm).argmax(-1) for part in stream.split(16384)])


def _busiest(loads: list[Tensor]) -> float:
    """Largest share of any expert over the mean, over all layers."""
    return round(max(float(load.max() / load.float().mean()) for load in loads), 2)


class Pace:
    """Counts training seconds; stays at most two steps ahead of the device."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._events: list = []
        self.seconds = 0.0
        self.resume()

    def resume(self) -> None:
        """Leave out the time since the last tick."""
        if self._is_cuda:
            torch.cuda.synchronize()
        self._last = time.monotonic()

    def tick(self) -> None:
        """One step was submitted."""
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._events.append(event)
            if len(self._events) > 2:
                self._events.pop(0).synchronize()
        now = time.monotonic()
        self.seconds += now - self._last
        self._last = now

    def stop(self) -> float:
        """Wait for the device; all seconds counted."""
        if self._is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.monotonic() - self._last
        return self.seconds
