"""Plain torch for the kernels that Qwen4-Exp calls directly and that exist for GPUs only.

gated delta rule     S_t = exp(g_t) S_{t-1};  S_t += (v_t - S_t k_t) beta_t k_t^T;  o_t = S_t q_t / sqrt(K)
                     with q and k normalized; Yang et al. 2024, arXiv:2412.06464, equation 10
causal convolution   one filter per channel over the last W inputs, then SiLU

SGLang's other Triton kernels would run in Triton's interpreter, some seconds for a hundred tokens; the ones that
Qwen4-Exp calls in every layer have a reference here too.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from q38.base.settings import sglang_platform
from q38.sglang_ext.cpu import PLATFORM
from q38.sglang_ext.hooks import Hook, apply, exit_on_refusal

_GDN = "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel"
_BACKEND = "sglang.srt.layers.attention.linear.gdn_backend."
_HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend."
_OPS = "sglang.kernels.ops."
_CHUNK = 64  # tokens between two states that a prefill hands to the prefix cache, as in SGLang's kernels


def install() -> None:
    """Entry point `sglang.srt.plugins`: the references, where this platform is the one chosen."""
    if sglang_platform() == PLATFORM:
        with exit_on_refusal():
            _install()


def _install() -> None:
    from sglang.srt.layers.attention.qsa.qsa_indexer import QSAIndexer

    QSAIndexer.forward_native = QSAIndexer._forward_impl
    exact_bf16_dot()
    apply(
        [
            Hook(_GDN + ".extend", "around", delta_rule_extend),
            Hook(_GDN + ".decode", "around", delta_rule_decode),
            Hook(_GDN + ".supports_packed_decode", "set", False),
            Hook(_BACKEND + "causal_conv1d_fn", "around", conv_extend),
            Hook(_BACKEND + "causal_conv1d_update", "around", conv_decode),
            Hook(_BACKEND + "fused_gdn_gating", "around", gdn_gating),
            Hook(
                _OPS + "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous",
                "around",
                split_projections,
            ),
            Hook(_OPS + "attention.fla.layernorm_gated.layernorm_fn", "around", gated_norm),
            Hook(_OPS + "elementwise.elementwise.fused_gate_sigmoid_mul_add", "around", add_gated),
            Hook(_HYBRID + "track_mamba_states_all_layers", "around", keep_states),
        ]
    )


def delta_rule_extend(
    _original: Callable[..., Any],
    _self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Prefill. q, k [1, T, heads, K]; v [1, T, value heads, V]; g, beta [1, T, value heads]; states [slots, ...].

    Returns:
        the output; None; [1, N, value heads, V, K], the state before each chunk of each sequence, one after the other.
    """
    chunks: list[torch.Tensor] = []
    out = _delta_rule(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, chunks)
    return out, None, torch.stack(chunks)[None] if chunks else ssm_states[None, :0]


def delta_rule_decode(
    _original: Callable[..., Any],
    _self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_kwargs: Any,
) -> torch.Tensor:
    """One token a sequence; g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)."""
    g, beta = gdn_gating(_original, A_log, a, b, dt_bias)
    return _delta_rule(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc)


