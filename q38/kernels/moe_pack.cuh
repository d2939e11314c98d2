// The pack kernel of both prefill sources, over the pack_row that each has defined.

#pragma once

// Row blockIdx.x; of down's input, the slots of the experts from `begin` to before `end`. Grid (rows), or fewer there.
extern "C" __global__ void pack(const u16* x, u32* __restrict__ packed, float* __restrict__ back, const int* order,
                                const int* first_slot, int begin, int end) {
  __shared__ u32 warp_max[32];
  wait_for_previous_grid();
  let_next_grid_start();
#if GATED
  pack_row(x, packed, back, blockIdx.x, warp_max);
#else
  const int last = first_slot[end];
  for (int i = first_slot[begin] + blockIdx.x; i < last; i += gridDim.x) {
    pack_row(x, packed, back, order[i], warp_max);
    __syncthreads();
  }
#endif
}
