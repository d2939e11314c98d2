// The mix of a hyper-connection, 1 to 16 tokens, with 16-bit matrices as they are: [outputs, inputs], row by row. Host
// side, contract and reference: hyper_mix.py.
//
// Two launches. `mix_down` leaves sums over SPLIT parts of its inputs, since its few outputs alone would not fill a GPU.
// Every block of `mix_up` adds them, in order, and makes silu of them; it has some channels of all streams, so their mean
// needs no other block. No float is summed by atomics: equal inputs give equal bits.
//
// All weights of a thread are asked for at once, before the grid in front has ended: 6.5 MB a launch lie in registers.
// `mix_down` lets `mix_up` start before it has waited itself, so that the weights of both are on their way.
//
// Tensor cores (mma.m16n8k16, fp32 sums): the 16 rows of A are tokens, the 8 columns of B are rows of the matrix. Both
// sides permute k alike: lane (g, t) = (lane / 4, lane % 4) loads 16 bytes, inputs 8t..8t+7 of 32, of token g and of
// row g, which are the lane's part of two k-steps. Four lanes read 64 bytes of a row.
//
// Rounding as in SGLang (hc_mix.py): silu and the result; all else is fp32.
//
// Defines from the host: HIDDEN, BRANCHES, RANK, TOKENS (8 or 16), SPLIT, ACT_BF16, SCALE_BF16 (unused here).

#include "moe_common.cuh"

#define WIDTH (BRANCHES * HIDDEN)
#define DOWN_WARPS 8
#define DOWN_STEPS ((WIDTH / 32 + SPLIT * DOWN_WARPS - 1) / (SPLIT * DOWN_WARPS))  // of 32 inputs, a warp
#define EVEN (DOWN_STEPS * SPLIT * DOWN_WARPS == WIDTH / 32)
#define CHANNELS 16                                                                // of a block of `mix_up`
#define UP_WARPS (BRANCHES * CHANNELS / 8)
#define UP_STEPS (RANK / 32)
#define LOW_STRIDE (RANK + (UP_STEPS % 2 ? 0 : 32))  // an odd multiple of 64 bytes: two tokens meet all banks
#define TILES (TOKENS / 8)

// A step of 32 inputs: tokens g and g + 8 against row g. The halves go to sums of their own: two short chains.
__device__ __forceinline__ void multiply(float (&sums)[2][4], const uint4 (&x)[TILES], uint4 w) {
  const uint4 none = {}, low = x[0], high = TILES > 1 ? x[TILES - 1] : none;
  mma_act(sums[0], low.x, high.x, low.y, high.y, w.x, w.y);
  mma_act(sums[1], low.z, high.z, low.w, high.w, w.z, w.w);
}

// Grid (RANK / 8, SPLIT). x [m, WIDTH], weights [RANK, WIDTH], partial [SPLIT, m, RANK].
extern "C" __global__ void __launch_bounds__(DOWN_WARPS * 32, TILES > 1 ? 2 : 3)
mix_down(const u16* x, const u16* __restrict__ weights, float* partial, int m) {
  __shared__ __align__(8) float sums[DOWN_WARPS][TOKENS * 8];
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
  const int first = (blockIdx.y * DOWN_WARPS + warp) * DOWN_STEPS;
  const u16* row = weights + (long long)(blockIdx.x * 8 + g) * WIDTH + 8 * t;
  const uint4 none = {};
  uint4 w[DOWN_STEPS], a[DOWN_STEPS][TILES];
#pragma unroll
  for (int s = 0; s < DOWN_STEPS; ++s) w[s] = EVEN || first + s < WIDTH / 32 ? load16(row + (first + s) * 32) : none;
  let_next_grid_start();
  wait_for_previous_grid();

#pragma unroll
  for (int s = 0; s < DOWN_STEPS; ++s)
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const bool live = n * 8 + g < m && (EVEN || first + s < WIDTH / 32);
      a[s][n] = live ? *(const uint4*)(x + (long long)(n * 8 + g) * WIDTH + (first + s) * 32 + 8 * t) : none;
    }
  float acc[2][4] = {};
#pragma unroll
  for (int s = 0; s < DOWN_STEPS; ++s) multiply(acc, a[s], w[s]);
