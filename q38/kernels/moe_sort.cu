// Sort slots by expert, stably, and cut them into blocks of one expert: three small kernels in place of a
// general sort. Host side and contract: moe_sort.py. An expert stands at its position in the order of experts;
// everything but `ids` names experts by position.
//
// A tile is TILE slots. count: slots of each expert in each tile. plan (one block): where each expert and each
// tile of it begins, and the list of blocks. place: each warp ranks its slots among the slots of its tile.
//
// Defines from the host: EXPERTS, TILE, BLOCK_SLOTS, WARPS.

#include "moe_common.cuh"

#define THREADS (WARPS * 32)
#define WARP_SLOTS (TILE / WARPS)
#define PER_THREAD ((EXPERTS + 1023) / 1024)  // experts of a thread of plan

// counts[tile, e] = slots of the tile that chose e. Grid (tiles).
extern "C" __global__ void __launch_bounds__(THREADS)
count(const int* ids, const int* positions, int* counts, int slots) {
  __shared__ int seen[EXPERTS];
  wait_for_previous_grid();
  let_next_grid_start();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) seen[e] = 0;
  __syncthreads();
  const int end = min(slots, (int)(blockIdx.x + 1) * TILE);
  for (int i = blockIdx.x * TILE + threadIdx.x; i < end; i += THREADS) {
    const int e = ids[i];
    if (e >= 0) atomicAdd(seen + positions[e], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[blockIdx.x * EXPERTS + e] = seen[e];
}

// Inclusive sum over the 1024 threads of the block.
__device__ __forceinline__ int2 scan(int2 v, int2* warp_sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int x = __shfl_up_sync(0xffffffffu, v.x, o), y = __shfl_up_sync(0xffffffffu, v.y, o);
    if (lane >= o) v.x += x, v.y += y;
  }
  if (lane == 31) warp_sums[warp] = v;
  __syncthreads();
  for (int w = 0; w < warp; ++w) v.x += warp_sums[w].x, v.y += warp_sums[w].y;
  __syncthreads();
  return v;
}

// counts becomes the first sorted slot of each expert in each tile; fills the list of blocks, and where the slots and
// the blocks of each expert begin (of EXPERTS: where all end).
extern "C" __global__ void __launch_bounds__(1024)
plan(int* counts, int* __restrict__ block_expert, int* __restrict__ block_start, int* __restrict__ block_live,
     int* __restrict__ first_slot, int* __restrict__ first_block, int tiles, int room) {
  __shared__ int2 warp_sums[32];
  __shared__ int2 before;  // slots and blocks of the experts of earlier rounds
  wait_for_previous_grid();
  let_next_grid_start();
  if (threadIdx.x == 0) before = make_int2(0, 0);
  __syncthreads();
#pragma unroll 1
  for (int round = 0; round < PER_THREAD; ++round) {
    const int e = round * 1024 + threadIdx.x;
    int total = 0;
    if (e < EXPERTS)
#pragma unroll 8
      for (int tile = 0; tile < tiles; ++tile) total += counts[tile * EXPERTS + e];
    const int blocks = (total + BLOCK_SLOTS - 1) / BLOCK_SLOTS;
    const int2 sum = scan(make_int2(total, blocks), warp_sums), base = before;
    const int first = base.x + sum.x - total;
    if (e < EXPERTS) {
      first_slot[e] = first;
      first_block[e] = base.y + sum.y - blocks;
      int at = first;
#pragma unroll 8
      for (int tile = 0; tile < tiles; ++tile) {
        const int n = counts[tile * EXPERTS + e];
        counts[tile * EXPERTS + e] = at;
        at += n;
      }
      for (int b = 0; b < blocks; ++b) {
        const int to = base.y + sum.y - blocks + b;
        block_expert[to] = e;
        block_start[to] = first + b * BLOCK_SLOTS;
        block_live[to] = min(BLOCK_SLOTS, total - b * BLOCK_SLOTS);
      }
    }
    __syncthreads();
    if (threadIdx.x == 1023) before = make_int2(base.x + sum.x, base.y + sum.y);
    __syncthreads();
  }
  if (threadIdx.x == 0) first_slot[EXPERTS] = before.x, first_block[EXPERTS] = before.y;
  for (int b = before.y + threadIdx.x; b < room; b += 1024) block_expert[b] = -1;
}

// order[place] = slot. Grid (tiles); starts are the counts that plan replaced.
extern "C" __global__ void __launch_bounds__(THREADS)
place(const int* ids, const int* positions, const int* starts, int* __restrict__ order, int slots) {
  wait_for_previous_grid();
  let_next_grid_start();
  __shared__ int next[WARPS][EXPERTS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first = blockIdx.x * TILE + warp * WARP_SLOTS, end = min(slots, first + WARP_SLOTS);
  for (int i = threadIdx.x; i < WARPS * EXPERTS; i += THREADS) next[0][i] = 0;
  __syncthreads();
  for (int i = first + lane; i < end; i += 32)
    if (ids[i] >= 0) atomicAdd(&next[warp][positions[ids[i]]], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
    int at = starts[blockIdx.x * EXPERTS + e];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const int n = next[w][e];
      next[w][e] = at;
      at += n;
    }
  }
  __syncthreads();
  for (int i = first; i < end; i += 32) {
    const int id = i + lane < end ? ids[i + lane] : -1, e = id < 0 ? -1 : positions[id];
    const u32 same = __match_any_sync(0xffffffffu, e), earlier = same & ((1u << lane) - 1);
    const int at = e < 0 ? 0 : next[warp][e];
    __syncwarp();
    if (e >= 0) {
      order[at + __popc(earlier)] = i + lane;
      if (earlier == 0) next[warp][e] = at + __popc(same);
    }
    __syncwarp();
  }
}
