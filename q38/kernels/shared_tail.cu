// The shared expert joins the routed ones: routed += sigmoid(x . weight) * shared. Host side, contract and reference:
// shared_tail.py.
//
// One block a token, eight channels a thread. fp32 throughout and rounded once, as SGLang's Triton kernel
// (_fused_gate_sigmoid_mul_add_kernel); the sum has that kernel's order and the sigmoid its instructions.
//
// Defines from the host: HIDDEN (a multiple of 256, at most 8192), ACT_BF16, SCALE_BF16 (unused here).

#include "moe_common.cuh"

#define THREADS (HIDDEN / 8)
#define WARPS (THREADS / 32)

__device__ __forceinline__ float low(u32 v) {
#if ACT_BF16
  return __uint_as_float(v << 16);
#else
  return half_to_float((u16)v);
#endif
}

__device__ __forceinline__ float high(u32 v) {
#if ACT_BF16
  return __uint_as_float(v & 0xffff0000u);
#else
  return half_to_float((u16)(v >> 16));
#endif
}

__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int step = 16; step; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

__device__ __forceinline__ float sigmoid(float v) {
  float r;
  asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(1.f), "f"(1.f + __expf(-v)));
  return r;
}

// Grid (m, 1). x, shared and routed [m, HIDDEN], weight [HIDDEN].
extern "C" __global__ void __launch_bounds__(THREADS)
shared_tail(const u16* x, const u16* __restrict__ weight, const u16* shared, u16* routed) {
  __shared__ float sums[WARPS];
  const int lane = threadIdx.x & 31;
  const long long at = blockIdx.x * (long long)HIDDEN + threadIdx.x * 8;
  const uint4 wv = load16(weight + threadIdx.x * 8);
  wait_for_previous_grid();
  let_next_grid_start();
  const uint4 xv = *(const uint4*)(x + at), sv = *(const uint4*)(shared + at), rv = *(const uint4*)(routed + at);
  const u32 w[4] = {wv.x, wv.y, wv.z, wv.w}, h[4] = {xv.x, xv.y, xv.z, xv.w};
  const u32 s[4] = {sv.x, sv.y, sv.z, sv.w}, r[4] = {rv.x, rv.y, rv.z, rv.w};

  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum += low(h[i]) * low(w[i]);
    sum += high(h[i]) * high(w[i]);
  }
  sum = sum_of_warp(sum);
  if (lane == 0) sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  const float gate = sigmoid(sum_of_warp(lane < WARPS ? sums[lane] : 0.f));

  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out[i] = to_output(gate * low(s[i]) + low(r[i])) | (u32)to_output(gate * high(s[i]) + high(r[i])) << 16;
  *(uint4*)(routed + at) = make_uint4(out[0], out[1], out[2], out[3]);
}
