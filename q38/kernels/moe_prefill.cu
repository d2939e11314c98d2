// Prefill MoE over merged 2-bit expert rows: pack (activations for the matrix instruction) and grouped
// (one product of a block of up to 64 sorted slots with the rows of their expert). Host side, contract
// and reference: moe_prefill_cuda.py and moe_prefill.py.
//
// A warp owns 64 columns: 32 gate and the 32 matching up columns, or 64 of down. It turns a word into
// fp16 weights once, (code | 1024) - (1024 + 2 * 4^i) = 4^i (q - 2) times the scale, exact, and
// multiplies it with up to 64 tokens; packed activations (moe_common.cuh) carry 4^-i. The tokens of one
// group of inputs are in shared memory, double-buffered; words and scales of the next group are in
// registers. Sums are fp32 over the whole input dimension.
//
// Defines from the host: INPUTS, OUTPUTS, GATED, TOP_K, W_OFFSET, S_OFFSET, SCALE_BF16, ACT_BF16.

#include "moe_common.cuh"

#define GROUPS (INPUTS / 128)
#define COLUMNS (GATED ? 2 * OUTPUTS : OUTPUTS)  // columns of the packed matrix
#define SECOND (GATED ? OUTPUTS : 32)            // from a warp's first 32 columns to its second
#define WARP_COLUMNS (GATED ? 32 : 64)           // output columns of a warp
#define WARPS 4
#define BLOCK_TOKENS 64
#define TOKEN_BYTES 272  // 128 inputs and 16 bytes that spread tokens over banks

// packed[row] and back[row] (the inverse power of two) of a row of x [rows, INPUTS]. A whole block of up to 1024 threads.
__device__ __forceinline__ void pack_row(const u16* x, u32* __restrict__ packed, float* __restrict__ back, int row, u32* warp_max) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  x += (long long)row * INPUTS;
  u32 m = 0;
  for (int group = warp; group < GROUPS; group += warps) m = max(m, max_magnitude(load_activations(x, group, lane)));
  m = __reduce_max_sync(0xffffffffu, m);
  if (lane == 0) warp_max[warp] = m;
  __syncthreads();
  m = __reduce_max_sync(0xffffffffu, lane < warps ? warp_max[lane] : 0u);
  const u32 exponent = scale_exponent(m);
  for (int group = warp; group < GROUPS; group += warps)
    pack_group(packed + (long long)row * (INPUTS / 2), load_activations(x, group, lane), __uint_as_float(exponent << 23), group, lane);
  if (threadIdx.x == 0) back[row] = __uint_as_float((254u - exponent) << 23);
}

#include "moe_pack.cuh"

// out[slot, n] for the slots of the blocks of the experts from `begin` to before `end`, and the warp's columns.
// Grid (columns / (4 * WARP_COLUMNS), at least as many blocks).
// GATED: silu(gate) * up of token slot / TOP_K. Else: the routed weight times the product of row `slot`.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
grouped(const u32* packed, const float* back, const u64* table, const int* order, const int* block_expert,
        const int* block_start, const int* block_live, const int* first_block, const float* weights, u16* out,
        int begin, int end) {
  __shared__ __align__(16) char tokens[2][BLOCK_TOKENS * TOKEN_BYTES];
  __shared__ int slots[BLOCK_TOKENS];
  wait_for_previous_grid();
  let_next_grid_start();
  const int block = first_block[begin] + blockIdx.y;
  if (block >= first_block[end]) return;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  const int first = block_start[block], live = block_live[block];
  for (int i = threadIdx.x; i < BLOCK_TOKENS; i += WARPS * 32) slots[i] = order[first + min(i, live - 1)];
  __syncthreads();

  const int n0 = (blockIdx.x * WARPS + warp) * WARP_COLUMNS;
  const bool active = n0 < OUTPUTS;  // the last block may have warps without columns; they only help with the tokens
  const char* row = (const char*)table[block_expert[block]];
  const u32* words = (const u32*)(row + W_OFFSET) + t * COLUMNS + (active ? n0 : 0) + 4 * g;
  const u16* scales = (const u16*)(row + S_OFFSET) + (active ? n0 : 0) + 4 * g;

  auto fetch_tokens = [&](int group) {
    const u32 to = shared_address(tokens[group & 1]);
#pragma unroll
    for (int i = 0; i < BLOCK_TOKENS * 16 / (WARPS * 32); ++i) {
      const int piece = i * (WARPS * 32) + threadIdx.x, token = piece >> 4;
      if (token < live) {
        const long long source = GATED ? slots[token] / TOP_K : slots[token];
        copy16(to + token * TOKEN_BYTES + (piece & 15) * 16, packed + source * (INPUTS / 2) + group * 64 + (piece & 15) * 4);
      }
    }
    commit_copies();
  };
  uint4 next[2][2];  // [first or second 32 columns][word row / 4]
  uint2 next_scale[2];
  auto fetch_words = [&](int group) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int j = 0; j < 2; ++j) next[part][j] = load16(words + part * SECOND + (group * GROUP_WORDS + 4 * j) * COLUMNS);
      next_scale[part] = load8(scales + part * SECOND + group * COLUMNS);
    }
  };

  // Unknown to the compiler, so that it stays in a register and the masks are immediate operands.
  const u32 magic = 0x64006400u + blockIdx.z;
  float acc[BLOCK_TOKENS / 8][2][2][4] = {};  // [8 tokens][part][16 columns][fragment]
  fetch_tokens(0);
  fetch_words(0);
