// Decode MoE over merged 2-bit expert rows: gate_up (SiLU and product in its epilogue) and down
// (routed weights and the top-k sum). Host side, contract and reference: moe_decode.py.
//
// Arithmetic. A word holds 16 codes of one column; (w & 0x03030303 << 2i) is four of them, 4^i q each, so one
// AND prepares four weights for the INT8 matrix instruction. Activations are two signed 8-bit digits
// (moe_digits.cuh). The zero point enters as the accumulator's start; scales multiply the integer sums of a group.
//
// Fragment order. The 16 rows of A are output columns, the 8 columns of B are the high and low digits of 4 tokens,
// and both sides permute k alike: lane (g, t) = (lane / 4, lane % 4) loads 16 bytes, columns 4g..4g+3 of word
// row 4j + t, and the two k-steps take codes 0, 1 and 2, 3 of every byte of that word. A lane's sums are of token t.
//
// Pipeline. Each warp copies its own words into its own stages of shared memory (cp.async) some groups
// ahead; no other warp reads them, so a warp barrier is enough. A copy instruction takes 4 word rows of
// 128 bytes, lanes in address order (out of order, copies ran at half the bandwidth on an H200), and
// swizzles them so that the read-back in fragment order has no bank conflicts. The partial sums of the
// warps of a block meet in shared memory, those of two tiles at a time in gate_up and of all tiles in down;
// one warp, another for each tile, adds them in a fixed order.
//
// With REGISTERS (one tile a block) the words go through registers instead: on an H200 plain loads bring rows from
// pinned host memory a fifth faster than cp.async.
//
// Defines from the host: HIDDEN, INTER, TOP_K, TILES13, TILES2, DEPTH13, DEPTH2, REGISTERS, SCALE_BF16,
// ACT_BF16, W2_OFFSET, S13_OFFSET, S2_OFFSET, MIN_CTAS13, MIN_CTAS2.

#include "moe_common.cuh"
#include "moe_digits.cuh"

#define KW13 (HIDDEN / 16)
#define KW2 (INTER / 16)
#define G13 (HIDDEN / 128)
#define G2 (INTER / 128)
#define WARPS13 ((G13 + 1) / 2)          // gate_up: each warp owns 2 groups of 32 gate and 32 up columns
#define LIVE13(i) (G13 % 2 == 0 || warp + (i) * WARPS13 < G13)
#define THREADS13 (WARPS13 * 32)
#define THREADS2 (TOP_K * 32)
#define SCANS ((16 * TOP_K + 31) / 32)   // 32-wide looks at the slots of up to 16 tokens
#define MAX_TOKENS 4                     // tokens of one mma
#define TOKEN_STRIDE(kw) ((kw) * 8 + 4)  // u32 per token; the 16-byte skew spreads tokens over banks
#define STAGE13 2176                     // bytes of one group of one warp: 4 x 512 words, 2 x 64 scales
#define STAGE2 1088

// Byte of the 16 bytes (word row r of 4, piece p of 8) within a copied block of 512.
__device__ __forceinline__ u32 swizzle(int r, int p) { return r * 128 + (p ^ (2 * r)) * 16; }

