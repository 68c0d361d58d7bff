// Decode attention over block tables, for bf16 and fp16, head sizes 64 and 128.
//
// A launch has one thread block of 128 threads for each work item; the grid may be smaller. With
// split_count > 1 the matching merge_splits_* must follow on the same stream.
#include "paged_attention.cuh"

namespace kvtier {

template <int WIDTH>
struct DeviceTeam {
    static constexpr int LANES = WIDTH / WORD_ELEMENTS;
    static constexpr int HELD = 1;
    static constexpr int COUNT = ATTENTION_THREADS / LANES;

    int index, count, first_lane;

    // Every lane gets the sum.
    __device__ __forceinline__ float sum(const float (&parts)[1]) const {
        float total = parts[0];
        KVTIER_UNROLL
        for (int distance = LANES / 2; distance > 0; distance /= 2) {
            total += __shfl_xor_sync(0xffffffffu, total, distance);
        }
        return total;
    }
};

template <typename ELEMENT, int WIDTH>
__device__ __forceinline__ void attend(const AttentionCall& call, u64 geometry) {
    using Team = DeviceTeam<WIDTH>;
    __shared__ float records[Team::COUNT * HEADS * RECORD_FLOATS<WIDTH>];
    const KvGeometry kv = *reinterpret_cast<const KvGeometry*>(geometry);
    const int thread = int(threadIdx.x);
    const Team team{thread / Team::LANES, Team::COUNT, thread % Team::LANES};
    const u64 count = attention_work_count(call, kv);
    for (u64 index = blockIdx.x; index < count; index += gridDim.x) {
        const AttentionWork work = attention_work(call, kv, index);
        attend_share<Team, ELEMENT, WIDTH>(call, kv, work, team, records);
        __syncthreads();
        finish_share<ELEMENT, WIDTH>(
            call, work, records, Team::COUNT, threadIdx.x, ATTENTION_THREADS);
        __syncthreads();
    }
}

}  // namespace kvtier

using namespace kvtier;

#define KVTIER_ATTENTION(ELEMENT, WIDTH, SUFFIX)                                                  \
    extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS) paged_attention_##SUFFIX(     \
        u64 out, u64 queries, u64 geometry, u64 layer, u64 tables, u64 table_blocks,              \
        u64 kv_counts, u64 request_count, u64 query_heads, u64 scale_bits, u64 split_count,       \
        u64 partials) {                                                                           \
        const AttentionCall call{                                                                 \
            out, queries, reinterpret_cast<const i32*>(tables), i64(table_blocks),                \
            reinterpret_cast<const i32*>(kv_counts), request_count, query_heads, i64(layer),      \
            float_of_bits(u32(scale_bits)), split_count, reinterpret_cast<float*>(partials)};     \
        attend<ELEMENT, WIDTH>(call, geometry);                                                   \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS) merge_splits_##SUFFIX(        \
        u64 out, u64 partials, u64 row_count, u64 split_count) {                                  \
        const u64 thread = u64(blockIdx.x) * blockDim.x + threadIdx.x;                            \
        merge_splits_share<ELEMENT, WIDTH>(                                                       \
            out, reinterpret_cast<const float*>(partials), row_count, split_count,                \
            Worker{thread / 32, u64(gridDim.x) * blockDim.x / 32, threadIdx.x % 32, 32});         \
    }

KVTIER_ATTENTION(Bf16, 64, bf16_64)
KVTIER_ATTENTION(Bf16, 128, bf16_128)
KVTIER_ATTENTION(Fp16, 64, fp16_64)
KVTIER_ATTENTION(Fp16, 128, fp16_128)
