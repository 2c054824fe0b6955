"""The quantised model's definition, evaluated one token and one window at a time in numpy float64 (model.md 2 - 5).

It shares no code with the package: number formats, rotation, compressor, indexer, attention and experts are written afresh,
and slowly, so that a misread rounding or a wrong index in the package cannot hide here too.

    log_probs = DefinedModel(folder).log_probs(prompt)
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

Array = np.ndarray

E4M3 = np.array([c * 2.0**-9 if c < 8 else (1 + c % 8 / 8) * 2.0 ** (c // 8 - 7) for c in range(127)])  # 0 .. 448 by code
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class Roundings:
    """What is rounded besides the values between layers."""

    activations: bool = True
    """FP8 before FP8 linear layers and experts."""
    pooled: bool = True
    """bfloat16 after a compressor's pooling and after its norm."""
    kv: str = "fp8"
    """"fp8" or "rows" (bfloat16)."""
    indexer: str = "fp8"
    """"fp8", "mxfp4" or "rows"."""


def bf16(x: Array) -> Array:
    return torch.from_numpy(np.ascontiguousarray(x, np.float64)).bfloat16().double().numpy()


def f32(x: Array) -> Array:
    return np.asarray(x).astype(np.float32).astype(np.float64)


def to_grid(x: Array, grid: Array) -> Array:
    """Nearest of ±grid; of two equally near, the one with the even code."""
    high = np.searchsorted(grid, np.abs(x)).clip(1, len(grid) - 1)
    below, above = np.abs(x) - grid[high - 1], grid[high] - np.abs(x)
    code = high - ((below < above) | ((below == above) & (high % 2 == 1)))
    return np.copysign(grid[code], x)


def quantize(x: Array, group: int, grid: Array, floor: float) -> Array:
    """Round trip through ``grid`` with a power-of-two scale for each ``group`` values (model.md 5.1, 5.3)."""
    groups, largest = x.reshape(*x.shape[:-1], -1, group), np.float32(grid[-1])
    amax = np.maximum(np.abs(groups).max(-1, keepdims=True), floor).astype(np.float32)
    mantissa, exponent = np.frexp(amax * np.float32(1 / largest))
    scale = 2.0 ** np.where(mantissa == 0.5, exponent - 1, exponent)
    return (to_grid((groups / scale).clip(-largest, largest), grid) * scale).reshape(x.shape)


def fp8(x: Array, group: int) -> Array:
    return quantize(x, group, E4M3, 1e-4)


def fp4(x: Array) -> Array:
    return quantize(x, 32, E2M1, 6 * 2.0**-126)


