"""Train a tiny real target and its DFlash drafter: `python benchmarks/tiny_model.py OUT`.

A byte-level Qwen3-shaped target of about 4 million parameters on text that every machine has
(Python's own sources, licences and the Zen of Python), and a 2-layer block drafter on the target's
hidden states. Seeded; about a minute each on one GPU. Writes OUT/target and OUT/draft as
SGLang loads them. The model is small enough to train in a test and real enough that drafts are
accepted and that garbled text is visible to the eye.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import json
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

BYTES, MASK, VOCAB = 256, 256, 320  # ids 257 and up are padding of the output head
DRAFT_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the target; the drafter has the same width."""

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 768
    context: int = 2048
    taps: tuple[int, ...] = (1, 2)  # target layers whose hidden states the drafter sees


def zen() -> str:
    """The Zen of Python: the poem that the demonstration prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13")


def corpus(limit: int = 3_000_000) -> Any:
    """Training bytes, int64: standard library sources, with the poem strewn in."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    poem = zen().encode()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/[a-z]*.py")):
        text = path.read_bytes()[:60_000]
        parts += [text, poem, poem]
        size += len(text)
        if size > limit:
            break
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8).long()


class Norm(nn.Module):
    """RMS norm over the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Any) -> Any:
        """Normalize and scale."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, 1e-6).to(x.dtype)


def rope(x: Any, positions: Any) -> Any:
    """Rotary embedding in the half-split layout. x: (B, heads, T, D); positions: (B, T)."""
    half = x.shape[-1] // 2
    speed = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = positions[:, None, :, None].float() * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Grouped-query attention with normalized heads, as in Qwen3."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(s.head_dim), Norm(s.head_dim)

    def keys(self, x: Any, positions: Any) -> tuple[Any, Any]:
        """Rotated keys and values, (B, kv heads, T, D)."""
        split = (*x.shape[:2], self.s.kv_heads, self.s.head_dim)
        k = self.k_norm(self.k_proj(x).view(split)).transpose(1, 2)
        return rope(k, positions), self.v_proj(x).view(split).transpose(1, 2)

    def forward(self, x: Any, positions: Any, k: Any, v: Any, mask: Any = None) -> Any:
        """Attend from x to the given keys; without a mask causally."""
        split = (*x.shape[:2], self.s.heads, self.s.head_dim)
        q = rope(self.q_norm(self.q_proj(x).view(split)).transpose(1, 2), positions)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.ffn, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.ffn, bias=False)
        self.down_proj = nn.Linear(s.ffn, s.hidden, bias=False)

    def forward(self, x: Any) -> Any:
        """Feed forward."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(s), Mlp(s)
        self.input_layernorm, self.post_attention_layernorm = Norm(s.hidden), Norm(s.hidden)


class Target(nn.Module):
    """The model to be served."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.embed_tokens = nn.Embedding(VOCAB, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.hidden)
        self.lm_head = nn.Linear(s.hidden, VOCAB, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)

    def forward(self, tokens: Any) -> tuple[Any, Any]:
        """Logits, and the hidden states after the tapped layers side by side."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x, taps = self.embed_tokens(tokens), []
        for i, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            x = x + layer.self_attn(normed, positions, *layer.self_attn.keys(normed, positions))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if i in self.s.taps:
                taps.append(x)
        return self.lm_head(self.norm(x)), torch.cat(taps, -1)


class Drafter(nn.Module):
    """Predicts the rest of a block in one pass, given the target's hidden states before it."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(s) for _ in range(DRAFT_LAYERS))
        self.fc = nn.Linear(len(s.taps) * s.hidden, s.hidden, bias=False)
        self.hidden_norm, self.norm = Norm(s.hidden), Norm(s.hidden)

    def forward(self, taps: Any, blocks: Any, starts: Any) -> Any:
        """taps: (B, T, k*H); blocks: (B, M, b, H) embeddings; starts: (B, M). Hidden rows."""
        batch, count, size, width = blocks.shape
        context = self.hidden_norm(self.fc(taps))
        device, length = taps.device, taps.shape[1]
        before = torch.arange(length, device=device).expand(batch, length)
        positions = (starts[..., None] + torch.arange(size, device=device)).flatten(1)
        own = torch.arange(count, device=device).repeat_interleave(size)
        sees = before[:, None, :] < starts.repeat_interleave(size, 1)[..., None]
        block = (own[:, None] == own[None, :]).expand(batch, -1, -1)
        mask = torch.cat([sees, block], -1)[:, None]
        x = blocks.reshape(batch, count * size, width)
        for layer in self.layers:
            k, v = layer.self_attn.keys(context, before)
            normed = layer.input_layernorm(x)
            own_k, own_v = layer.self_attn.keys(normed, positions)
            k, v = torch.cat([k, own_k], 2), torch.cat([v, own_v], 2)
            x = x + layer.self_attn(normed, positions, k, v, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).view(batch, count, size, width)


