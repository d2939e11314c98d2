// Prefill MoE on Hopper: pack and grouped as in moe_prefill.cu, with the warpgroup matrix instruction (wgmma),
// which reads its weights from registers and its tokens from shared memory. Host side, contract and reference:
// moe_prefill_cuda.py and moe_prefill.py. Machine code for sm_90a alone.
//
// A warpgroup owns two tiles of 64 columns: 64 gate and the matching 64 up columns, or 128 of down. A word becomes
// fp16 weights once per block, exact, in the registers that the instruction takes them from; while it runs, the
// weights of the next k-step are made. The tokens of a block, up to BLOCK_TOKENS, and the words of a group
// of inputs are copied to shared memory some groups ahead. Sums are fp32 over the whole input
// dimension. A block computes as many tokens as it has, in steps of 16.
//
// Order of inputs. The instruction's k index runs as its register fragment does: of 64 inputs (word rows t = 0..3),
// k-step s takes from word row t the pairs 2s (k = 2t, 2t + 1) and 2s + 1 (k = 8 + 2t, 9 + 2t). Packed activations
// lie in that order, so both sides permute k alike.
//
// Defines from the host: INPUTS, OUTPUTS, GATED, TOP_K, W_OFFSET, S_OFFSET, SCALE_BF16, ACT_BF16, BLOCK_TOKENS,
// WARPGROUPS (1 or 2), MIN_CTAS, TILES (column tiles that a block works through), STAGES (of shared memory, 3 or more).

#include "moe_common.cuh"

#define GROUPS (INPUTS / 128)
#define COLUMNS (GATED ? 2 * OUTPUTS : OUTPUTS)   // columns of the packed matrix
#define SECOND (GATED ? OUTPUTS : 64)             // from a warpgroup's first tile of columns to its second
#define GROUP_COLUMNS (GATED ? 64 : 128)          // output columns of a warpgroup
#define TILE_COLUMNS (WARPGROUPS * GROUP_COLUMNS)
#define STEPS (TILES * GROUPS)
#define EVEN (OUTPUTS % (TILES * TILE_COLUMNS) == 0)  // every warpgroup has columns at every step
#define THREADS (WARPGROUPS * 128)
#define AHEAD (STAGES - 2)                       // steps that copies run ahead
#define TOKEN_STAGE (BLOCK_TOKENS * 256)          // two tiles of 64 inputs, 128 bytes a token, swizzled
#define WORD_ROW 288                              // 64 words and 32 bytes that spread word rows over banks
#define WORD_STAGE (2 * GROUP_WORDS * WORD_ROW + 256)  // words of two tiles, then their scales

// packed[row] and back[row] (the inverse power of two) of a row of x [rows, INPUTS]. A whole block of at most a warp a group.
__device__ __forceinline__ void pack_row(const u16* x, u32* __restrict__ packed, float* __restrict__ back, int row, u32* warp_max) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  x += (long long)row * INPUTS;
  packed += (long long)row * (INPUTS / 2);
  const float4 own = load_activations(x, warp, lane);  // the warp's first group, in most models its only one
  u32 m = max_magnitude(own);
  for (int group = warp + warps; group < GROUPS; group += warps) m = max(m, max_magnitude(load_activations(x, group, lane)));
  m = __reduce_max_sync(0xffffffffu, m);
  if (lane == 0) warp_max[warp] = m;
  __syncthreads();
  m = __reduce_max_sync(0xffffffffu, lane < warps ? warp_max[lane] : 0u);
  const u32 exponent = scale_exponent(m);
  for (int group = warp; group < GROUPS; group += warps) {
    float sum;
    const float4 v = group == warp ? own : load_activations(x, group, lane);
    const uint2 pair = pack_pairs(v, __uint_as_float(exponent << 23), lane, sum);
    u32* to = packed + group * 64 + (lane >> 4) * 32 + (lane & 3) * 8 + ((lane >> 2) & 3);
    to[0] = pair.x;
    to[4] = pair.y;
  }
  if (threadIdx.x == 0) back[row] = __uint_as_float((254u - exponent) << 23);
}

#include "moe_pack.cuh"