def sylvester(size: int) -> Array:
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h / math.sqrt(size)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class DefinedModel:
    def __init__(self, folder: str | Path, roundings: Roundings | None = None):
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.roundings = roundings or Roundings()
        self._stored: dict[str, torch.Tensor] = {}
        self._weights: dict[str, Array] = {}
        for path in Path(folder).glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                self._stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict

    def log_probs(self, token_ids: list[int]) -> Array:
        """[T, V], of what follows each token."""
        streams = np.repeat(self.weight("embed")[token_ids][:, None], self.config["hc_mult"], 1)
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            x, merge = self.enter(f"{prefix}hc_attn", streams)
            streams = self.leave(self.attention(layer, self.norm(f"{prefix}attn_norm", x)), streams, merge)
            x, merge = self.enter(f"{prefix}hc_ffn", streams)
            x = self.norm(f"{prefix}ffn_norm", x)
            streams = self.leave(np.stack([self.moe(layer, row, t) for row, t in zip(x, token_ids, strict=True)]), streams, merge)
        logits = self.norm("norm", np.stack([self.merge_head(s) for s in streams])) @ self.weight("head").T
        logits -= logits.max(1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    # Weights (model.md 2.1, 2.2)

    def tensor(self, name: str) -> Array:
        return self._stored[name].double().numpy()

    def weight(self, name: str) -> Array:
        if name not in self._weights:
            self._weights[name] = self._widen(self._stored[f"{name}.weight"], self._stored.get(f"{name}.scale"))
        return self._weights[name]

    @staticmethod
    def _widen(weight: torch.Tensor, scale: torch.Tensor | None) -> Array:
        if scale is None:
            return weight.double().numpy()
        is_e8m0 = scale.dtype == torch.float8_e8m0fnu
        factor = 2.0 ** (scale.view(torch.uint8).double().numpy() - 127) if is_e8m0 else scale.double().numpy()
        if weight.dtype != torch.int8:
            return weight.double().numpy() * np.kron(factor, np.ones((128, 128)))
        byte = weight.view(torch.uint8).numpy()
        code = np.stack((byte % 16, byte // 16), -1).reshape(len(byte), -1)
        return np.where(code >= 8, -1, 1) * E2M1[code % 8] * np.repeat(factor, 32, 1)

    def linear(self, name: str, x: Array) -> Array:
        if f"{name}.scale" in self._stored and self.roundings.activations:
            x = fp8(x, 128)
        return bf16(x @ self.weight(name).T)

    def norm(self, name: str, x: Array) -> Array:
        return bf16(self.normalize(x) * self.tensor(f"{name}.weight"))

    def normalize(self, x: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])

    # Hyper-connections (model.md 3.2)

    def mixing(self, name: str, streams: Array) -> tuple[Array, Array, Array]:
        return self.tensor(f"{name}_fn") @ self.normalize(streams.reshape(-1)), self.tensor(f"{name}_scale"), self.tensor(f"{name}_base")

    def enter(self, name: str, streams: Array) -> tuple[Array, list[tuple[Array, Array]]]:
        rows = [self.enter_token(name, s) for s in streams]
        return np.stack([x for x, _, _ in rows]), [(post, comb) for _, post, comb in rows]

    def enter_token(self, name: str, streams: Array) -> tuple[Array, Array, Array]:
        m, eps = self.config["hc_mult"], self.config["hc_eps"]
        u, scale, base = self.mixing(name, streams)
        pre = sigmoid(scale[0] * u[:m] + base[:m]) + eps
        post = 2 * sigmoid(scale[1] * u[m : 2 * m] + base[m : 2 * m])
        comb = (scale[2] * u[2 * m :] + base[2 * m :]).reshape(m, m)
        comb = np.exp(comb) / np.exp(comb).sum(1, keepdims=True) + eps
        comb = comb / (comb.sum(0, keepdims=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(1, keepdims=True) + eps)
            comb = comb / (comb.sum(0, keepdims=True) + eps)
        return bf16(sum(pre[j] * streams[j] for j in range(m))), f32(post), f32(comb)

    @staticmethod
    def leave(out: Array, streams: Array, merge: list[tuple[Array, Array]]) -> Array:
        result = np.empty_like(streams)
        for t, (post, comb) in enumerate(merge):
            for j in range(len(post)):
                result[t, j] = post[j] * out[t] + sum(comb[i, j] * streams[t, i] for i in range(len(post)))
        return bf16(result)

    def merge_head(self, streams: Array) -> Array:
        u, scale, base = self.mixing("hc_head", streams)
        pre = sigmoid(scale[0] * u + base) + self.config["hc_eps"]
        return bf16(sum(pre[j] * streams[j] for j in range(len(pre))))

    # Rotation (model.md 3.3)

    def rotate(self, x: Array, position: int, ratio: int, inverse: bool = False) -> Array:
        # Frequencies and angles are float32 by definition; torch's functions, since numpy's differ in the last bit.
        angle = torch.tensor(float(position)) * self.frequencies(ratio)
        cos, sin = angle.cos().double().numpy(), angle.sin().double().numpy() * (-1 if inverse else 1)
        out = x.copy()
        first = x.shape[-1] - 2 * len(cos)
        even, odd = x[..., first::2], x[..., first + 1 :: 2]
        out[..., first::2], out[..., first + 1 :: 2] = even * cos - odd * sin, odd * cos + even * sin
        return out

    def frequencies(self, ratio: int) -> torch.Tensor:
        dim, theta = self.config["qk_rope_head_dim"], float(self.config["compress_rope_theta" if ratio else "rope_theta"])
        plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        if not ratio:
            return plain
        yarn = self.config["rope_scaling"]

        def corner(turns: float) -> float:
            return dim * math.log(yarn["original_max_position_embeddings"] / (2 * math.pi * turns)) / (2 * math.log(theta))

        low, high = max(math.floor(corner(yarn["beta_fast"])), 0), min(math.ceil(corner(yarn["beta_slow"])), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return plain / yarn["factor"] * ramp + plain * (1 - ramp)

    # Attention (model.md 3.4 - 3.7)

    def cached_kv(self, x: Array) -> Array:
        x = bf16(x)
        nope = self.config["head_dim"] - self.config["qk_rope_head_dim"]
        return np.concatenate((fp8(x[:nope], 64), x[nope:])) if self.roundings.kv == "fp8" else x

    def cached_index(self, x: Array) -> Array:
        x = bf16(x)
        if self.roundings.indexer == "mxfp4":
            return fp4(bf16(x @ sylvester(x.shape[-1])))
        return fp8(x, x.shape[-1]) if self.roundings.indexer == "fp8" else x

    def compress(self, name: str, x: Array, ratio: int, size: int) -> list[Array]:
        """Unquantised entries of all complete windows."""
        kv, gate, ape = f32(x @ self.weight(f"{name}.wkv").T), f32(x @ self.weight(f"{name}.wgate").T), self.tensor(f"{name}.ape")
        gate = f32(np.stack([gate[t] + ape[t % ratio] for t in range(len(x))]))
        entries = []
        for start in range(0, len(x) // ratio * ratio, ratio):
            own = slice(-size, None)  # at ratio 4 the second half, at ratio 128 everything
            slots = [(t, own) for t in range(start, start + ratio)]
            if ratio == 4:
                slots += [(t, slice(size)) for t in range(start - ratio, start) if t >= 0]
            values, gates = (np.stack([part[t, half] for t, half in slots]) for part in (kv, gate))
            share = np.exp(gates - gates.max(0))
            entries.append(self.rotate(self.norm_pooled(f"{name}.norm", f32((share * values).sum(0) / share.sum(0))), start, ratio))
        return entries

    def norm_pooled(self, name: str, x: Array) -> Array:
        return self.norm(name, bf16(x)) if self.roundings.pooled else self.normalize(x) * self.tensor(f"{name}.weight")

    def attention(self, layer: int, x: Array) -> Array:
        config, prefix, ratio = self.config, f"layers.{layer}.attn", self.config["compress_ratios"][layer]
        heads, size, window = config["num_attention_heads"], config["head_dim"], config["sliding_window"]
        qr = self.norm(f"{prefix}.q_norm", self.linear(f"{prefix}.wq_a", x))
        q = self.linear(f"{prefix}.wq_b", qr).reshape(-1, heads, size)
        kv = self.norm(f"{prefix}.kv_norm", self.linear(f"{prefix}.wkv", x))
        kv = [self.cached_kv(self.rotate(row, t, ratio)) for t, row in enumerate(kv)]
        entries = [self.cached_kv(entry) for entry in self.compress(f"{prefix}.compressor", x, ratio, size)] if ratio else []
        chosen = self.choose(f"{prefix}.indexer", x, qr) if ratio == 4 else None
        out = []
        for t in range(len(x)):
            seen = range((t + 1) // ratio) if ratio else []
            keys = kv[max(0, t - window + 1) : t + 1] + [entries[w] for w in (chosen[t] if chosen else seen)]
            query = bf16(self.rotate(self.normalize(q[t]), t, ratio))
            mean = bf16(self.average(query, np.stack(keys), self.tensor(f"{prefix}.attn_sink")))
            out.append(self.project(prefix, bf16(self.rotate(mean, t, ratio, inverse=True))))
        return np.stack(out)

    @staticmethod
    def average(query: Array, keys: Array, sink: Array) -> Array:
        scores = query @ keys.T / math.sqrt(keys.shape[1])
        share = np.exp(scores)
        return share @ keys / (share.sum(1) + np.exp(sink))[:, None]

    def project(self, prefix: str, heads: Array) -> Array:
        groups = heads.reshape(self.config["o_groups"], -1)
        wo_a = bf16(self.weight(f"{prefix}.wo_a")).reshape(len(groups), -1, groups.shape[1])
        hidden = np.concatenate([matrix @ group for matrix, group in zip(wo_a, groups, strict=True)])
        return self.linear(f"{prefix}.wo_b", bf16(hidden))

    def choose(self, name: str, x: Array, qr: Array) -> list[list[int]]:
        """Entries that each token attends to."""
        heads, size, topk = (self.config[f"index_{key}"] for key in ("n_heads", "head_dim", "topk"))
        keys = [self.cached_index(entry) for entry in self.compress(f"{name}.compressor", x, 4, size)]
        queries = self.linear(f"{name}.wq_b", qr).reshape(-1, heads, size)
        weights = self.linear(f"{name}.weights_proj", x) / math.sqrt(size * heads)
        chosen = []
        for t in range(len(x)):
            query = self.cached_index(self.rotate(queries[t], t, 4))
            scores = [weights[t] @ np.maximum(query @ keys[w], 0) for w in range((t + 1) // 4)]
            chosen.append(sorted(range(len(scores)), key=lambda w, scores=scores: -scores[w])[:topk])
        return chosen

    # Experts (model.md 4)

    def moe(self, layer: int, x: Array, token_id: int) -> Array:
        prefix = f"layers.{layer}.ffn"
        logits = f32(self.weight(f"{prefix}.gate") @ x)
        scores = np.sqrt(np.log1p(np.exp(logits)))
        if layer < self.config["num_hash_layers"]:
            experts = self._stored[f"{prefix}.gate.tid2eid"][token_id].tolist()
        else:
            biased = scores + self.tensor(f"{prefix}.gate.bias")
            experts = sorted(range(len(biased)), key=lambda e: -biased[e])[: self.config["num_experts_per_tok"]]
        weights = f32(scores[experts] / scores[experts].sum() * self.config["routed_scaling_factor"])
        routed = [self.expert(f"{prefix}.experts.{e}", x, w) for e, w in zip(experts, weights, strict=True)]
        return bf16(sum(routed) + self.expert(f"{prefix}.shared_experts", x, 1.0))

    def expert(self, name: str, x: Array, weight: float) -> Array:
        limit = self.config["swiglu_limit"]
        gate = np.minimum(self.linear(f"{name}.w1", x), limit)
        up = self.linear(f"{name}.w3", x).clip(-limit, limit)
        return self.linear(f"{name}.w2", bf16(gate * sigmoid(gate) * up * weight))
