// INT8 matrix times at most 16 vectors: out = x W, for wide and short matrices. Host side, contract and
// reference: gemv_int8.py.
//
// Arithmetic. A word holds 4 codes of one column. Codes become exact 16-bit floats, code - 128, and meet
// the activations on tensor cores (mma.m16n8k16, fp32 sums); each group's sum is scaled in fp32.
//
// Fragment order. The 16 rows of A are output columns, the 8 columns of B are tokens, and both sides permute
// k alike: lane (g, t) = (lane / 4, lane % 4) loads 16 bytes, columns 4g..4g+3 of word rows 2t and 2t + 1 of
// 8, whose codes meet the 8 consecutive activations 8t..8t+7 of a token: one 16-byte load, no packing.
//
// A warp takes whole groups. Its first group is on its way before the grid that writes x has finished. The
// sums of the warps meet in shared memory, those of the SPLIT blocks of a column block in device memory,
// where the last block to arrive adds them; both in a fixed order, so equal inputs give equal bits.
//
// What becomes of a sum is up to EPILOGUE (gemv_int8.Epilogue): nothing; silu of its BRANCHES-th part; or the gate of a
// hyper-connection. For a gate the 32 columns of a block are 32 / BRANCHES channels of each branch, so that one warp has
// all that adds up to a channel of the mixed stream.
//
// Defines from the host: INPUTS, OUTPUTS, GROUP, TOKENS (8 or 16), WARPS, SPLIT, SCALE_BF16, ACT_BF16, EPILOGUE, BRANCHES.

#include "moe_common.cuh"

#define GROUPS (INPUTS / GROUP)
#define PART ((GROUPS + SPLIT - 1) / SPLIT)      // groups of a block
#define ROUNDS ((PART + WARPS - 1) / WARPS)      // groups of a warp
#define STEPS (GROUP / 16)                       // k-steps of a group: 4 word rows of 32 columns each
#define TILES (TOKENS / 8)
#define SUM_STRIDE 36                            // floats a token; the skew spreads tokens over banks
#define SILU 1
#define GATE 2
#define CHANNELS (32 / BRANCHES)                 // of a block, if its sums are gates

// Codes `first` and `first + 1` of a word as two 16-bit floats, less 128.
template <int FIRST>
__device__ __forceinline__ u32 weights(u32 w) {
#if ACT_BF16
  const float low = __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440 + FIRST)) - 8388736.f;
  const float high = __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440 + FIRST + 1)) - 8388736.f;
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
#else
  u32 v = __byte_perm(w, 0x64646464u, FIRST ? 0x4342 : 0x4140);
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(v), "r"(0x64806480u));
  return v;
#endif
}

// One step of both tiles of columns against a tile of tokens.
__device__ __forceinline__ void multiply_step(float (&acc)[2][4], const u32 (&a)[2][4], u32 b0, u32 b1) {
  mma_act(acc[0], a[0][0], a[0][1], a[0][2], a[0][3], b0, b1);
  mma_act(acc[1], a[1][0], a[1][1], a[1][2], a[1][3], b0, b1);
}

// A warp has the 32 sums of a token. streams [m, OUTPUTS], BRANCHES times all channels.
__device__ __forceinline__ void finish(float total, int token, int lane, const u16* streams, u16* out) {
#if EPILOGUE == GATE
  const int channel = blockIdx.x * CHANNELS + lane % CHANNELS, branch = lane / CHANNELS;
  float part = sigmoid(total) * act_low(streams[(long long)token * OUTPUTS + branch * (OUTPUTS / BRANCHES) + channel]);
#pragma unroll
  for (int step = CHANNELS; step < 32; step *= 2) part += __shfl_xor_sync(~0u, part, step);
  if (branch == 0) out[(long long)token * (OUTPUTS / BRANCHES) + channel] = to_output(part / BRANCHES);
#else
  if (EPILOGUE == SILU) {
    total /= BRANCHES;
    total *= sigmoid(total);
  }
  out[(long long)token * OUTPUTS + blockIdx.x * 32 + lane] = to_output(total);
#endif
}