// Shared memory descriptor: rows of 128 bytes in the 128-byte swizzle, 1024 bytes from 8 rows to the next 8. Its low
// half holds the address in units of 16 bytes.
__device__ __forceinline__ u32 describe(u32 shared) { return shared >> 4 | 1u << 16; }
__device__ __forceinline__ u64 descriptor(u32 low) { return (u64)(1024 >> 4 | 1u << 30) << 32 | low; }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }

// d [64, N] += weights [64, 16] in registers times tokens [16, N] in shared memory.
#define LIST_8 "%5,%6,%7,%8,%9,%10,%11,%12"
#define LIST_16 LIST_8 ",%13,%14,%15,%16,%17,%18,%19,%20"
#define LIST_24 LIST_16 ",%21,%22,%23,%24,%25,%26,%27,%28"
#define LIST_32 LIST_24 ",%29,%30,%31,%32,%33,%34,%35,%36"
#define LIST_40 LIST_32 ",%37,%38,%39,%40,%41,%42,%43,%44"
#define LIST_48 LIST_40 ",%45,%46,%47,%48,%49,%50,%51,%52"
#define LIST_56 LIST_48 ",%53,%54,%55,%56,%57,%58,%59,%60"
#define LIST_64 LIST_56 ",%61,%62,%63,%64,%65,%66,%67,%68"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8 SUMS_4(0), SUMS_4(4)
#define SUMS_16 SUMS_8, SUMS_4(8), SUMS_4(12)
#define SUMS_24 SUMS_16, SUMS_4(16), SUMS_4(20)
#define SUMS_32 SUMS_24, SUMS_4(24), SUMS_4(28)
#define SUMS_40 SUMS_32, SUMS_4(32), SUMS_4(36)
#define SUMS_48 SUMS_40, SUMS_4(40), SUMS_4(44)
#define SUMS_56 SUMS_48, SUMS_4(48), SUMS_4(52)
#define SUMS_64 SUMS_56, SUMS_4(56), SUMS_4(60)
#define PRODUCT(n, list, ...)                                                                                    \
  if constexpr (N == n)                                                                                          \
  asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #n                        \
               "k16.f32.f16.f16 {" list "}, {%0,%1,%2,%3}, %4, p, 1, 1, 0;}"                                     \
               : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]), "+l"(tokens), __VA_ARGS__)

template <int N>
__device__ __forceinline__ void product(float (&d)[N / 2], u32 (&a)[4], u64 tokens) {
  PRODUCT(16, LIST_8, SUMS_8);
  PRODUCT(32, LIST_16, SUMS_16);
  PRODUCT(48, LIST_24, SUMS_24);
  PRODUCT(64, LIST_32, SUMS_32);
  PRODUCT(80, LIST_40, SUMS_40);
  PRODUCT(96, LIST_48, SUMS_48);
  PRODUCT(112, LIST_56, SUMS_56);
  PRODUCT(128, LIST_64, SUMS_64);
}

// The fragment of k-step S of four word rows: w holds the words of rows g and g + 8, scales theirs, twice each.
template <int S>
__device__ __forceinline__ void make_weights(u32 (&a)[4], uint2 w, const u32 (&scale)[2], u32 magic) {
  const u32 low = w.x >> (S / 2 * 8), high = w.y >> (S / 2 * 8);
  a[0] = weight<S % 2 * 2>(low, scale[0], magic);
  a[1] = weight<S % 2 * 2>(high, scale[1], magic);
  a[2] = weight<S % 2 * 2 + 1>(low, scale[0], magic);
  a[3] = weight<S % 2 * 2 + 1>(high, scale[1], magic);
}

// k-step S of 64 inputs for both tiles: `tokens` describes the inputs' tokens, a holds the fragments of the last two steps.
template <int N, int S>
__device__ __forceinline__ void multiply_step(float (&acc)[2][N / 2], u32 (&a)[2][2][4], uint2 w0, uint2 w1,
                                              const u32 (&scale)[2][2], u32 tokens, u32 magic) {
  wait_products<1>();  // the fragments of two steps ago are free
  make_weights<S>(a[S % 2][0], w0, scale[0], magic);
  make_weights<S>(a[S % 2][1], w1, scale[1], magic);
  begin_products();
  product<N>(acc[0], a[S % 2][0], descriptor(tokens + S * 2));
  product<N>(acc[1], a[S % 2][1], descriptor(tokens + S * 2));
  commit_products();
}

