"""PyTorch twin of the model in hyper_parallel/train/llama.h: same mathematics, same parameter names, same order of operations."""
import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Shape:
    dim: int = 512
    n_layers: int = 8
    n_heads: int = 8
    ffn_dim: int = 1376
    vocab_size: int = 16384
    seq_len: int = 128
    batch_size: int = 2  # sequences per rank and step
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.dim))
        self.eps = shape.norm_eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.n_heads = shape.n_heads
        self.q_proj = linear(shape.dim, shape.dim)
        self.k_proj = linear(shape.dim, shape.dim)
        self.v_proj = linear(shape.dim, shape.dim)
        self.o_proj = linear(shape.dim, shape.dim)

    def heads(self, x):
        batch, length, dim = x.shape
        return x.view(batch, length, self.n_heads, dim // self.n_heads).transpose(1, 2)

    def forward(self, x, cos, sin):
        q = rotate(self.heads(self.q_proj(x)), cos, sin)
        k = rotate(self.heads(self.k_proj(x)), cos, sin)
        v = self.heads(self.v_proj(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate_proj = linear(shape.dim, shape.ffn_dim)
        self.up_proj = linear(shape.dim, shape.ffn_dim)
        self.down_proj = linear(shape.ffn_dim, shape.dim)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape)
        self.mlp = MLP(shape)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = RMSNorm(shape)
        self.lm_head = linear(shape.dim, shape.vocab_size)
        head_dim = shape.dim // shape.n_heads
        frequency = torch.pow(shape.rope_theta, -torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(shape.seq_len, dtype=torch.float32), frequency)
        both = torch.cat((angle, angle), -1)
        self.cos, self.sin = both.cos(), both.sin()

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))

    @torch.no_grad()
    def reset_parameters(self, seed):
        generator = torch.Generator().manual_seed(seed)
        residual_std = 0.02 / math.sqrt(2.0 * len(self.layers))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, residual_std if residual else 0.02, generator=generator)


def next_token_loss(logits, targets):
    return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.view(-1))