def pieces(text: Any, count: int, length: int, rng: Any) -> Any:
    """Random pieces of the text, (count, length)."""
    at = torch.randint(0, len(text) - length - 1, (count,), generator=rng, device=text.device)
    return text[at[:, None] + torch.arange(length, device=text.device)]


def fit(model: nn.Module, steps: int, loss_of: Any, label: str, rate: float = 2e-3) -> None:
    """Train with AdamW, a warm-up and a cosine; prints a line now and then."""
    opt = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    plan = torch.optim.lr_scheduler.OneCycleLR(opt, rate, total_steps=steps, pct_start=0.1)
    begun = time.monotonic()
    for step in range(steps):
        loss = loss_of()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        plan.step()
        if step % max(1, steps // 8) == 0 or step == steps - 1:
            seconds = time.monotonic() - begun
            print(f"{label} step {step} loss {loss.item():.3f} ({seconds:.0f} s)", flush=True)


def train_target(text: Any, shape: Shape, steps: int, seed: int = 0) -> Target:
    """A target trained on the text, in float32 with bfloat16 products."""
    torch.manual_seed(seed)
    rng = torch.Generator(text.device).manual_seed(seed)
    model = Target(shape).to(text.device)

    def loss() -> Any:
        tokens = pieces(text, 64, 257, rng)
        with torch.autocast(text.device.type, torch.bfloat16):
            logits, _ = model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    fit(model, steps, loss, "target")
    return model.eval()


def train_drafter(text: Any, target: Target, steps: int, seed: int = 1) -> Drafter:
    """A drafter of blocks of 8 and 16 for the target."""
    torch.manual_seed(seed)
    rng = torch.Generator(text.device).manual_seed(seed)
    model = Drafter(target.s).to(text.device)
    length, count, turn = 256, 12, [8, 16]

    def loss() -> Any:
        turn.reverse()
        size = turn[0]
        tokens = pieces(text, 48, length, rng)
        starts = torch.randint(4, length - size, (48, count), generator=rng, device=text.device)
        at = starts[..., None] + torch.arange(size, device=text.device)
        real = tokens.gather(1, at.flatten(1)).view(at.shape)
        seen = torch.full_like(real, MASK)
        seen[..., 0] = real[..., 0]
        with torch.autocast(text.device.type, torch.bfloat16):
            with torch.no_grad():
                _, taps = target(tokens)
                blocks = target.embed_tokens(seen)
            hidden = model(taps, blocks, starts)[:, :, 1:]
            logits = F.linear(hidden, target.lm_head.weight.detach())
        each = F.cross_entropy(
            logits.float().flatten(0, 2), real[..., 1:].flatten(), reduction="none"
        ).view(-1, size - 1)
        weight = torch.exp(-torch.arange(size - 1, device=text.device) / 6)
        return (each * weight).sum(1).mean() / weight.sum()

    fit(model, steps, loss, "drafter", 1.5e-3)
    return model.eval()


def config(shape: Shape, layers: int, **more: Any) -> dict[str, Any]:
    """A Qwen3 config.json."""
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": VOCAB,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }


def export(target: Target, drafter: Drafter, out: Path, block: int = 8) -> None:
    """Write OUT/target and OUT/draft in bfloat16."""
    s = target.s
    prefixed = {
        (name if name.startswith("lm_head") else f"model.{name}"): value
        for name, value in target.state_dict().items()
    }
    draft = {
        "architectures": ["DFlashDraftModel"],
        "block_size": block,
        "num_target_layers": s.layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(s.taps)},
    }
    _write(out / "target", prefixed, config(s, s.layers, architectures=["Qwen3ForCausalLM"]))
    _write(out / "draft", drafter.state_dict(), config(s, DRAFT_LAYERS, **draft))


def _write(folder: Path, weights: dict[str, Any], settings: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.to(torch.bfloat16).cpu().contiguous() for name, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(settings, indent=1))


def main() -> None:
    """Train and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    text = corpus().to(args.device)
    torch.set_float32_matmul_precision("high")
    shape = Shape()
    target = train_target(text, shape, args.steps)
    drafter = train_drafter(text, target, args.steps)
    export(target, drafter, args.out)
    size = sum(p.numel() for p in target.parameters())
    print(json.dumps({"parameters": size, "bytes": len(text), **asdict(shape)}))


if __name__ == "__main__":
    main()
