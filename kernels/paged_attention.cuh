// Decode attention over paged KV: one query a request, its KV found through a block table.
//
// A work item is a request, a KV head, up to HEADS of the query heads that share it, and one of
// `split_count` stretches of its tokens. Teams of lanes take tokens in turn; a lane holds 8
// elements of a row. Every team keeps a softmax of its own, and records of them are merged: first
// those of a thread block, then, where tokens were split, those of the splits. The loop is the
// same on the GPU, where a thread is one lane of a team, and in the twin, where it is all of them.
#pragma once

#include "kv_core.cuh"

namespace kvtier {

constexpr int ATTENTION_THREADS = 128;  // Of a thread block.
// Query heads that read a row together.
constexpr int HEADS = 4;
// Tokens of a team under way at a time: 8 loads of 16 bytes a lane.
constexpr int TOKENS_AHEAD = 4;

struct AttentionCall {
    u64 out;             // [requests, query heads, WIDTH], as the queries.
    u64 queries;
    const i32* tables;   // [requests, table_blocks]; null: a request's blocks follow one another.
    i64 table_blocks;
    const i32* kv_counts;
    u64 request_count, query_heads;
    i64 layer;
    float scale;         // Of the scores, times log2(e).
    u64 split_count;
    float* partials;     // [requests, query heads, splits] records; unused with one split.
};

// A softmax with what it has summed: best, total, two of padding, then the weighted values.
constexpr int RECORD_HEAD = 4;

template <int WIDTH>
constexpr int RECORD_FLOATS = RECORD_HEAD + WIDTH;

struct AttentionWork {
    u64 request, kv_head, first_query_head, split;
    u32 head_count;  // At most HEADS.
    i64 first, end;  // Tokens.
};

KVTIER_BOTH u64 attention_work_count(const AttentionCall& call, const KvGeometry& kv) {
    const u64 shared_by = call.query_heads / u64(kv.head_count);
    return call.request_count * u64(kv.head_count) * ((shared_by + HEADS - 1) / HEADS) *
           call.split_count;
}

KVTIER_BOTH AttentionWork attention_work(
    const AttentionCall& call, const KvGeometry& kv, u64 index) {
    AttentionWork work;
    work.split = index % call.split_count;
    index /= call.split_count;
    const u64 shared_by = call.query_heads / u64(kv.head_count);
    const u64 parts = (shared_by + HEADS - 1) / HEADS;
    const u64 skipped = index % parts * HEADS;
    index /= parts;
    work.kv_head = index % u64(kv.head_count);
    work.request = index / u64(kv.head_count);
    work.first_query_head = work.kv_head * shared_by + skipped;
    work.head_count = u32(shared_by - skipped < HEADS ? shared_by - skipped : HEADS);
    const i64 count = call.kv_counts[work.request];
    const i64 splits = i64(call.split_count);
    const i64 span = (count + splits - 1) / splits;
    work.first = i64(work.split) * span;  // A split beyond the last token has none.
    work.end = work.first + span < count ? work.first + span : count;
    return work;
}

KVTIER_BOTH u64 token_address(
    const AttentionCall& call, const KvGeometry& kv, const AttentionWork& work, i64 token) {
    // 32 bits: a division of 64 takes five times as long, and every row needs one.
    const u32 index = u32(token) / u32(kv.block_tokens);
    const i64 place = i64(work.request) * call.table_blocks + index;
    const i64 block = call.tables ? i64(call.tables[place]) : place;
    return key_address(
        kv, call.layer, block, i64(work.kv_head), token - i64(index) * kv.block_tokens);
}

template <int HELD>
struct HeldRows {
    float elements[HELD][HEADS][WORD_ELEMENTS];
};

// The queries of this thread's lanes, scaled; zero for heads that are not there.
template <typename TEAM, typename ELEMENT, int WIDTH>
KVTIER_BOTH void take_queries(
    const AttentionCall& call, const AttentionWork& work, const TEAM& team,
    HeldRows<TEAM::HELD>& queries) {
    KVTIER_UNROLL
    for (int held = 0; held < TEAM::HELD; ++held) {
        KVTIER_UNROLL
        for (int head = 0; head < HEADS; ++head) {
            Word16 word{0, 0, 0, 0};
            if (u32(head) < work.head_count) {
                const u64 row = work.request * call.query_heads + work.first_query_head + u64(head);
                word = reinterpret_cast<const Word16*>(
                    call.queries)[row * (WIDTH / WORD_ELEMENTS) + u64(team.first_lane + held)];
            }
            unpack<ELEMENT>(word, queries.elements[held][head]);
            KVTIER_UNROLL
            for (int element = 0; element < WORD_ELEMENTS; ++element) {
                queries.elements[held][head][element] *= call.scale;
            }
        }
    }
}

template <typename TEAM, typename ELEMENT>
KVTIER_BOTH void add_values(
    const Word16 (&words)[TEAM::HELD], const float (&weights)[HEADS],
    HeldRows<TEAM::HELD>& weighted) {
    KVTIER_UNROLL
    for (int held = 0; held < TEAM::HELD; ++held) {
        float elements[WORD_ELEMENTS];
        unpack<ELEMENT>(words[held], elements);
        KVTIER_UNROLL
        for (int head = 0; head < HEADS; ++head) {
            KVTIER_UNROLL
            for (int element = 0; element < WORD_ELEMENTS; ++element) {
                weighted.elements[held][head][element] += weights[head] * elements[element];
            }
        }
    }
}

// Scores of one row for every head, summed over the team's lanes.
template <typename TEAM, typename ELEMENT>
KVTIER_BOTH void score_row(
    const TEAM& team, const Word16 (&words)[TEAM::HELD], const HeldRows<TEAM::HELD>& queries,
    float (&scores)[HEADS]) {
    float parts[HEADS][TEAM::HELD];
    KVTIER_UNROLL
    for (int held = 0; held < TEAM::HELD; ++held) {
        float elements[WORD_ELEMENTS];
        unpack<ELEMENT>(words[held], elements);
        KVTIER_UNROLL
        for (int head = 0; head < HEADS; ++head) {
            float sum = 0.0f;
            KVTIER_UNROLL
            for (int element = 0; element < WORD_ELEMENTS; ++element) {
                sum += elements[element] * queries.elements[held][head][element];
            }
            parts[head][held] = sum;
        }
    }
    KVTIER_UNROLL
    for (int head = 0; head < HEADS; ++head) scores[head] = team.sum(parts[head]);
}

// The team's tokens of a work item. All teams of a warp run the same number of rounds, for their
// lanes add up scores together: past the end, the last token is read again and does not count.
template <typename TEAM, typename ELEMENT, int WIDTH>
KVTIER_BOTH void attend_share(
    const AttentionCall& call, const KvGeometry& kv, const AttentionWork& work, const TEAM& team,
    float* records) {
    HeldRows<TEAM::HELD> queries, weighted = {};
    take_queries<TEAM, ELEMENT, WIDTH>(call, work, team, queries);
    Softmax states[HEADS];
    KVTIER_UNROLL
    for (int head = 0; head < HEADS; ++head) states[head] = Softmax{NO_SCORE, 0.0f};

    const i64 stride = team.count;
    KVTIER_ROLLED
    for (i64 round = work.first; round < work.end; round += TOKENS_AHEAD * stride) {
        Word16 keys[TOKENS_AHEAD][TEAM::HELD], values[TOKENS_AHEAD][TEAM::HELD];
        KVTIER_UNROLL
        for (int ahead = 0; ahead < TOKENS_AHEAD; ++ahead) {
            const i64 token = round + ahead * stride + team.index;
            const u64 key =
                token_address(call, kv, work, token < work.end ? token : work.end - 1);
            const Word16* row = reinterpret_cast<const Word16*>(key) + team.first_lane;
            const Word16* value_row =
                reinterpret_cast<const Word16*>(key + u64(kv.value_step)) + team.first_lane;
            KVTIER_UNROLL
            for (int held = 0; held < TEAM::HELD; ++held) {
                keys[ahead][held] = load_shared_word(row + held);
                values[ahead][held] = load_shared_word(value_row + held);
            }
        }
        float scores[TOKENS_AHEAD][HEADS];
        KVTIER_UNROLL
        for (int ahead = 0; ahead < TOKENS_AHEAD; ++ahead) {
            score_row<TEAM, ELEMENT>(team, keys[ahead], queries, scores[ahead]);
        }
        float weights[TOKENS_AHEAD][HEADS];
        KVTIER_UNROLL
        for (int head = 0; head < HEADS; ++head) {
            float highest = NO_SCORE;
            KVTIER_UNROLL
            for (int ahead = 0; ahead < TOKENS_AHEAD; ++ahead) {
                const bool counts = round + ahead * stride + team.index < work.end;
                if (counts) highest = larger(highest, scores[ahead][head]);
            }
            const float shrink = raise_best(states[head], highest);
            KVTIER_UNROLL
            for (int held = 0; held < TEAM::HELD; ++held) {
                KVTIER_UNROLL
                for (int element = 0; element < WORD_ELEMENTS; ++element) {
                    weighted.elements[held][head][element] *= shrink;
                }
            }
            KVTIER_UNROLL
            for (int ahead = 0; ahead < TOKENS_AHEAD; ++ahead) {
                const bool counts = round + ahead * stride + team.index < work.end;
                weights[ahead][head] = counts ? add_score(states[head], scores[ahead][head]) : 0.0f;
            }
        }
        KVTIER_UNROLL
        for (int ahead = 0; ahead < TOKENS_AHEAD; ++ahead) {
            add_values<TEAM, ELEMENT>(values[ahead], weights[ahead], weighted);
        }
    }
    KVTIER_UNROLL
    for (int head = 0; head < HEADS; ++head) {
        float* record = records + (team.index * HEADS + head) * RECORD_FLOATS<WIDTH>;
        if (team.first_lane == 0) {
            record[0] = states[head].best;
            record[1] = states[head].total;
        }
        KVTIER_UNROLL
        for (int held = 0; held < TEAM::HELD; ++held) {
            KVTIER_UNROLL
            for (int element = 0; element < WORD_ELEMENTS; ++element) {
                const int place = (team.first_lane + held) * WORD_ELEMENTS + element;
                record[RECORD_HEAD + place] = weighted.elements[held][head][element];
            }
        }
    }
}

struct Merged {
    Softmax state;
    float weighted;
};

// One element of `count` records, each `stride` floats after the one before.
KVTIER_BOTH Merged merge_records(const float* records, u64 count, u64 stride, int element) {
    Merged merged{Softmax{NO_SCORE, 0.0f}, 0.0f};
    for (u64 index = 0; index < count; ++index) {
        merged.state.best = larger(merged.state.best, records[index * stride]);
    }
    for (u64 index = 0; index < count; ++index) {
        const float* record = records + index * stride;
        const float shrink = exp2_of(record[0] - merged.state.best);
        merged.state.total += shrink * record[1];
        merged.weighted += shrink * record[RECORD_HEAD + element];
    }
    return merged;
}

// Of no tokens, zeros.
template <typename ELEMENT>
KVTIER_BOTH u16 attention_element(const Merged& merged) {
    const bool is_empty = merged.state.total == 0.0f;
    return ELEMENT::from_float(is_empty ? 0.0f : merged.weighted / merged.state.total);
}

// The records of a work item's teams become its output, or one record of its split.
template <typename ELEMENT, int WIDTH>
KVTIER_BOTH void finish_share(
    const AttentionCall& call, const AttentionWork& work, const float* records, u32 team_count,
    u32 thread, u32 threads) {
    for (u32 place = thread; place < work.head_count * WIDTH; place += threads) {
        const u32 head = place / WIDTH;
        const int element = int(place % WIDTH);
        const Merged merged = merge_records(
            records + head * RECORD_FLOATS<WIDTH>, team_count, HEADS * RECORD_FLOATS<WIDTH>,
            element);
        const u64 row = work.request * call.query_heads + work.first_query_head + head;
        if (call.split_count == 1) {
            reinterpret_cast<u16*>(call.out)[row * WIDTH + u64(element)] =
                attention_element<ELEMENT>(merged);
            continue;
        }
        float* record =
            call.partials + (row * call.split_count + work.split) * RECORD_FLOATS<WIDTH>;
        if (element == 0) {
            record[0] = merged.state.best;
            record[1] = merged.state.total;
        }
        record[RECORD_HEAD + element] = merged.weighted;
    }
}

// After all splits: one output row for each request and query head.
template <typename ELEMENT, int WIDTH>
KVTIER_BOTH void merge_splits_share(
    u64 out, const float* partials, u64 row_count, u64 split_count, const Worker& worker) {
    for (u64 row = worker.index; row < row_count; row += worker.count) {
        const float* records = partials + row * split_count * RECORD_FLOATS<WIDTH>;
        for (int element = int(worker.lane); element < WIDTH; element += int(worker.lanes)) {
            const Merged merged =
                merge_records(records, split_count, RECORD_FLOATS<WIDTH>, element);
            reinterpret_cast<u16*>(out)[row * WIDTH + u64(element)] =
                attention_element<ELEMENT>(merged);
        }
    }
}

}  // namespace kvtier
