// Dequantizing gather of quantized KV rows: out[i] = code * scale of row slots[i], rounded once. Formats and
// reference: kv_formats.py; host side: kv_gather_cuda.py.
//
// A warp takes ROWS rows at a time and has all their bytes on the way before it uses the first: a lane reads
// 8 channels of a row at a time and writes them as whole sectors. Slots are read on the device.
//
// Defines from the host: ROW (heads * channels), BITS, GROUP, RING_GROUP (0: no ring), ROWS, WARPS, OUT (bytes a
// channel, 2 or 4), ACT_BF16, SLOT_BYTES, SCALE_BF16 (0).

#include "moe_common.cuh"

#define PIECES ((ROW / 8 + 31) / 32)  // of 8 channels, per lane

struct Piece {
  uint2 codes;
  u16 scale;
};

__device__ __forceinline__ u16 load_half(const u16* p) {
  u16 v;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

// 8 channels from `channel` of a row.
template <int Bits, int Group>
__device__ __forceinline__ Piece load_piece(const char* payload, const u16* scales, long long row, int channel) {
  Piece p;
  const char* from = payload + row * (ROW * Bits / 8) + channel * Bits / 8;
  if (Bits == 8) {
    p.codes = load8(from);
  } else {
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(p.codes.x) : "l"(from));
    p.codes.y = 0;
  }
  p.scale = load_half(scales + row * (ROW / Group) + channel / Group);
  return p;
}

// 2^23 + c has the bits of code c at its end: exact for codes made unsigned by the xor, then shifted back.
__device__ __forceinline__ float code8(u32 four, int i) {
  return __uint_as_float(__byte_perm(four ^ 0x80808080u, 0x4b000000u, 0x7440 + i)) - 8388736.f;
}

__device__ __forceinline__ float code4(u32 eight, int i) {
  return __uint_as_float((eight >> 4 * i & 15u) | 0x4b000000u) - 8388616.f;
}

__device__ __forceinline__ void write_piece(char* out, const Piece& p, bool bits8) {
  const float scale = half_to_float(p.scale);
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = (bits8 ? code8(i < 4 ? p.codes.x : p.codes.y, i & 3) : code4(p.codes.x, i)) * scale;
#if OUT == 4
  __stcs((float4*)out, make_float4(v[0], v[1], v[2], v[3]));
  __stcs((float4*)out + 1, make_float4(v[4], v[5], v[6], v[7]));
#else
  uint4 w;
  w.x = to_output(v[0]) | (u32)to_output(v[1]) << 16;
  w.y = to_output(v[2]) | (u32)to_output(v[3]) << 16;
  w.z = to_output(v[4]) | (u32)to_output(v[5]) << 16;
  w.w = to_output(v[6]) | (u32)to_output(v[7]) << 16;
  __stcs((uint4*)out, w);
#endif
}

// A negative slot leaves its row of out as it is. Grid (ceil(n / (ROWS * WARPS))).
extern "C" __global__ void __launch_bounds__(WARPS * 32)
gather(const char* __restrict__ slots, const char* __restrict__ payload, const u16* __restrict__ scales,
       const char* __restrict__ ring_payload, const u16* __restrict__ ring_scales, const int* __restrict__ owner,
       char* __restrict__ out, int n, int ring) {
  const int lane = threadIdx.x & 31, first = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * ROWS;
  long long mine = -1;
  if (lane < ROWS && first + lane < n)
    mine = SLOT_BYTES == 8 ? ((const long long*)slots)[first + lane] : ((const int*)slots)[first + lane];
#if RING_GROUP
  const int place = mine < 0 ? 0 : (int)(mine % ring);
  const bool owns = mine >= 0 && owner[place] == mine;
#endif
  Piece pieces[ROWS][PIECES];
  bool live[ROWS], hot[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const long long slot = __shfl_sync(0xffffffffu, mine, r);
    live[r] = slot >= 0;
    hot[r] = false;
#if RING_GROUP
    hot[r] = __shfl_sync(0xffffffffu, (int)owns, r);
    const int at = __shfl_sync(0xffffffffu, place, r);
#endif
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int channel = (i * 32 + lane) * 8;
      if (!live[r] || channel >= ROW) continue;
#if RING_GROUP
      if (hot[r]) {
        pieces[r][i] = load_piece<8, RING_GROUP>(ring_payload, ring_scales, at, channel);
        continue;
      }
#endif
      pieces[r][i] = load_piece<BITS, GROUP>(payload, scales, slot, channel);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int channel = (i * 32 + lane) * 8;
      if (live[r] && channel < ROW)
        write_piece(out + ((long long)(first + r) * ROW + channel) * OUT, pieces[r][i], BITS == 8 || hot[r]);
    }
}