#pragma unroll
  for (int n = 0; n < TILES; ++n)
    *(float2*)&sums[warp][(n * 8 + g) * 8 + 2 * t] =
        make_float2(acc[0][2 * n] + acc[1][2 * n], acc[0][2 * n + 1] + acc[1][2 * n + 1]);
  __syncthreads();
  if (threadIdx.x < m * 8) {
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < DOWN_WARPS; ++k) total += sums[k][threadIdx.x];
    partial[(blockIdx.y * m + (threadIdx.x >> 3)) * RANK + blockIdx.x * 8 + (threadIdx.x & 7)] = total;
  }
}

// silu of the sums of all tokens over the streams' number, rounded, into shared memory.
__device__ __forceinline__ void make_low(u16* low, const float* partial, int m) {
  for (int i = threadIdx.x; i < m * (RANK / 4); i += UP_WARPS * 32) {
    const int token = i / (RANK / 4), at = i % (RANK / 4) * 4;
    float4 part[SPLIT];
#pragma unroll
    for (int p = 0; p < SPLIT; ++p) part[p] = *(const float4*)(partial + (p * m + token) * RANK + at);
    float v[4] = {};
#pragma unroll
    for (int p = 0; p < SPLIT; ++p) v[0] += part[p].x, v[1] += part[p].y, v[2] += part[p].z, v[3] += part[p].w;
    u32 rounded[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[k] *= 1.f / BRANCHES;
      rounded[k] = to_output(v[k] * sigmoid(v[k]));
    }
    *(uint2*)(low + token * LOW_STRIDE + at) = make_uint2(rounded[0] | rounded[1] << 16, rounded[2] | rounded[3] << 16);
  }
}

// Grid (HIDDEN / CHANNELS). x [m, WIDTH], weights [WIDTH, RANK], partial [SPLIT, m, RANK], out [m, HIDDEN].
extern "C" __global__ void __launch_bounds__(UP_WARPS * 32)
mix_up(const u16* x, const u16* __restrict__ weights, const float* partial, u16* out, int m) {
  __shared__ __align__(16) u16 low[TOKENS * LOW_STRIDE];
  __shared__ __align__(8) float gated[BRANCHES][TOKENS][CHANNELS];
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
  const int stream = warp / (CHANNELS / 8), mine = warp % (CHANNELS / 8) * 8, base = blockIdx.x * CHANNELS;
  const u16* row = weights + (long long)(stream * HIDDEN + base + mine + g) * RANK + 8 * t;
  uint4 w[UP_STEPS];
#pragma unroll
  for (int s = 0; s < UP_STEPS; ++s) w[s] = load16(row + s * 32);
  wait_for_previous_grid();
  let_next_grid_start();

  u32 pair[TILES];  // of this lane's two channels
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int token = n * 8 + g;
    pair[n] = token < m ? *(const u32*)(x + (long long)token * WIDTH + stream * HIDDEN + base + mine + 2 * t) : 0u;
  }
  make_low(low, partial, m);
  __syncthreads();
  float acc[2][4] = {};
#pragma unroll
  for (int s = 0; s < UP_STEPS; ++s) {
    uint4 a[TILES];  // of a token that is not there, anything: rows do not mix
#pragma unroll
    for (int n = 0; n < TILES; ++n) a[n] = *(const uint4*)(low + (n * 8 + g) * LOW_STRIDE + s * 32 + 8 * t);
    multiply(acc, a, w[s]);
  }
#pragma unroll
  for (int n = 0; n < TILES; ++n)
    *(float2*)&gated[stream][n * 8 + g][mine + 2 * t] =
        make_float2(sigmoid(acc[0][2 * n] + acc[1][2 * n]) * act_low(pair[n]),
                    sigmoid(acc[0][2 * n + 1] + acc[1][2 * n + 1]) * act_high(pair[n]));
  __syncthreads();
  for (int i = threadIdx.x; i < m * CHANNELS; i += UP_WARPS * 32) {
    const int token = i / CHANNELS, channel = i % CHANNELS;
    float total = 0.f;
#pragma unroll
    for (int b = 0; b < BRANCHES; ++b) total += gated[b][token][channel];
    out[(long long)token * HIDDEN + base + channel] = to_output(total * (1.f / BRANCHES));
  }
}
