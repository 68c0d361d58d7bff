// Copies of KV by a capped grid: the launch decides how many SMs they may take from compute.
//
// All arguments are 64 bits wide. Long runs belong to the copy engines (copy_paths.py); these
// kernels are for the many short ones, and for copies within the device.
#include "kv_core.cuh"

namespace kvtier {

constexpr unsigned WARP_LANES = 32;
// Bytes of one token and head fill half a warp or less.
constexpr unsigned ROW_LANES = 16;

template <unsigned LANES>
__device__ __forceinline__ Worker this_worker() {
    const u64 thread = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    return Worker{
        thread / LANES, u64(gridDim.x) * blockDim.x / LANES, threadIdx.x % LANES, LANES};
}

}  // namespace kvtier

using namespace kvtier;

// The bound on threads lets a block be as large as it can be. Smaller bounds make the compiler
// take fewer registers than four loads in flight need.
#define KVTIER_COPY_KERNEL extern "C" __global__ void __launch_bounds__(1024)

KVTIER_COPY_KERNEL copy_runs(u64 table, u64 run_count, u64 tiles_per_run) {
    copy_runs_share(table, run_count, tiles_per_run, this_worker<WARP_LANES>());
}

KVTIER_COPY_KERNEL gather_blocks(
    u64 runs, u64 run_count, u64 blocks, u64 slots, u64 block_count, u64 tiles_per_run) {
    copy_blocks_share<Way::GATHER>(
        block_runs(runs, run_count), reinterpret_cast<const u64*>(blocks),
        reinterpret_cast<const u64*>(slots), block_count, tiles_per_run,
        this_worker<WARP_LANES>());
}

KVTIER_COPY_KERNEL scatter_blocks(
    u64 runs, u64 run_count, u64 blocks, u64 slots, u64 block_count, u64 tiles_per_run) {
    copy_blocks_share<Way::SCATTER>(
        block_runs(runs, run_count), reinterpret_cast<const u64*>(blocks),
        reinterpret_cast<const u64*>(slots), block_count, tiles_per_run,
        this_worker<WARP_LANES>());
}

// For copy-on-write: no block may be a source and a target of one launch.
KVTIER_COPY_KERNEL copy_blocks(
    u64 runs, u64 run_count, u64 sources, u64 targets, u64 block_count, u64 tiles_per_run) {
    copy_blocks_share<Way::WITHIN>(
        block_runs(runs, run_count), reinterpret_cast<const u64*>(sources),
        reinterpret_cast<const u64*>(targets), block_count, tiles_per_run,
        this_worker<WARP_LANES>());
}

// Keys and values of a step's tokens to their places, in one launch for each layer.
KVTIER_COPY_KERNEL write_kv(
    u64 keys, u64 key_token_step, u64 values, u64 value_token_step, u64 places, u64 token_count,
    u64 geometry, u64 layer) {
    const NewTokens tokens{
        keys, key_token_step, values, value_token_step, reinterpret_cast<const i64*>(places),
        token_count};
    write_kv_share(
        tokens, *reinterpret_cast<const KvGeometry*>(geometry), static_cast<i64>(layer),
        this_worker<ROW_LANES>());
}
