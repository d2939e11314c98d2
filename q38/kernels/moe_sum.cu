// The top-k sum of the prefill MoE. Host side and contract: moe_prefill_cuda.py.
//
// Defines from the host: OUTPUTS, TOP_K, SCALE_BF16 (unused here), ACT_BF16.

#include "moe_common.cuh"

// out[token] = sum over k of partial[token, k], in slot order, skipping absent experts. Grid (tokens, OUTPUTS / 256).
extern "C" __global__ void __launch_bounds__(128)
sum_slots(const u32* partial, const int* ids, u32* __restrict__ out) {
  wait_for_previous_grid();
  const int pair = blockIdx.y * 128 + threadIdx.x;
  if (pair >= OUTPUTS / 2) return;
  float low = 0.f, high = 0.f;
#pragma unroll
  for (int k = 0; k < TOP_K; ++k) {
    const long long slot = (long long)blockIdx.x * TOP_K + k;
    if (ids[slot] < 0) continue;
    const u32 v = partial[slot * (OUTPUTS / 2) + pair];
    low += act_low(v);
    high += act_high(v);
  }
  out[(long long)blockIdx.x * (OUTPUTS / 2) + pair] = to_output(low) | (u32)to_output(high) << 16;
}