struct Block {
  const char* row;
  const u32* packed;
  const float* back;
  const float* weights;
  const int* order;  // of the block's first slot
  u16* out;
  int* slots;        // shared
  float* factors;    // shared
  u32 tokens_at, words_at;
  int live, column;  // column: the warpgroup's first
};

// One block of tokens against TILES column tiles. Step i is group i % GROUPS of tile i / GROUPS, in stage i % STAGES.
template <int N>
__device__ __forceinline__ void multiply_block(const Block& block) {
  constexpr int COPIES = N * 16 / THREADS;  // 16-byte pieces of tokens, per thread and group
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const u32* words = (const u32*)(block.row + W_OFFSET) + (thread >> 4) * COLUMNS + (thread & 15) * 4 + block.column;
  const u16* scales = (const u16*)(block.row + S_OFFSET) + (thread >> 3) * SECOND + (thread & 7) * 8 + block.column;
  const u32 words_to = block.words_at + (thread >> 4) * WORD_ROW + (thread & 15) * 16;
  const u32 scales_to = block.words_at + 2 * GROUP_WORDS * WORD_ROW + thread * 16;
  int word_step = 0, word_group = 0, word_column = block.column;
  auto request_words = [&] {
    if (word_step < STEPS && (EVEN || word_column < OUTPUTS)) {
      const u32 stage = word_step % STAGES * (WARPGROUPS * WORD_STAGE);
      copy16(words_to + stage, words);
      copy16(words_to + stage + GROUP_WORDS * WORD_ROW, words + SECOND);
      if (thread < 16) copy16(scales_to + stage, scales);
    }
    ++word_step;
    words += GROUP_WORDS * COLUMNS;
    scales += COLUMNS;
    if (++word_group == GROUPS) {
      word_group = 0;
      word_column += TILE_COLUMNS;
      words += TILE_COLUMNS - GROUPS * GROUP_WORDS * COLUMNS;
      scales += TILE_COLUMNS - GROUPS * COLUMNS;
    }
  };
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) request_words();
  float factor = 0.f;
  if (threadIdx.x < N) {
    const int slot = block.order[min((int)threadIdx.x, block.live - 1)];
    block.slots[threadIdx.x] = slot;
    factor = block.back[GATED ? slot / TOP_K : slot] * (GATED ? 1.f : block.weights[slot]);
  }
  __syncthreads();

  const int row = threadIdx.x >> 4, piece = threadIdx.x & 15;
  const u32 tokens_to = block.tokens_at + (piece >> 3) * (BLOCK_TOKENS * 128) + row * 128 + ((piece ^ row) & 7) * 16;
  u32 from[COPIES];  // in units of 16 bytes
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const int slot = block.slots[row + i * (THREADS / 16)];
    from[i] = (GATED ? slot / TOP_K : slot) * (INPUTS / 8) + piece;
  }
  int token_step = 0, token_group = 0;
  auto request_tokens = [&] {
    if (token_step < STEPS) {
      const u32 to = tokens_to + token_step % STAGES * TOKEN_STAGE;
#pragma unroll
      for (int i = 0; i < COPIES; ++i) copy16(to + i * (THREADS / 16 * 128), (const uint4*)block.packed + from[i] + token_group * 16);
    }
    commit_copies();
    ++token_step;
    token_group = token_group + 1 == GROUPS ? 0 : token_group + 1;
  };
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) request_tokens();
  if (threadIdx.x < N) block.factors[threadIdx.x] = factor;

  // Unknown to the compiler, so that it stays in a register and the masks are immediate operands.
  const u32 magic = 0x64006400u + blockIdx.z;
  const u32 words_from = block.words_at + t * WORD_ROW + (warp * 16 + 2 * g) * 4;
  const u32 scales_from = block.words_at + 2 * GROUP_WORDS * WORD_ROW + (warp * 16 + 2 * g) * 2;
  const u32 tokens_from = describe(block.tokens_at);
  float acc[2][N / 2] = {};
  u32 a[2][2][4];  // [k-step parity][part]
  int group = 0, column = block.column;