// Grid (OUTPUTS / 32, SPLIT). x [m, INPUTS], out [m, OUTPUTS] or as `finish` says; partial fp32 [SPLIT, 16, OUTPUTS].
extern "C" __global__ void __launch_bounds__(WARPS * 32)
gemv(const u16* x, const u32* __restrict__ words, const u16* __restrict__ scales, u16* __restrict__ out,
     float* __restrict__ partial, u32* __restrict__ tickets, const u16* streams, int m) {
  __shared__ __align__(16) float sums[WARPS][TOKENS * SUM_STRIDE];
  __shared__ u32 ticket;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
  const int column = blockIdx.x * 32;
  const int first = blockIdx.y * PART + warp, last = min(GROUPS, (int)(blockIdx.y + 1) * PART);

  uint4 next[STEPS];
  uint2 next_scale;
  auto request = [&](int group) {
    if (group >= last) return;
    const u32* from = words + (long long)(group * (GROUP / 4) + 2 * t) * OUTPUTS + column + 4 * g;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) next[s] = load16(from + ((s >> 1) * 8 + (s & 1)) * OUTPUTS);
    next_scale = load8(scales + (long long)group * OUTPUTS + column + 4 * g);
  };
  request(first);
  wait_for_previous_grid();
  let_next_grid_start();

  float out_sum[TILES][2][4] = {};
#pragma unroll 1
  for (int round = 0; round < ROUNDS; ++round) {
    const int group = first + round * WARPS;
    if (group >= last) break;
    uint4 w[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) w[s] = next[s];
    const uint2 scale = next_scale;
    uint4 b[TILES][STEPS / 2];  // 8 activations of a token: two k-steps
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int s = 0; s < STEPS / 2; ++s) {
        const uint4 none = {};
        b[n][s] = n * 8 + g < m ? *(const uint4*)(x + (long long)(n * 8 + g) * INPUTS + group * GROUP + s * 32 + t * 8) : none;
      }
    if (ROUNDS > 1) request(group + WARPS);
    float acc[TILES][2][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const u32 a[2][4] = {{weights<0>(w[s].x), weights<0>(w[s].y), weights<2>(w[s].x), weights<2>(w[s].y)},
                           {weights<0>(w[s].z), weights<0>(w[s].w), weights<2>(w[s].z), weights<2>(w[s].w)}};
#pragma unroll
      for (int n = 0; n < TILES; ++n)
        multiply_step(acc[n], a, s & 1 ? b[n][s >> 1].z : b[n][s >> 1].x, s & 1 ? b[n][s >> 1].w : b[n][s >> 1].y);
    }
    const float scale_of[4] = {scale_low(scale.x), scale_high(scale.x), scale_low(scale.y), scale_high(scale.y)};
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) out_sum[n][tile][i] += scale_of[2 * tile + (i >> 1)] * acc[n][tile][i];
  }
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
      *(float4*)&sums[warp][(n * 8 + 2 * t + odd) * SUM_STRIDE + 4 * g] =
          make_float4(out_sum[n][0][odd], out_sum[n][0][2 + odd], out_sum[n][1][odd], out_sum[n][1][2 + odd]);
  __syncthreads();
  for (int i = threadIdx.x; i < m * 32; i += WARPS * 32) {
    const int token = i >> 5;
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < WARPS; ++k) total += sums[k][token * SUM_STRIDE + lane];
    if (SPLIT == 1)
      finish(total, token, lane, streams, out);
    else
      partial[(blockIdx.y * 16 + token) * (long long)OUTPUTS + column + lane] = total;
  }
  if (SPLIT == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ticket = atomicAdd(tickets + blockIdx.x, 1u);
  __syncthreads();
  if (ticket != SPLIT - 1) return;
  __threadfence();
  for (int i = threadIdx.x; i < m * 32; i += WARPS * 32) {
    const int token = i >> 5;
    float part[SPLIT], total = 0.f;
#pragma unroll
    for (int p = 0; p < SPLIT; ++p) part[p] = __ldcg(partial + (p * 16 + token) * (long long)OUTPUTS + column + lane);
#pragma unroll
    for (int p = 0; p < SPLIT; ++p) total += part[p];
    finish(total, token, lane, streams, out);
  }
  if (threadIdx.x == 0) tickets[blockIdx.x] = 0;
}