// h[slot] = silu(x W_gate) * (x W_up), fp32 [slots, INTER]. Grid (INTER / 32 / TILES13, slots).
// The first slot of an expert computes all slots that chose it, so a shared row is read once.
extern "C" __global__ void __launch_bounds__(THREADS13, MIN_CTAS13)
gate_up(const u16* __restrict__ x, const u64* __restrict__ table, const int* __restrict__ ids,
        float* __restrict__ h, int slots, int token_room) {
  extern __shared__ uint4 shared[];
  __shared__ int slot_list[SCANS * 32];
  __shared__ Start start[G13][MAX_TOKENS];
  __shared__ float back[G13][MAX_TOKENS];
  u32* packed = (u32*)((char*)shared + WARPS13 * DEPTH13 * STAGE13);     // [tokens][KW13][2 digits][4]
  float* partial = (float*)(packed + token_room * TOKEN_STRIDE(KW13));  // [2][warps][tokens][gate 32, up 32]

  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);  // tells the compiler that it is uniform
  const int slot = blockIdx.y;
  wait_for_previous_grid();
  let_next_grid_start();

  // The first token of the pass is this slot's own, whoever else shares the expert: read it at once.
  float4 own[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (LIVE13(i)) own[i] = load_spread(x + slot / TOP_K * HIDDEN, warp + i * WARPS13, lane);
  int other[SCANS];
#pragma unroll
  for (int i = 0; i < SCANS; ++i) other[i] = i * 32 + lane < slots ? ids[i * 32 + lane] : -1;
  const int expert = ids[slot];
  if (expert < 0) return;
  const char* row = (const char*)table[expert];
  // Group i of a warp is warp + i * WARPS13; copies take rows and pieces in address order.
  const int column = blockIdx.x * (32 * TILES13);
  const u32* words = (const u32*)row + (warp * GROUP_WORDS + (lane >> 3)) * (2 * INTER) + column + (lane & 7) * 4;
  const u16* scales = (const u16*)(row + S13_OFFSET) + warp * (2 * INTER) + ((lane >> 3) & 1) * INTER + column + (lane & 7) * 4;
  const u32 ring = shared_address(shared) + warp * (DEPTH13 * STAGE13);
  const u32 copy_to = ring + swizzle(lane >> 3, lane & 7);

  int count = 1;
  if (slots > TOP_K) {  // several tokens: find who else chose this expert
    count = 0;
#pragma unroll
    for (int i = 0; i < SCANS; ++i) {
      const bool same = other[i] == expert;
      const u32 mask = __ballot_sync(0xffffffffu, same);
      if (mask && i * 32 + __ffs(mask) - 1 < slot) return;
      if (warp == 0 && same) slot_list[count + __popc(mask & ((1u << lane) - 1))] = i * 32 + lane;
      count += __popc(mask);
    }
  } else if (threadIdx.x == 0) {
    slot_list[0] = slot;
  }

  // Step 2 * tile + i is group i of a tile; it lives in stage step % DEPTH13.
  auto request = [&](int tile, int i, int stage) {
    if (tile < TILES13 && LIVE13(i)) {
      const u32* w = words + tile * 32 + i * (WARPS13 * GROUP_WORDS * 2 * INTER);
#pragma unroll
      for (int part = 0; part < 4; ++part)  // gate rows 0-3, gate rows 4-7, up rows 0-3, up rows 4-7
        copy16(copy_to + stage * STAGE13 + part * 512, w + (part >> 1) * INTER + (part & 1) * (8 * INTER));
      if (lane < 16) copy8(ring + stage * STAGE13 + 2048 + lane * 8, scales + tile * 32 + i * (WARPS13 * 2 * INTER));
    }
    commit_copies();
  };
#if REGISTERS
  uint4 held_words[2][4];
  uint2 held_scales[2];
#endif
  auto begin = [&] {
#if REGISTERS
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (LIVE13(i)) {
#pragma unroll
        for (int part = 0; part < 4; ++part)
          held_words[i][part] = load16(words + i * (WARPS13 * GROUP_WORDS * 2 * INTER) + (part >> 1) * INTER + (part & 1) * (8 * INTER));
        held_scales[i] = load8(scales + i * (WARPS13 * 2 * INTER));
      }
#else
#pragma unroll
    for (int step = 0; step < DEPTH13; ++step) request(step / 2, step % 2, step);
#endif
  };
  auto settle = [&] {
#if REGISTERS
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (LIVE13(i)) {
#pragma unroll
        for (int part = 0; part < 4; ++part) write16(copy_to + i * STAGE13 + part * 512, held_words[i][part]);
        if (lane < 16) write8(ring + i * STAGE13 + 2048 + lane * 8, held_scales[i]);
      }
#endif
  };
  // A warp packs the groups that it multiplies, so no other warp waits for it.
  auto pack = [&](int n, int i, float4 v) {
    const int group = warp + i * WARPS13;
    float unit;
    const Start zero = pack_digits(packed + n * TOKEN_STRIDE(KW13) + group * 64, v, lane, unit);
    if (lane == 0) start[group][n] = zero, back[group][n] = unit;
  };
  begin();
  if (count > 1) __syncthreads();  // slot_list

  for (int first = 0; first < count; first += token_room) {
    const int tokens = min(count - first, token_room);
    if (first) begin();  // more tokens than fit one pass: read the row again, from L2
    for (int n = 0; n < tokens; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (LIVE13(i))
          pack(n, i, first + n ? load_spread(x + slot_list[first + n] / TOP_K * HIDDEN, warp + i * WARPS13, lane) : own[i]);
    __syncwarp();
    settle();

    const u32 mine = shared_address(packed + min(g >> 1, tokens - 1) * TOKEN_STRIDE(KW13) + (warp * GROUP_WORDS + t) * 8 + (g & 1) * 4);
    const u32 read_from = ring + swizzle(t, g);
    int next_stage = 0;
#pragma unroll 1
    for (int tile = 0; tile < TILES13; ++tile) {
      float4 out[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int stage = DEPTH13 == 2 ? i : next_stage;  // a constant where it can be
        wait_copies<DEPTH13 - 1>();
        __syncwarp();
        if (LIVE13(i)) {
          const u32 from = read_from + stage * STAGE13, scale = ring + stage * STAGE13 + 2048 + g * 8;
          const int group = warp + i * WARPS13, token = min(t, tokens - 1);
          const Start zero = start[group][token];
          const int from_zero[4] = {zero.high, zero.low, zero.high, zero.low};
          int acc[2][2][4];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint4 digits = read16(mine + (i * WARPS13 * GROUP_WORDS + 4 * j) * 32);
#pragma unroll
            for (int half = 0; half < 2; ++half)
              multiply_words(acc[half], read16(from + half * 1024 + j * 512), digits, j ? acc[half][0] : from_zero,
                             j ? acc[half][1] : from_zero);
          }
          add_scaled(out[0], acc[0], read8(scale), back[group][token]);
          add_scaled(out[1], acc[1], read8(scale + 64), back[group][token]);
        }
        __syncwarp();
        request(tile + (i + DEPTH13) / 2, (i + DEPTH13) % 2, stage);
        next_stage = next_stage + 1 == DEPTH13 ? 0 : next_stage + 1;
      }
      const int buffer = tile & 1;
      if (buffer == 0 && tile > 0) __syncthreads();  // both buffers have been added
      float* set = partial + buffer * WARPS13 * token_room * 64;
      if (t < tokens) {
        *(float4*)(set + (warp * token_room + t) * 64 + 4 * g) = out[0];
        *(float4*)(set + (warp * token_room + t) * 64 + 32 + 4 * g) = out[1];
      }
      if (buffer == 0 && tile + 1 < TILES13) continue;
      __syncthreads();
      for (int add = tile - buffer; add <= tile; ++add) {  // one warp, another for each tile
        if (warp != add % WARPS13) continue;
        const float* from = partial + (add & 1) * WARPS13 * token_room * 64;
        for (int n = 0; n < tokens; ++n) {
          float gate = 0.f, up = 0.f;
#pragma unroll
          for (int k = 0; k < WARPS13; ++k) {
            gate += from[(k * token_room + n) * 64 + lane];
            up += from[(k * token_room + n) * 64 + 32 + lane];
          }
          h[slot_list[first + n] * INTER + (blockIdx.x * TILES13 + add) * 32 + lane] = gate / (1.f + __expf(-gate)) * up;
        }
      }
    }
    wait_copies<0>();
    __syncthreads();
  }
}