#pragma unroll 1
  for (int step = 0; step < STEPS; ++step) {
    wait_copies<AHEAD - 1>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    // Into the stage of two steps ago, whose products ended before the last k-step of the step before began.
    request_words();
    request_tokens();
    if (!EVEN && column >= OUTPUTS) continue;  // a warpgroup without columns only helps with the tokens
    const u32 stage = step % STAGES * (WARPGROUPS * WORD_STAGE);
    const u32 tokens = tokens_from + step % STAGES * (TOKEN_STAGE / 16);
    uint2 w[2][2];
    u32 scale[2][2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int j = 0; j < 2; ++j) w[part][j] = read8(words_from + stage + (part * GROUP_WORDS + 4 * j) * WORD_ROW);
      const u32 pair = read4(scales_from + stage + part * 128);
      scale[part][0] = twice(scale_low(pair));
      scale[part][1] = twice(scale_high(pair));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const u32 at = tokens + j * (BLOCK_TOKENS * 128 / 16);
      multiply_step<N, 0>(acc, a, w[0][j], w[1][j], scale, at, magic);
      multiply_step<N, 1>(acc, a, w[0][j], w[1][j], scale, at, magic);
      multiply_step<N, 2>(acc, a, w[0][j], w[1][j], scale, at, magic);
      multiply_step<N, 3>(acc, a, w[0][j], w[1][j], scale, at, magic);
    }
    if (++group < GROUPS) continue;
    wait_products<0>();
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int place = j * 8 + 2 * t + odd;
        if (place >= block.live) continue;
        u16* to = block.out + (long long)block.slots[place] * OUTPUTS + column + warp * 16 + 2 * g;
        float v[2][2];  // columns 2g and 2g + 1 of both parts
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          v[part][0] = acc[part][4 * j + odd] * block.factors[place];
          v[part][1] = acc[part][4 * j + 2 + odd] * block.factors[place];
        }
#if GATED
        v[0][0] = v[0][0] / (1.f + __expf(-v[0][0])) * v[1][0];
        v[0][1] = v[0][1] / (1.f + __expf(-v[0][1])) * v[1][1];
#endif
#pragma unroll
        for (int part = 0; part < (GATED ? 1 : 2); ++part)
          *(u32*)(to + part * 64) = to_output(v[part][0]) | (u32)to_output(v[part][1]) << 16;
      }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[0][i] = acc[1][i] = 0.f;
    group = 0;
    column += TILE_COLUMNS;
  }
}

// out[slot, n] for the slots and columns of the blocks of the experts from `begin` to before `end`.
// Grid (columns / (TILES * TILE_COLUMNS), at least as many blocks). A loop over blocks here would serialise the products.
// GATED: silu(gate) * up of token slot / TOP_K. Else: the routed weight times the product of row `slot`.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
grouped(const u32* packed, const float* back, const u64* table, const int* order, const int* block_expert,
        const int* block_start, const int* block_live, const int* first_block, const float* weights, u16* out,
        int begin, int end) {
  extern __shared__ char shared[];
  __shared__ int slots[BLOCK_TOKENS];
  __shared__ float factors[BLOCK_TOKENS];
  wait_for_previous_grid();
  let_next_grid_start();
  const int i = first_block[begin] + blockIdx.y;
  if (i >= first_block[end]) return;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  Block block;
  block.row = (const char*)table[block_expert[i]];
  block.packed = packed;
  block.back = back;
  block.weights = weights;
  block.order = order + block_start[i];
  block.out = out;
  block.slots = slots;
  block.factors = factors;
  block.tokens_at = (shared_address(shared) + 1023) & ~1023u;
  block.words_at = block.tokens_at + STAGES * TOKEN_STAGE + warpgroup * WORD_STAGE;
  block.live = block_live[i];
  block.column = blockIdx.x * (TILES * TILE_COLUMNS) + warpgroup * GROUP_COLUMNS;
  switch ((block.live + 15) / 16) {  // each size is code of its own: its sums must have fixed registers
    case 1: return multiply_block<16>(block);
    case 2: return multiply_block<32>(block);
    case 3: return multiply_block<48>(block);
    case 4: return multiply_block<64>(block);
#if BLOCK_TOKENS > 64
    case 5: return multiply_block<80>(block);
#endif
#if BLOCK_TOKENS > 80
    case 6: return multiply_block<96>(block);
#endif
#if BLOCK_TOKENS > 96
    case 7: return multiply_block<112>(block);
    case 8: return multiply_block<128>(block);
#endif
  }
}