def keep_states(
    _original: Callable[..., Any],
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mask: torch.Tensor,
    kept: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Decode: copy the states of the masked sequences to their slots `kept`. States are [layers, slots, ...]."""
    rows = mask[:batch_size].bool()
    source, target = cache_indices[:batch_size][rows].long(), kept[:batch_size][rows].long()
    for states in (conv_states, ssm_states):
        states[:, target] = states[:, source]


def gdn_gating(
    _original: Callable[..., Any],
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b): a, b [T, heads] -> float32 [1, T, heads]."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g[None], b.float().sigmoid()[None]


def split_projections(
    _original: Callable[..., Any],
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, ...]:
    """[T, q | k | v | z] and [T, b | a] -> q | k | v [T, ...], z [T, heads, V], b and a [T, heads]."""
    value = num_heads_v * head_v
    qkv, z = torch.split(mixed_qkvz, [2 * num_heads_qk * head_qk + value, value], dim=-1)
    b, a = mixed_ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_heads_v, head_v).contiguous(), b.contiguous(), a.contiguous()


def gated_norm(
    _original: Callable[..., Any],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """RMS norm of x [..., N] over the last axis, times the activation of the gate z."""
    if not (is_rms_norm and norm_before_gate and bias is None and group_size in (None, x.shape[-1])):
        raise ValueError("only RMS norm of whole rows before the gate, without bias, has a CPU reference")
    wide = x.float()
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    if z is not None:
        gate = z.float().reshape(out.shape)
        out = out * (gate.sigmoid() if activation == "sigmoid" else F.silu(gate))
    return out.to(x.dtype)


def add_gated(
    _original: Callable[..., Any],
    hidden: torch.Tensor,
    gate: torch.Tensor,
    shared: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out += sigmoid(hidden . gate) * shared, in float32."""
    share = (hidden.float() @ gate.float().reshape(-1, 1)).sigmoid()  # [T, 1]
    out.copy_(out.float() + share * shared.float())


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    chunks: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    heads = v.shape[2]
    repeat = heads // q.shape[2]
    scale = q.shape[-1] ** -0.5
    query = _normalized(q[0]).repeat_interleave(repeat, 1) * scale  # [T, value heads, K]
    key = _normalized(k[0]).repeat_interleave(repeat, 1)
    value, decay, rate = v[0].float(), g.reshape(-1, heads).float().exp(), beta.reshape(-1, heads).float()
    out = torch.zeros_like(value)
    bounds = starts.tolist()
    for slot, (begin, end) in zip(slots.tolist(), pairwise(bounds), strict=False):
        state = states[slot].float()  # [value heads, V, K]
        for t in range(begin, end):
            if chunks is not None and (t - begin) % _CHUNK == 0:
                chunks.append(state)
            state = state * decay[t, :, None, None]
            error = value[t] - torch.einsum("hvk,hk->hv", state, key[t])
            state = state + torch.einsum("hv,hk->hvk", error * rate[t, :, None], key[t])
            out[t] = torch.einsum("hvk,hk->hv", state, query[t])
        if end > begin:
            states[slot] = state.to(states.dtype)
    return out.to(v.dtype)[None]


def _normalized(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)


def conv_extend(
    _original: Callable[..., Any],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    conv_states: torch.Tensor | None = None,
    activation: str | None = "silu",
    **_kwargs: Any,
) -> torch.Tensor:
    """Prefill. x [channels, T]; weight [channels, W]; states [slots, channels, W - 1]."""
    assert query_start_loc is not None and cache_indices is not None
    assert has_initial_state is not None and conv_states is not None
    out = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for i, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            slot = int(cache_indices[i])
            state = conv_states[slot] if bool(has_initial_state[i]) else torch.zeros_like(conv_states[slot])
            inputs = torch.cat([state.float(), x[:, begin:end].float()], 1)[None]  # [1, channels, W - 1 + T]
            out[:, begin:end] = _conv(inputs, weight, bias, activation)[0].to(x.dtype)
            conv_states[slot] = inputs[0, :, -state.shape[-1] :].to(conv_states.dtype)
    return out


def conv_decode(
    _original: Callable[..., Any],
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    conv_state_indices: torch.Tensor | None = None,
    **_kwargs: Any,
) -> torch.Tensor:
    """One token a sequence. x [batch, channels]."""
    assert conv_state_indices is not None
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_state[slots].float(), x.float()[..., None]], 2)  # [batch, channels, W]
    out = _conv(inputs, weight, bias, activation)[..., -1].to(x.dtype)
    conv_state[slots] = inputs[:, :, -conv_state.shape[-1] :].to(conv_state.dtype)
    return out


def _conv(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    wide = None if bias is None else bias.float()
    out = F.conv1d(inputs, weight.float()[:, None], wide, groups=weight.shape[0])
    return F.silu(out) if activation in ("silu", "swish") else out


def exact_bf16_dot() -> None:
    """Let Triton's interpreter multiply bf16 matrices: it takes their bits for integers otherwise (3.7)."""
    import triton.language as tl
    from triton.runtime import interpreter

    def create_dot(_self: Any, a: Any, b: Any, d: Any, *_rest: Any) -> Any:
        product = np.matmul(_float32(a), _float32(b), dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(product, d.dtype.scalar)

    def _float32(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data.astype(np.float32)
        return interpreter._convert_float(handle.data, handle.dtype, tl.float32, None).view(np.float32)

    interpreter.InterpreterBuilder.create_dot = create_dot