// out[m] = sum over k of weight[m, k] * (h[m, k] W_down), in slot order. Grid (tokens, HIDDEN / 32 / TILES2).
// One warp per slot; its first words are on their way before the grid that writes h has finished.
extern "C" __global__ void __launch_bounds__(THREADS2, MIN_CTAS2)
down(const float* __restrict__ h, const u64* __restrict__ table, const int* __restrict__ ids,
     const float* __restrict__ weights, u16* __restrict__ out) {
  extern __shared__ uint4 shared[];  // [TOP_K][DEPTH2] stages
  __shared__ __align__(16) u32 packed[TOP_K][TOKEN_STRIDE(KW2)];
  __shared__ __align__(16) float partial[TILES2][TOP_K][32];

  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);  // tells the compiler that it is uniform
  const int slot = blockIdx.x * TOP_K + warp;
  const int expert = ids[slot];
  const char* row = (const char*)table[max(expert, 0)];
  const int column = blockIdx.y * (32 * TILES2) + (lane & 7) * 4;
  const u32* words = (const u32*)(row + W2_OFFSET) + (lane >> 3) * HIDDEN + column;
  const u16* scales = (const u16*)(row + S2_OFFSET) + column;
  const u32 ring = shared_address(shared) + warp * (DEPTH2 * STAGE2);
  const u32 copy_to = ring + swizzle(lane >> 3, lane & 7);

  auto request = [&](int tile, int gi, int stage) {
    if (tile < TILES2) {
      const u32 to = copy_to + stage * STAGE2;
      copy16(to, words + tile * 32 + gi * (GROUP_WORDS * HIDDEN));
      copy16(to + 512, words + tile * 32 + gi * (GROUP_WORDS * HIDDEN) + 4 * HIDDEN);
      if (lane < 8) copy8(ring + stage * STAGE2 + 1024 + lane * 8, scales + tile * 32 + gi * HIDDEN);
    }
    commit_copies();
  };
