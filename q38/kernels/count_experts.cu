// How often each expert of one layer was chosen in a step, and whether it was read at all. One block.
//   ids: int32 [n], negative ones are skipped. selections, reads: int32 [EXPERTS], added to.
// Defines from the host: EXPERTS, ACT_BF16, SCALE_BF16 (both unused here).

#include "moe_common.cuh"

extern "C" __global__ void count_experts(const int* ids, int n, int* selections, int* reads) {
    __shared__ int chosen[EXPERTS];
    for (int e = threadIdx.x; e < EXPERTS; e += blockDim.x) chosen[e] = 0;
    __syncthreads();
    wait_for_previous_grid();
    let_next_grid_start();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int expert = ids[i];
        if (expert >= 0) atomicAdd(chosen + expert, 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < EXPERTS; e += blockDim.x) {
        if (chosen[e]) {
            selections[e] += chosen[e];
            reads[e] += 1;
        }
    }
}
