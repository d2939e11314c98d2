// Between two blocks of a model with hyper-connections: one block's output joins the streams, and the streams are
// normalized for the next block. Host side, contract and reference: hyper_boundary.py.
//
// One block of threads has one stream of one token, so the norm needs no other block. The gates of a stream depend on
// all streams; that is why `boundary` ends with its part of the products that the next boundary's gates are sums of,
// [m, stream, gate] in fp32, while it has the normalized values in registers. `gate_parts` does this alone, for streams
// that were normalized elsewhere.
//
// Weights are on their way before the grid in front of this one has ended.
//
// Rounding as in SGLang (hc_combine.cuh, grouped_gemma_rmsnorm.cuh): the combined streams are rounded before their
// squares are summed, the normalized ones before they meet the gates' weights; all else is fp32. The order of the sum of
// squares is SGLang's as well. That of the gates is not: there a sum passes from stream to stream.
//
// Defines from the host: HIDDEN (a multiple of 512), BRANCHES, NORM and GATES (what `boundary` does after combining),
// ACT_BF16, SCALE_BF16 (unused here).

#include "moe_common.cuh"

#define THREADS (HIDDEN / 16)
#define WARPS (THREADS / 32)
#define STREAMS ((long long)BRANCHES * HIDDEN)

struct Eight {
  float v[8];
};

__device__ __forceinline__ Eight unpack(uint4 words) {
  const u32 w[4] = {words.x, words.y, words.z, words.w};
  Eight e;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    e.v[2 * i] = act_low(w[i]);
    e.v[2 * i + 1] = act_high(w[i]);
  }
  return e;
}

__device__ __forceinline__ uint4 round_and_pack(const Eight& e) {
  u32 w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = to_output(e.v[2 * i]) | (u32)to_output(e.v[2 * i + 1]) << 16;
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Where a thread's first or second eight channels begin: SGLang's order, which differs between architectures.
__device__ __forceinline__ int channel(int half) {
#if __CUDA_ARCH__ >= 1000
  return (2 * threadIdx.x + half) * 8;
#else
  return (threadIdx.x + half * THREADS) * 8;
#endif
}

__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int step = 16; step; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

// The weights of all gates at a thread's channels of one stream.
__device__ __forceinline__ void load_gates(uint4 (&gates)[BRANCHES][2], const u16* inject, int stream) {
#pragma unroll
  for (int gate = 0; gate < BRANCHES; ++gate)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      gates[gate][half] = load16(inject + gate * STREAMS + stream * HIDDEN + channel(half));
}

// This stream's part of all gates of a token, from the 16 normalized values of each thread.
__device__ __forceinline__ void write_parts(const uint4 (&normed)[2], const uint4 (&gates)[BRANCHES][2], float* parts) {
  __shared__ float sums[BRANCHES][WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int gate = 0; gate < BRANCHES; ++gate) {
    float sum = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Eight n = unpack(normed[half]), w = unpack(gates[gate][half]);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += n.v[i] * w.v[i];
    }
    sum = sum_of_warp(sum);
    if (lane == 0) sums[gate][warp] = sum;
  }
  __syncthreads();
  if (threadIdx.x < BRANCHES) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += sums[threadIdx.x][w];
    parts[threadIdx.x] = total;
  }
}

// Grid (m, BRANCHES). normed [m, STREAMS], inject [BRANCHES, STREAMS], parts [m, BRANCHES, BRANCHES].
extern "C" __global__ void __launch_bounds__(THREADS)
gate_parts(const u16* normed, const u16* __restrict__ inject, float* parts) {
  const int token = blockIdx.x, stream = blockIdx.y;
  uint4 gates[BRANCHES][2], n[2];
  load_gates(gates, inject, stream);
  wait_for_previous_grid();
  let_next_grid_start();
#pragma unroll
  for (int half = 0; half < 2; ++half)
    n[half] = *(const uint4*)(normed + token * STREAMS + stream * HIDDEN + channel(half));
  write_parts(n, gates, parts + (token * BRANCHES + stream) * BRANCHES);
}

// Grid (m, BRANCHES). output [m, HIDDEN], streams, combined and normed [m, STREAMS], parts and next_parts [m, BRANCHES,
// BRANCHES], norm [STREAMS], inject [BRANCHES, STREAMS].
extern "C" __global__ void __launch_bounds__(THREADS)
boundary(const u16* output, const u16* streams, const float* parts, const u16* __restrict__ norm,
         const u16* __restrict__ inject, u16* combined, u16* normed, float* next_parts, float eps) {
  const int token = blockIdx.x, stream = blockIdx.y;
  const long long row = token * STREAMS + stream * HIDDEN;
#if NORM
  uint4 weight[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) weight[half] = load16(norm + stream * HIDDEN + channel(half));
#endif
#if GATES
  uint4 gates[BRANCHES][2];
  load_gates(gates, inject, stream);
#endif
  wait_for_previous_grid();
  let_next_grid_start();

  float total = 0.f;
#pragma unroll
  for (int part = 0; part < BRANCHES; ++part) total += parts[(token * BRANCHES + part) * BRANCHES + stream];
  const float gate = 2.f / (1.f + expf(-total / BRANCHES));
  uint4 x[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Eight r = unpack(*(const uint4*)(streams + row + channel(half)));
    const Eight y = unpack(*(const uint4*)(output + (long long)token * HIDDEN + channel(half)));
#pragma unroll
    for (int i = 0; i < 8; ++i) r.v[i] = r.v[i] + gate * y.v[i];
    x[half] = round_and_pack(r);
    *(uint4*)(combined + row + channel(half)) = x[half];
  }

#if NORM
  __shared__ float squares[WARPS];
  float sum = 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Eight e = unpack(x[half]);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += e.v[2 * i] * e.v[2 * i] + e.v[2 * i + 1] * e.v[2 * i + 1];
  }
  sum = sum_of_warp(sum);
  if (WARPS > 1) {  // then the sums of the warps by shuffles too, each warp for itself
    if ((threadIdx.x & 31) == 0) squares[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = sum_of_warp((threadIdx.x & 31) < WARPS ? squares[threadIdx.x & 31] : 0.f);
  }
  const float factor = rsqrtf(sum / HIDDEN + eps);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Eight e = unpack(x[half]);
    const Eight w = unpack(weight[half]);
#pragma unroll
    for (int i = 0; i < 8; ++i) e.v[i] = e.v[i] * factor * (1.f + w.v[i]);
    x[half] = round_and_pack(e);
    *(uint4*)(normed + row + channel(half)) = x[half];
  }
#endif
#if GATES
  write_parts(x, gates, next_parts + (token * BRANCHES + stream) * BRANCHES);
#endif
}