#if REGISTERS
  uint4 held_words[G2][2];
  uint2 held_scales[G2];
#pragma unroll
  for (int gi = 0; gi < G2; ++gi) {
    held_words[gi][0] = load16(words + gi * (GROUP_WORDS * HIDDEN));
    held_words[gi][1] = load16(words + gi * (GROUP_WORDS * HIDDEN) + 4 * HIDDEN);
    held_scales[gi] = load8(scales + gi * HIDDEN);
  }
#else
#pragma unroll
  for (int step = 0; step < DEPTH2; ++step) request(step / G2, step % G2, step);
#endif
  const float factor = expert < 0 ? 0.f : weights[slot];
  Start zero[G2] = {};
  float back[G2] = {};

  wait_for_previous_grid();
  let_next_grid_start();

  if (expert >= 0) {
    float4 v[G2];
#pragma unroll
    for (int gi = 0; gi < G2; ++gi) v[gi] = load_spread(h + (long long)slot * INTER, gi, lane);
#pragma unroll
    for (int gi = 0; gi < G2; ++gi) zero[gi] = pack_digits(packed[warp] + gi * 64, v[gi], lane, back[gi]);
  }
#if REGISTERS
#pragma unroll
  for (int gi = 0; gi < G2; ++gi) {
    write16(copy_to + gi * STAGE2, held_words[gi][0]);
    write16(copy_to + gi * STAGE2 + 512, held_words[gi][1]);
    if (lane < 8) write8(ring + gi * STAGE2 + 1024 + lane * 8, held_scales[gi]);
  }
#endif

  const u32 mine = shared_address(packed[warp]) + t * 32 + (g & 1) * 16, read_from = ring + swizzle(t, g);
  int next_stage = 0;
#pragma unroll 1
  for (int tile = 0; tile < TILES2; ++tile) {
    float4 sum = {};
#pragma unroll
    for (int gi = 0; gi < G2; ++gi) {
      const int stage = DEPTH2 == G2 ? gi : next_stage;
      wait_copies<DEPTH2 - 1>();
      __syncwarp();
      const u32 from = read_from + stage * STAGE2;
      const int from_zero[4] = {zero[gi].high, zero[gi].low, zero[gi].high, zero[gi].low};
      int acc[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        multiply_words(acc, read16(from + j * 512), read16(mine + (2 * gi + j) * 128), j ? acc[0] : from_zero,
                       j ? acc[1] : from_zero);
      add_scaled(sum, acc, read8(ring + stage * STAGE2 + 1024 + g * 8), back[gi]);
      __syncwarp();
      request(tile + (gi + DEPTH2) / G2, (gi + DEPTH2) % G2, stage);
      next_stage = next_stage + 1 == DEPTH2 ? 0 : next_stage + 1;
    }
    if (t == 0) {  // an absent expert leaves its operands unwritten: select, since 0 * NaN is NaN
      const float4 none = {};
      *(float4*)&partial[tile][warp][4 * g] =
          expert < 0 ? none : make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
    }
  }
  __syncthreads();
  for (int tile = warp; tile < TILES2; tile += TOP_K) {
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) total += partial[tile][k][lane];
    out[(long long)blockIdx.x * HIDDEN + (blockIdx.y * TILES2 + tile) * 32 + lane] = to_output(total);
  }
}
