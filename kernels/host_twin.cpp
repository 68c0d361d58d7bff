// The kernels on the host: the same functions, with every lane and every thread block in turn.
//
// A filter that tests start once: a launch on standard input, the memory afterwards on standard
// output. All numbers are 64 bits, little-endian:
//
//     name length, name, grid_count, block_threads,
//     memory count, then for each: length, misalignment, bytes;
//     reference count, then for each: memory, offset in it, the memory whose address is added there
//
// Memory 0 holds the launch's arguments. Built with sanitizers, every memory ends where it ends: a
// byte beside it, or a word at an odd address, ends the process with a report.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(place, length) ((void)(place), (void)(length))
#endif

#include "kv_core.cuh"
#include "paged_attention.cuh"

namespace {

using namespace kvtier;

struct Launch {
    std::string name;
    u64 grid_count, block_threads;
    const u64* arguments;
    u64 argument_count;
};

[[noreturn]] void refuse(const std::string& why) {
    std::fprintf(stderr, "host_twin: %s\n", why.c_str());
    std::exit(2);
}

// ----------------------------------------------------------------------------------- kernels

template <typename SHARE>
void for_each_lane(const Launch& launch, u32 lanes, SHARE share) {
    const u64 count = launch.grid_count * launch.block_threads / lanes;
    for (u64 index = 0; index < count; ++index) {
        for (u32 lane = 0; lane < lanes; ++lane) share(Worker{index, count, lane, lanes});
    }
}

template <Way WAY>
void copy_blocks_twin(const Launch& launch) {
    const u64* a = launch.arguments;
    for_each_lane(launch, 32, [&](const Worker& worker) {
        copy_blocks_share<WAY>(
            block_runs(a[0], a[1]), reinterpret_cast<const u64*>(a[2]),
            reinterpret_cast<const u64*>(a[3]), a[4], a[5], worker);
    });
}

void copy_runs_twin(const Launch& launch) {
    const u64* a = launch.arguments;
    for_each_lane(launch, 32, [&](const Worker& worker) {
        copy_runs_share(a[0], a[1], a[2], worker);
    });
}

void write_kv_twin(const Launch& launch) {
    const u64* a = launch.arguments;
    const NewTokens tokens{a[0], a[1], a[2], a[3], reinterpret_cast<const i64*>(a[4]), a[5]};
    for_each_lane(launch, 16, [&](const Worker& worker) {
        write_kv_share(tokens, *reinterpret_cast<const KvGeometry*>(a[6]), i64(a[7]), worker);
    });
}

template <int WIDTH>
struct HostTeam {
    static constexpr int HELD = WIDTH / WORD_ELEMENTS;

    int index, count;
    static constexpr int first_lane = 0;

