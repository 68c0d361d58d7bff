// What the kernels compute: where KV lies, how bytes are copied, how the softmax goes on.
//
// Every function here runs on the GPU and, through host_twin.cpp, on the host under sanitizers:
// the .cu files hold grids and nothing else. No header is included, so that NVRTC compiles the
// sources as they are. Addresses travel as 64-bit numbers, as do all arguments of a kernel.
#pragma once

#if defined(__CUDACC__)
#define KVTIER_BOTH __host__ __device__ __forceinline__
#define KVTIER_UNROLL _Pragma("unroll")
#define KVTIER_ROLLED _Pragma("unroll 1")
#define KVTIER_WORD(width) alignas(width)
#else
#define KVTIER_BOTH inline
#define KVTIER_UNROLL
#define KVTIER_ROLLED
// Words are read from memory of any type.
#define KVTIER_WORD(width) __attribute__((may_alias, aligned(width)))
#endif

namespace kvtier {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// ------------------------------------------------------------------------------------- words

struct KVTIER_WORD(16) Word16 {
    u32 x, y, z, w;
};
struct KVTIER_WORD(8) Word8 {
    u32 x, y;
};
struct KVTIER_WORD(4) Word4 {
    u32 x;
};
struct KVTIER_WORD(1) Word1 {
    u8 x;
};

// Bytes of a copy are not read again soon: they should not push the model's own out of the cache.
// Never by the read-only path: host memory may be written by others while a kernel runs.
KVTIER_BOTH Word16 load_word(const Word16* place) {
#if defined(__CUDA_ARCH__)
    const uint4 word = __ldcs(reinterpret_cast<const uint4*>(place));
    return Word16{word.x, word.y, word.z, word.w};
#else
    return *place;
#endif
}

KVTIER_BOTH Word8 load_word(const Word8* place) {
#if defined(__CUDA_ARCH__)
    const uint2 word = __ldcs(reinterpret_cast<const uint2*>(place));
    return Word8{word.x, word.y};
#else
    return *place;
#endif
}

KVTIER_BOTH Word4 load_word(const Word4* place) {
#if defined(__CUDA_ARCH__)
    return Word4{__ldcs(reinterpret_cast<const u32*>(place))};
#else
    return *place;
#endif
}

KVTIER_BOTH Word1 load_word(const Word1* place) {
#if defined(__CUDA_ARCH__)
    return Word1{__ldcs(reinterpret_cast<const u8*>(place))};
#else
    return *place;
#endif
}

// Bytes that other thread blocks read too: kept in the cache they share.
KVTIER_BOTH Word16 load_shared_word(const Word16* place) {
#if defined(__CUDA_ARCH__)
    const uint4 word = __ldcg(reinterpret_cast<const uint4*>(place));
    return Word16{word.x, word.y, word.z, word.w};
#else
    return *place;
#endif
}

KVTIER_BOTH void store_word(Word16* place, Word16 word) {
#if defined(__CUDA_ARCH__)
    __stcs(reinterpret_cast<uint4*>(place), make_uint4(word.x, word.y, word.z, word.w));
#else
    *place = word;
#endif
}

KVTIER_BOTH void store_word(Word8* place, Word8 word) {
#if defined(__CUDA_ARCH__)
    __stcs(reinterpret_cast<uint2*>(place), make_uint2(word.x, word.y));
#else
    *place = word;
#endif
}

KVTIER_BOTH void store_word(Word4* place, Word4 word) {
#if defined(__CUDA_ARCH__)
    __stcs(reinterpret_cast<u32*>(place), word.x);
#else
    *place = word;
#endif
}

KVTIER_BOTH void store_word(Word1* place, Word1 word) {
#if defined(__CUDA_ARCH__)
    __stcs(reinterpret_cast<u8*>(place), word.x);
#else
    *place = word;
#endif
}

// ------------------------------------------------------------------------------------ copies

// Of `count` threads or groups of threads that share the work, number `index`; within it, one
// lane of `lanes`.
struct Worker {
    u64 index, count;
    u32 lane, lanes;
};

// A warp's 32 lanes with 4 words of 16 bytes each in flight.
constexpr u64 TILE_BYTES = 2048;

// The lane's share. Four loads are under way before the first store waits for one: bytes in
// flight over the time of a round trip are the bandwidth.
template <typename WORD>
KVTIER_BOTH void copy_words(u64 target, u64 source, u32 count, u32 lane, u32 lanes) {
    WORD* to = reinterpret_cast<WORD*>(target);
    const WORD* from = reinterpret_cast<const WORD*>(source);
    u32 index = lane;
    KVTIER_ROLLED
    for (; index + 3 * lanes < count; index += 4 * lanes) {
        WORD words[4];
        KVTIER_UNROLL
        for (u32 ahead = 0; ahead < 4; ++ahead) {
            words[ahead] = load_word(from + (index + ahead * lanes));
        }
        KVTIER_UNROLL
        for (u32 ahead = 0; ahead < 4; ++ahead) {
            store_word(to + (index + ahead * lanes), words[ahead]);
        }
    }
    KVTIER_ROLLED
    for (; index < count; index += lanes) store_word(to + index, load_word(from + index));
}

// Before and after the words: a few bytes, and then not worth a loop of their own.
KVTIER_BOTH void copy_few(u64 target, u64 source, u32 count, u32 lane, u32 lanes) {
    Word1* to = reinterpret_cast<Word1*>(target);
    const Word1* from = reinterpret_cast<const Word1*>(source);
    KVTIER_ROLLED
    for (u32 index = lane; index < count; index += lanes) {
        store_word(to + index, load_word(from + index));
    }
}

// As words where both sides are aligned alike, single bytes before and after them.
template <typename WORD>
KVTIER_BOTH void copy_aligned(u64 target, u64 source, u32 size, u32 lane, u32 lanes) {
    constexpr u32 width = sizeof(WORD);
    u32 head = (0u - u32(target)) & (width - 1);
    if (head > size) head = size;
    const u32 count = (size - head) / width;
    const u32 done = head + count * width;
    copy_few(target, source, head, lane, lanes);
    copy_words<WORD>(target + head, source + head, count, lane, lanes);
    copy_few(target + done, source + done, size - done, lane, lanes);
}

// Any addresses, less than 1 GiB; the lanes together copy every byte once.
KVTIER_BOTH void copy_bytes(u64 target, u64 source, u32 size, u32 lane, u32 lanes) {
    const u32 apart = u32(target) - u32(source);
    if ((apart & 15) == 0) {
        copy_aligned<Word16>(target, source, size, lane, lanes);
    } else if ((apart & 7) == 0) {
        copy_aligned<Word8>(target, source, size, lane, lanes);
    } else if ((apart & 3) == 0) {
        copy_aligned<Word4>(target, source, size, lane, lanes);
    } else {
        copy_words<Word1>(target, source, size, lane, lanes);
    }
}

// Tiles `first`, `first + stride`, ... of a run: right for any stride of which all firsts are
// taken, so that a stride too small costs time and no bytes.
KVTIER_BOTH void copy_tiles(
    u64 target, u64 source, u64 size, u64 first, u64 stride, const Worker& worker) {
    KVTIER_ROLLED
    for (u64 offset = first * TILE_BYTES; offset < size; offset += stride * TILE_BYTES) {
        const u64 rest = size - offset;
        const u32 length = u32(rest < TILE_BYTES ? rest : TILE_BYTES);
        copy_bytes(target + offset, source + offset, length, worker.lane, worker.lanes);
    }
}

// A table of runs: three columns of `run_count` numbers, targets, sources and sizes. A piece of
// copies (kvtier/cuda/copy_plan.py) has them; a run is shared by `tiles_per_run` workers.
KVTIER_BOTH void copy_runs_share(
    u64 table, u64 run_count, u64 tiles_per_run, const Worker& worker) {
    const u64* columns = reinterpret_cast<const u64*>(table);
    KVTIER_ROLLED
    for (u64 place = worker.index; place < run_count * tiles_per_run; place += worker.count) {
        const u64 run = place / tiles_per_run;
        copy_tiles(
            columns[run], columns[run_count + run], columns[2 * run_count + run],
            place - run * tiles_per_run, tiles_per_run, worker);
    }
}

// ------------------------------------------------------------------------------- whole blocks

// The runs of a block, as DeviceLayout has them: four columns of `run_count` numbers. Run r of
// block b lies at addresses[r] + b * steps[r], and at places[r] in a slot.
struct BlockRuns {
    const u64 *addresses, *steps, *sizes, *places;
    u64 run_count;
};

KVTIER_BOTH BlockRuns block_runs(u64 table, u64 run_count) {
    const u64* columns = reinterpret_cast<const u64*>(table);
    return BlockRuns{
        columns, columns + run_count, columns + 2 * run_count, columns + 3 * run_count, run_count};
}

KVTIER_BOTH u64 run_address(const BlockRuns& runs, u64 run, u64 block) {
    return runs.addresses[run] + block * runs.steps[run];
}

// Which of blocks x runs x tiles a worker has come to.
struct TileOfRun {
    u64 row, run, tile;
};

KVTIER_BOTH TileOfRun tile_of_run(u64 place, u64 run_count, u64 tiles_per_run) {
    const u64 rank = place / tiles_per_run;
    const u64 row = rank / run_count;
    return TileOfRun{row, rank - row * run_count, place - rank * tiles_per_run};
}

enum class Way { GATHER, SCATTER, WITHIN };

// GATHER: block firsts[i] to the contiguous bytes at address seconds[i]; SCATTER: back;
// WITHIN: block firsts[i] to block seconds[i].
template <Way WAY>
KVTIER_BOTH void copy_blocks_share(
    const BlockRuns& runs, const u64* firsts, const u64* seconds, u64 row_count,
    u64 tiles_per_run, const Worker& worker) {
    const u64 total = row_count * runs.run_count * tiles_per_run;
    KVTIER_ROLLED
    for (u64 place = worker.index; place < total; place += worker.count) {
        const TileOfRun at = tile_of_run(place, runs.run_count, tiles_per_run);
        const u64 block = run_address(runs, at.run, firsts[at.row]);
        const u64 other = WAY == Way::WITHIN ? run_address(runs, at.run, seconds[at.row])
                                             : seconds[at.row] + runs.places[at.run];
        const u64 target = WAY == Way::SCATTER ? block : other;
        const u64 source = WAY == Way::SCATTER ? other : block;
        copy_tiles(target, source, runs.sizes[at.run], at.tile, tiles_per_run, worker);
    }
}

// ------------------------------------------------------------------- where a token's KV lies

// The KV of one group of layers, by strides in bytes. Every layout that engines use is one of
// these, with the steps in another order of size: keys and values apart (value_step spans a whole
// tensor) or side by side in a token's content, blocks outermost or layers, heads outside of
// tokens, outside of blocks, or inside. One latent for both (MLA): one head, its rotary part in
// the place of the value. A contiguous cache: block_step is block_tokens * token_step.
// Layers in tensors of their own: a geometry each, layer 0.
struct KvGeometry {
    i64 base;
    i64 layer_step, block_step, head_step, token_step, value_step;
    i64 block_count, block_tokens, head_count;
    i64 key_bytes, value_bytes;  // Of one token and head.
};

KVTIER_BOTH u64 key_address(const KvGeometry& kv, i64 layer, i64 block, i64 head, i64 token) {
    return static_cast<u64>(
        kv.base + layer * kv.layer_step + block * kv.block_step + head * kv.head_step +
        token * kv.token_step);
}

KVTIER_BOTH u64 value_address(const KvGeometry& kv, i64 layer, i64 block, i64 head, i64 token) {
    return key_address(kv, layer, block, head, token) + static_cast<u64>(kv.value_step);
}

// New keys and values of a step, [tokens, heads, bytes] with a token every *_token_step bytes.
struct NewTokens {
    u64 keys, key_token_step;
    u64 values, value_token_step;
    const i64* places;  // Of each token: block * block_tokens + token; negative for padding.
    u64 count;
};

// A place outside of the cache is left out: it would be somebody else's memory.
KVTIER_BOTH void write_kv_share(
    const NewTokens& tokens, const KvGeometry& kv, i64 layer, const Worker& worker) {
    const u64 heads = static_cast<u64>(kv.head_count);
    KVTIER_ROLLED
    for (u64 place = worker.index; place < tokens.count * heads * 2; place += worker.count) {
        const u64 row = place >> 1;
        const u64 token = row / heads;
        const u64 head = row - token * heads;
        const i64 where = tokens.places[token];
        if (where < 0 || where >= kv.block_count * kv.block_tokens) continue;
        const i64 block = where / kv.block_tokens;
        const u64 key = key_address(
            kv, layer, block, static_cast<i64>(head), where - block * kv.block_tokens);
        const bool is_value = place & 1;
        const u32 size = u32(is_value ? kv.value_bytes : kv.key_bytes);
        const u64 source = is_value ? tokens.values + token * tokens.value_token_step
                                    : tokens.keys + token * tokens.key_token_step;
        const u64 target = is_value ? key + static_cast<u64>(kv.value_step) : key;
        copy_bytes(target, source + head * size, size, worker.lane, worker.lanes);
    }
}

// ------------------------------------------------------------------------ numbers of 16 bits

KVTIER_BOTH float float_of_bits(u32 bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

KVTIER_BOTH u32 bits_of_float(float value) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    u32 bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

struct Bf16 {
    static KVTIER_BOTH float to_float(u16 bits) { return float_of_bits(u32(bits) << 16); }

    // To the nearest, ties to even; a NaN stays one.
    static KVTIER_BOTH u16 from_float(float value) {
        const u32 bits = bits_of_float(value);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return u16((bits >> 16) | 0x40u);
        return u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
};

struct Fp16 {
    static KVTIER_BOTH float to_float(u16 bits) {
#if defined(__CUDA_ARCH__)
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
#else
        const u32 sign = u32(bits & 0x8000u) << 16;
        const u32 rest = bits & 0x7fffu;
        if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
        if (rest < 0x400u) {  // Subnormal: a multiple of 2^-24.
            const float size = float(rest) * float_of_bits(0x33800000u);
            return float_of_bits(sign | bits_of_float(size));
        }
        return float_of_bits(sign | ((rest << 13) + 0x38000000u));
#endif
    }

    static KVTIER_BOTH u16 from_float(float value) {
#if defined(__CUDA_ARCH__)
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
#else
        const u32 sign = (bits_of_float(value) >> 16) & 0x8000u;
        const u32 size = bits_of_float(value) & 0x7fffffffu;
        if (size > 0x7f800000u) return u16(0x7fffu);  // NaN, as the hardware has it.
        if (size >= 0x477ff000u) return u16(sign | 0x7c00u);  // Rounds beyond the largest.
        if (size < 0x38800000u) {  // Subnormal: adding 0.5 rounds at 2^-24.
            const float shifted = float_of_bits(size) + 0.5f;
            return u16(sign | (bits_of_float(shifted) - 0x3f000000u));
        }
        return u16(sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13));
#endif
    }
};

constexpr int WORD_ELEMENTS = 8;

template <typename ELEMENT>
KVTIER_BOTH void unpack(const Word16& word, float (&elements)[WORD_ELEMENTS]) {
    const u32 pairs[4] = {word.x, word.y, word.z, word.w};
    KVTIER_UNROLL
    for (int pair = 0; pair < 4; ++pair) {
        elements[2 * pair] = ELEMENT::to_float(u16(pairs[pair] & 0xffffu));
        elements[2 * pair + 1] = ELEMENT::to_float(u16(pairs[pair] >> 16));
    }
}

// ----------------------------------------------------------------------------------- softmax

KVTIER_BOTH float exp2_of(float exponent) {
#if defined(__CUDA_ARCH__)
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
#else
    return __builtin_exp2f(exponent);
#endif
}

KVTIER_BOTH float larger(float one, float other) { return one < other ? other : one; }

// Below every score, and finite: the difference of two is 0 and not NaN.
constexpr float NO_SCORE = -3.402823466e38f;

// The softmax of the scores seen so far, in powers of two: `total` is the sum of
// 2^(score - best), and so are the weights of the values that are summed beside it.
struct Softmax {
    float best, total;
};

// Lets the next highest score in; what was summed so far shrinks by the factor returned.
KVTIER_BOTH float raise_best(Softmax& state, float score) {
    const float best = larger(state.best, score);
    const float shrink = exp2_of(state.best - best);
    state.best = best;
    state.total *= shrink;
    return shrink;
}

// The weight of a score that is not above the best one.
KVTIER_BOTH float add_score(Softmax& state, float score) {
    const float weight = exp2_of(score - state.best);
    state.total += weight;
    return weight;
}

}  // namespace kvtier
