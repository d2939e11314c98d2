// What the CUDA kernels share: loads, conversions, the fp16 matrix instruction, dependent launch, and activations
// packed for it (decode packs its own: moe_digits.cuh). Defines from the host: SCALE_BF16, ACT_BF16.
//
// Packed activations. Word row kw of a token is 8 half2: pair i holds inputs 16 kw + i and 16 kw + 8 + i,
// times 4^-(i mod 4), times a power of two per token that puts the token's maximum just below 2^15. Both
// factors are exact in fp16, whatever the range of the model's dtype.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define GROUP_WORDS 8  // word rows of a group of 128 inputs
#define MASK 0x00030003u

// Programmatic dependent launch exists from sm_90 on; before it, a grid starts when its predecessor has ended.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void copy16(u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void copy8(u32 shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ uint4 load16(const void* global) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(global));
  return v;
}

__device__ __forceinline__ uint2 load8(const void* global) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(global));
  return v;
}

__device__ __forceinline__ void write16(u32 shared, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" :: "r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void write8(u32 shared, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" :: "r"(shared), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

__device__ __forceinline__ uint4 read16(u32 shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared) : "memory");
  return v;
}

__device__ __forceinline__ uint2 read8(u32 shared) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
  return v;
}

__device__ __forceinline__ u32 read4(u32 shared) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared) : "memory");
  return v;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ float half_to_float(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

__device__ __forceinline__ float scale_low(u32 v) {
#if SCALE_BF16
  return __uint_as_float(v << 16);
#else
  return half_to_float((u16)v);
#endif
}

__device__ __forceinline__ float scale_high(u32 v) {
#if SCALE_BF16
  return __uint_as_float(v & 0xffff0000u);
#else
  return half_to_float((u16)(v >> 16));
#endif
}

// The two activations of a pair.
__device__ __forceinline__ float act_low(u32 pair) {
#if ACT_BF16
  return __uint_as_float(pair << 16);
#else
  return half_to_float((u16)pair);
#endif
}

__device__ __forceinline__ float act_high(u32 pair) {
#if ACT_BF16
  return __uint_as_float(pair & 0xffff0000u);
#else
  return half_to_float((u16)(pair >> 16));
#endif
}

__device__ __forceinline__ u32 pack_half2(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

__device__ __forceinline__ u32 multiply_half2(u32 a, u32 b) {
  u32 v;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float* c) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// The same for pairs of activations, added to d.
__device__ __forceinline__ void mma_act(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if ACT_BF16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  mma(d, a0, a1, a2, a3, b0, b1, d);
#endif
}

__device__ __forceinline__ float sigmoid(float v) { return 1.f / (1.f + __expf(-v)); }

// A lane's four activations of one group: inputs 16 kw + 2q, +1, +8, +9 with kw = lane / 4, q = lane % 4.
__device__ __forceinline__ float4 load_activations(const u16* x, int group, int lane) {
  const u32* p = (const u32*)(x + group * 128 + (lane >> 2) * 16 + (lane & 3) * 2);
  const u32 a = p[0], b = p[4];
  return make_float4(act_low(a), act_high(a), act_low(b), act_high(b));
}

__device__ __forceinline__ u32 max_magnitude(float4 v) {
  return __float_as_uint(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
}

// Exponent field of the power of two that brings a maximum below 2^15; bounded so that its inverse is normal.
__device__ __forceinline__ u32 scale_exponent(u32 max_bits) { return min(268u - (max_bits >> 23), 240u); }

// A lane's four activations as two packed pairs; `sum` is the lane's part of the sum of the packed values.
__device__ __forceinline__ uint2 pack_pairs(float4 v, float scale, int lane, float& sum) {
  const u32 first = pack_half2(v.x * scale, v.z * scale), second = pack_half2(v.y * scale, v.w * scale);
  sum = half_to_float((u16)first) + half_to_float((u16)(first >> 16)) + half_to_float((u16)second) +
        half_to_float((u16)(second >> 16));
  // 4^-i for code i of a half word: q even holds i = 0, 1 (mod 4), q odd 2, 3.
  const bool odd = lane & 1;
  uint2 pair;
  pair.x = multiply_half2(first, odd ? 0x2c002c00u : 0x3c003c00u);    // 1/16 or 1
  pair.y = multiply_half2(second, odd ? 0x24002400u : 0x34003400u);   // 1/64 or 1/4
  return pair;
}

// Pack one group of one token in the order above; returns the lane's part of the sum of the packed values.
__device__ __forceinline__ float pack_group(u32* packed, float4 v, float scale, int group, int lane) {
  float sum;
  *(uint2*)(packed + group * 64 + lane * 2) = pack_pairs(v, scale, lane, sum);
  return sum;
}

__device__ __forceinline__ u16 to_output(float v) {
  u16 r;
#if ACT_BF16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
#endif
  return r;
}

__device__ __forceinline__ u32 twice(float v) { return pack_half2(v, v); }

// A pair of weights of code position i: 4^i (q - 2) * scale as half2. magic is 0x64006400, 1024 in both halves.
template <int I>
__device__ __forceinline__ u32 weight(u32 w, u32 scale, u32 magic) {
  u32 v;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(w), "n"(MASK << 2 * I), "r"(magic));  // w & mask | magic
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(v), "r"(0x64006400u + (2u << 2 * I) * 0x00010001u));
  return multiply_half2(v, scale);
}