    // In the order of the GPU's exchange between lanes.
    float sum(const float (&parts)[HELD]) const {
        float totals[HELD];
        std::memcpy(totals, parts, sizeof totals);
        for (int distance = HELD / 2; distance > 0; distance /= 2) {
            for (int lane = 0; lane < distance; ++lane) totals[lane] += totals[lane + distance];
        }
        return totals[0];
    }
};

template <typename ELEMENT, int WIDTH>
void attention_twin(const Launch& launch) {
    const u64* a = launch.arguments;
    const AttentionCall call{
        a[0], a[1], reinterpret_cast<const i32*>(a[4]), i64(a[5]),
        reinterpret_cast<const i32*>(a[6]), a[7], a[8], i64(a[3]), float_of_bits(u32(a[9])), a[10],
        reinterpret_cast<float*>(a[11])};
    const KvGeometry kv = *reinterpret_cast<const KvGeometry*>(a[2]);
    constexpr int teams = ATTENTION_THREADS / HostTeam<WIDTH>::HELD;
    for (u64 block = 0; block < launch.grid_count; ++block) {
        const u64 count = attention_work_count(call, kv);
        for (u64 index = block; index < count; index += launch.grid_count) {
            std::vector<float> records(teams * HEADS * RECORD_FLOATS<WIDTH>);
            const AttentionWork work = attention_work(call, kv, index);
            for (int team = 0; team < teams; ++team) {
                attend_share<HostTeam<WIDTH>, ELEMENT, WIDTH>(
                    call, kv, work, HostTeam<WIDTH>{team, teams}, records.data());
            }
            for (u32 thread = 0; thread < u32(ATTENTION_THREADS); ++thread) {
                finish_share<ELEMENT, WIDTH>(
                    call, work, records.data(), teams, thread, ATTENTION_THREADS);
            }
        }
    }
}

template <typename ELEMENT, int WIDTH>
void merge_splits_twin(const Launch& launch) {
    const u64* a = launch.arguments;
    for_each_lane(launch, 32, [&](const Worker& worker) {
        merge_splits_share<ELEMENT, WIDTH>(
            a[0], reinterpret_cast<const float*>(a[1]), a[2], a[3], worker);
    });
}

// -------------------------------------------------------- parts of kernels, for tests of their own

// (out, geometry, rows of layer, block, head and token, row count): offsets of key and value.
void kv_addresses_twin(const Launch& launch) {
    const u64* a = launch.arguments;
    u64* out = reinterpret_cast<u64*>(a[0]);
    const KvGeometry& kv = *reinterpret_cast<const KvGeometry*>(a[1]);
    const i64* rows = reinterpret_cast<const i64*>(a[2]);
    for (u64 row = 0; row < a[3]; ++row) {
        const i64* at = rows + 4 * row;
        out[2 * row] = key_address(kv, at[0], at[1], at[2], at[3]);
        out[2 * row + 1] = value_address(kv, at[0], at[1], at[2], at[3]);
    }
}

// (floats, bits of 16, count)
template <typename ELEMENT>
void to_float_twin(const Launch& launch) {
    const u64* a = launch.arguments;
    for (u64 index = 0; index < a[2]; ++index) {
        reinterpret_cast<float*>(a[0])[index] =
            ELEMENT::to_float(reinterpret_cast<const u16*>(a[1])[index]);
    }
}

// (bits of 16, floats, count)
template <typename ELEMENT>
void from_float_twin(const Launch& launch) {
    const u64* a = launch.arguments;
    for (u64 index = 0; index < a[2]; ++index) {
        reinterpret_cast<u16*>(a[0])[index] =
            ELEMENT::from_float(reinterpret_cast<const float*>(a[1])[index]);
    }
}

struct Twin {
    const char* name;
    u64 argument_count;
    void (*run)(const Launch&);
};

const Twin TWINS[] = {
    {"copy_runs", 3, copy_runs_twin},
    {"gather_blocks", 6, copy_blocks_twin<Way::GATHER>},
    {"scatter_blocks", 6, copy_blocks_twin<Way::SCATTER>},
    {"copy_blocks", 6, copy_blocks_twin<Way::WITHIN>},
    {"write_kv", 8, write_kv_twin},
    {"paged_attention_bf16_64", 12, attention_twin<Bf16, 64>},
    {"paged_attention_bf16_128", 12, attention_twin<Bf16, 128>},
    {"paged_attention_fp16_64", 12, attention_twin<Fp16, 64>},
    {"paged_attention_fp16_128", 12, attention_twin<Fp16, 128>},
    {"merge_splits_bf16_64", 4, merge_splits_twin<Bf16, 64>},
    {"merge_splits_bf16_128", 4, merge_splits_twin<Bf16, 128>},
    {"merge_splits_fp16_64", 4, merge_splits_twin<Fp16, 64>},
    {"merge_splits_fp16_128", 4, merge_splits_twin<Fp16, 128>},
    {"kv_addresses", 4, kv_addresses_twin},
    {"bf16_to_float", 3, to_float_twin<Bf16>},
    {"fp16_to_float", 3, to_float_twin<Fp16>},
    {"bf16_from_float", 3, from_float_twin<Bf16>},
    {"fp16_from_float", 3, from_float_twin<Fp16>},
};

void run(const Launch& launch) {
    for (const Twin& twin : TWINS) {
        if (launch.name != twin.name) continue;
        if (launch.argument_count != twin.argument_count) refuse("wrong number of arguments");
        return twin.run(launch);
    }
    refuse("no kernel " + launch.name);
}

// ---------------------------------------------------------------------------------- requests

// One allocation of exactly its bytes; what lies before a misaligned one is out of bounds too.
class Memory {
public:
    Memory(u64 length, u64 misalignment) : length_(length) {
        if (misalignment >= 256) refuse("a misalignment of 256 or more");
        const u64 end = misalignment + length, whole_length = (end + 255) / 256 * 256;
        whole_ = static_cast<u8*>(std::aligned_alloc(256, whole_length));
        start_ = whole_ + misalignment;
        ASAN_POISON_MEMORY_REGION(whole_, misalignment);
        ASAN_POISON_MEMORY_REGION(start_ + length, whole_length - end);
    }
    Memory(const Memory&) = delete;
    Memory(Memory&& other) noexcept
        : whole_(other.whole_), start_(other.start_), length_(other.length_) {
        other.whole_ = nullptr;
    }
    ~Memory() { std::free(whole_); }

    u8* start() const { return start_; }
    u64 length() const { return length_; }

private:
    u8 *whole_, *start_;
    u64 length_;
};

bool read_all(void* target, u64 length) {
    return std::fread(target, 1, length, stdin) == length;
}

u64 read_number() {
    u64 number;
    if (!read_all(&number, sizeof number)) refuse("a request ends too early");
    return number;
}

std::vector<Memory> read_memories() {
    std::vector<Memory> memories;
    for (u64 count = read_number(); count > 0; --count) {
        const u64 length = read_number();
        memories.emplace_back(length, read_number());
        if (!read_all(memories.back().start(), length)) refuse("a request ends too early");
    }
    return memories;
}

void resolve_references(const std::vector<Memory>& memories) {
    for (u64 count = read_number(); count > 0; --count) {
        const u64 memory = read_number(), offset = read_number(), target = read_number();
        if (memory >= memories.size() || target >= memories.size() ||
            memories[memory].length() < offset + 8) {
            refuse("a reference from or to nowhere");
        }
        u8* place = memories[memory].start() + offset;
        u64 number;
        std::memcpy(&number, place, sizeof number);
        number += reinterpret_cast<u64>(memories[target].start());
        std::memcpy(place, &number, sizeof number);
    }
}

}  // namespace

int main() {
    u64 length;
    while (read_all(&length, sizeof length)) {
        if (length > 256) refuse("a name of more than 256 bytes");
        Launch launch;
        launch.name.resize(length);
        if (!read_all(launch.name.data(), length)) refuse("a request ends too early");
        launch.grid_count = read_number();
        launch.block_threads = read_number();
        const std::vector<Memory> memories = read_memories();
        if (memories.empty()) refuse("a launch without arguments");
        resolve_references(memories);
        launch.arguments = reinterpret_cast<const u64*>(memories[0].start());
        launch.argument_count = memories[0].length() / 8;
        run(launch);
        for (const Memory& memory : memories) {
            if (std::fwrite(memory.start(), 1, memory.length(), stdout) != memory.length()) {
                refuse("nobody reads");
            }
        }
        std::fflush(stdout);
    }
    return 0;
}