#pragma unroll 1
  for (int group = 0; group < GROUPS; ++group) {
    uint4 w[2][2];
    u32 s[2][4];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      w[part][0] = next[part][0];
      w[part][1] = next[part][1];
      s[part][0] = twice(scale_low(next_scale[part].x));
      s[part][1] = twice(scale_high(next_scale[part].x));
      s[part][2] = twice(scale_low(next_scale[part].y));
      s[part][3] = twice(scale_high(next_scale[part].y));
    }
    if (group + 1 < GROUPS) {
      fetch_tokens(group + 1);
      fetch_words(group + 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    if (active) {
      const u32 from = shared_address(tokens[group & 1]) + g * TOKEN_BYTES + t * 32;
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // code positions 0-3, 4-7 of a half word
          u32 a[2][2][2][4];  // [part][16 columns][k-step][fragment]
#pragma unroll
          for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const u32 lo = (c ? w[part][j].z : w[part][j].x) >> 8 * half, hi = (c ? w[part][j].w : w[part][j].y) >> 8 * half;
              const u32 slo = s[part][2 * c], shi = s[part][2 * c + 1];
              a[part][c][0][0] = weight<0>(lo, slo, magic);
              a[part][c][0][1] = weight<0>(hi, shi, magic);
              a[part][c][0][2] = weight<1>(lo, slo, magic);
              a[part][c][0][3] = weight<1>(hi, shi, magic);
              a[part][c][1][0] = weight<2>(lo, slo, magic);
              a[part][c][1][1] = weight<2>(hi, shi, magic);
              a[part][c][1][2] = weight<3>(lo, slo, magic);
              a[part][c][1][3] = weight<3>(hi, shi, magic);
            }
#pragma unroll
          for (int n = 0; n < BLOCK_TOKENS / 8; n += 2)
            if (n * 8 < live) {
              const uint4 x = read16(from + n * 8 * TOKEN_BYTES + j * 128 + half * 16);
              const uint4 y = read16(from + (n + 1) * 8 * TOKEN_BYTES + j * 128 + half * 16);
              // Eight accumulators alternate: the next k-step finds the one before it finished.
#pragma unroll
              for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int part = 0; part < 2; ++part)
#pragma unroll
                  for (int c = 0; c < 2; ++c) {
                    const u32(&f)[4] = a[part][c][k];
                    mma(acc[n][part][c], f[0], f[1], f[2], f[3], k ? x.z : x.x, k ? x.w : x.y, acc[n][part][c]);
                    mma(acc[n + 1][part][c], f[0], f[1], f[2], f[3], k ? y.z : y.x, k ? y.w : y.y, acc[n + 1][part][c]);
                  }
            }
        }
    }
    __syncthreads();
  }
  if (!active) return;
#pragma unroll
  for (int n = 0; n < BLOCK_TOKENS / 8; ++n)
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {  // the fragment's two tokens
      const int place = n * 8 + 2 * t + odd;
      if (place >= live) continue;
      const int slot = slots[place];
      const float factor = back[GATED ? slot / TOP_K : slot] * (GATED ? 1.f : weights[slot]);
      u16* to = out + (long long)slot * OUTPUTS + n0 + 4 * g;
      float v[2][4];  // columns 4g..4g+3 of both parts
#pragma unroll
      for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int c = 0; c < 4; ++c) v[part][c] = acc[n][part][c >> 1][(c & 1) * 2 + odd] * factor;
#if GATED
#pragma unroll
      for (int c = 0; c < 4; ++c) v[0][c] = v[0][c] / (1.f + __expf(-v[0][c])) * v[1][c];
#endif
#pragma unroll
      for (int part = 0; part < (GATED ? 1 : 2); ++part) {
        uint2 pair;
        pair.x = to_output(v[part][0]) | (u32)to_output(v[part][1]) << 16;
        pair.y = to_output(v[part][2]) | (u32)to_output(v[part][3]) << 16;
        *(uint2*)(to + part * 32) = pair;
      }
    }
}
